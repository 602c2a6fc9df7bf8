"""The shared parts of the demo's acts: the cluster, the whoami Service, and two ways to check answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.text import Text

from lab.cluster import LabCluster, NotInTimeError
from lab.demo.asking import Tally, tally
from lab.demo.kernel import Sizes
from lab.demo.ledger import Check, Ledger
from lab.demo.report import Cells, Report, milliseconds, short
from lab.demo.traffic import Sighting, Traffic
from lab.probes import NoAnswer
from lab.proxyprocess import Proxy
from lab.topology import CLIENT_HOST, NODE_A, OUTSIDE_IP, OUTSIDE_IP6, host

Json = dict[str, Any]
NAME, PORT, REPLICAS = "whoami", 3000, 3
LABELS = {"app": "whoami", "env": "dev"}
SELECTOR = "app=whoami,env=dev"
ENOUGH = 60
"""Number of requests after which a pod without an answer counts as missing: with three pods an error of 1 in 10^10."""
IN_TIME = 3.0
"""Seconds within which a change must take effect; nearly all changes take milliseconds."""
REFUSAL_PATIENCE = {"udp": 0.3, "tcp": 1.5}
"""Linux reports an ICMPv6 reject to a TCP client on the same machine only after its second SYN, a second later."""

ORIGINS = {"pod": "a pod", "node": "the node", "outside": "outside"}
CLIENTS = {
    "pod": {host(NODE_A.pod_cidr, CLIENT_HOST), host(NODE_A.pod_cidr6, CLIENT_HOST)},
    "outside": {OUTSIDE_IP, OUTSIDE_IP6},
}
NODE_ADDRESSES = {
    *NODE_A.addresses,
    NODE_A.second_ip,
    host(NODE_A.pod_cidr, 1),
    host(NODE_A.pod_cidr6, 1),
}


@dataclass(frozen=True, slots=True)
class Front:
    """An address and port of a Service."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def seen_as(origin: str, clients: set[str]) -> str:
    """Return the origin of the source addresses that the pods saw: "the client", "the node", or other addresses."""
    if not clients:
        return "-"
    if clients <= NODE_ADDRESSES:
        return "the node"
    return "the client" if clients <= CLIENTS.get(origin, set()) else ", ".join(sorted(clients))


def names_of(pods: set[str]) -> str:
    """Return the pods' names for printing."""
    return " ".join(sorted(short(p) for p in pods)) or "none"


@dataclass
class Stage:
    """One run of the demo."""

    cluster: LabCluster
    proxy: Proxy
    report: Report
    ledger: Ledger
    flood: Traffic
    """The client outside that measures the durations of changes."""
    empty: Sizes = field(default_factory=Sizes)
    """The numbers of chains, rules and elements before the demo created Services."""
    pods: list[str] = field(default_factory=list)

    def service(self, patch: Json) -> Json:
        """Change the spec of the whoami Service; return the Service."""
        return self.cluster.patch("services", NAME, {"spec": patch})

    def hold(self, name: str, ok: bool, expected: str, got: str) -> bool:
        """Record a check, and print it if it fails."""
        if not self.ledger.hold(name, ok, expected, got):
            self.report.wrong(self.ledger.checks[-1])
        return ok

    async def refresh_pods(self) -> list[Json]:
        """Wait for the three pods; return them, and store their names."""
        pods = await self.cluster.pods_ready(SELECTOR, REPLICAS)
        self.pods = sorted(p["metadata"]["name"] for p in pods)
        return pods

    async def ask(self, origin: str, proto: str, front: Front, count: int = ENOUGH, **how: Any) -> Tally:
        """Send requests from a place, and count the connections."""
        heard = await tally(self.cluster, origin, proto, front.address, front.port, count, **how)
        self.ledger.connections += heard.asked
        return heard

    async def settled(self, fronts: Sequence[Front]) -> None:
        """Wait until every pod answers at each address: the proxy programs one family after the other.

        A missing answer is no error here; the later checks find it.
        """
        every = set(self.pods)
        for front in fronts:
            if not await self.until_answers(lambda h: h.pods == every, "outside", front, ENOUGH, patience=0.1):
                return

    async def timed(self, change: str, work: Callable[[], object], front: Front, who: str = "") -> str:
        """Make a change and wait for the client's first answer from the pod `who` (any pod, if empty) at an address.

        Returns the duration as text. If no answer arrives in time, a check fails.
        """
        await self.flood.aim(front.address, front.port)
        start = monotonic()
        work()
        seen = await self.first_answer(change, who)
        if seen is None:
            return "no answer in time"
        self.ledger.took(change, seen.heard - start)
        return milliseconds(seen.heard - start)

    async def first_answer(self, change: str, who: str = "") -> Sighting | None:
        """Return the client's first answer since the mark, then pause the client; without an answer a check fails and
        the result is None.
        """
        try:
            return await (self.flood.saw(who, IN_TIME) if who else self.flood.saw_a_pod(IN_TIME))
        except NotInTimeError as e:
            self.hold(change, False, f"an answer from {short(who) or 'a pod'}", str(e))
            return None
        finally:
            await self.flood.rest()

    async def spread(self, kind: str, fronts: Sequence[Front], expected: dict[str, str]) -> None:
        """Send requests from everywhere by TCP and UDP; every pod must answer, and must see the client address that
        `expected` names.
        """
        await self.settled(fronts)
        rows = [(origin, front) for origin in ORIGINS for front in fronts]
        asked = [(o, f, p) for o, f in rows for p in ("tcp", "udp")]
        heard = dict(zip(asked, await asyncio.gather(*(self.ask(o, p, f) for o, f, p in asked)), strict=True))
        lines: list[Cells] = []
        complaints: list[Check] = []
        for origin, front in rows:
            verdicts = []
            for proto in ("tcp", "udp"):
                got = heard[origin, front, proto]
                name = f"{kind}, {proto.upper()} from {ORIGINS[origin]} to {front}"
                verdicts.append(self._note_spread(name, origin, got, expected[origin]))
                complaints += [] if verdicts[-1] else [self.ledger.checks[-1]]
            tcp, udp = heard[origin, front, "tcp"], heard[origin, front, "udp"]
            counts = [self.report.count(p, t.counts[p]) for t in (tcp, udp) for p in self.pods]
            seen = seen_as(origin, tcp.clients | udp.clients)
            lines.append([ORIGINS[origin], str(front), *counts, seen, self.report.verdict(all(verdicts))])
        columns = [Text.assemble(f"{label}\n", self.report.pod(p)) for label, p in self._heads()]
        self.report.table(["from", "to", *columns, "pods see", ""], lines, "  " + "r" * len(columns))
        for check in complaints:
            self.report.wrong(check)

    def _heads(self) -> list[tuple[str, str]]:
        return [(proto if not i else "", p) for proto in ("TCP", "UDP") for i, p in enumerate(self.pods)]

    def _note_spread(self, name: str, origin: str, got: Tally, seen: str) -> bool:
        saw = seen_as(origin, got.clients)
        ok = got.failure is None and got.pods == set(self.pods) and saw == seen
        said = got.failure.value if got.failure else f"{names_of(got.pods)}, seeing {saw}"
        if got.failure and got.answers:
            said += f" after {len(got.answers)} answers"
        return self.ledger.hold(name, ok, f"answers from {names_of(set(self.pods))}, seeing {seen}", said)

    async def until_answers(
        self, holds: Callable[[Tally], bool], origin: str, front: Front, count: int = 12, proto: str = "tcp", **how: Any
    ) -> bool:
        """Send requests until `count` successive answers are as expected; return False at the timeout."""
        deadline = monotonic() + IN_TIME
        while not holds(await self.ask(origin, proto, front, count, **how)):
            if monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    async def refused(self, kind: str, fronts: Sequence[Front]) -> bool:
        """Send one request from everywhere; every client must get a refusal, not a timeout."""
        asked = [(o, f, p) for f in fronts for o in ORIGINS for p in ("tcp", "udp")]
        for front in fronts:
            await self.until_answers(lambda heard: heard.failure is NoAnswer.REFUSED, "outside", front, 1, proto="udp")
        heard = await asyncio.gather(*(self._ask_nobody(o, p, f) for o, f, p in asked))
        ok = True
        for (origin, front, proto), got in zip(asked, heard, strict=True):
            name = f"{kind}, {proto.upper()} from {ORIGINS[origin]} to {front}"
            said = got.failure.value if got.failure else "an answer"
            ok &= self.hold(name, got.failure is NoAnswer.REFUSED, "refused", said)
        return ok

    async def _ask_nobody(self, origin: str, proto: str, front: Front) -> Tally:
        """Send up to three requests to a refusing address: the kernel limits the rate of refusals."""
        for _ in range(3):
            got = await self.ask(origin, proto, front, 1, patience=REFUSAL_PATIENCE[proto])
            if got.failure is not NoAnswer.TIMEOUT:
                break
        return got
