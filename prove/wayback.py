"""Replaces our kube-proxy with the Go kube-proxy and back, under traffic: `python -m prove.wayback --peer PATH`, as
root.

Each journey runs in a separate cluster, in network namespaces, with Services whose features leave the most state in the
kernel. A last journey goes from the Go kube-proxy to itself: its failures are the baseline. Exit code 1 if a change to
the Go kube-proxy has more failures than the baseline, a change to ours has any, or a later change is not served.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from lab.cluster import LabCluster
from lab.probes import NoAnswer
from lab.proxyprocess import Proxy, ProxyError, configuration
from lab.topology import SECOND_OUTSIDE_IP
from prove.asking import KINDS, Client, Crowd, Figures
from support.live import Front, Live
from support.traffic import DUAL

Json = dict[str, Any]


class Program(NamedTuple):
    """A kube-proxy in a mode."""

    name: str
    mode: str

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


OURS, GO = "ours", "Go"
NFT, IPT = "nftables", "iptables"
JOURNEYS: Final = tuple(
    tuple(Program(*stop.split()) for stop in journey.split(", "))
    for journey in (
        "ours nftables, Go nftables, ours nftables",
        "ours nftables, Go iptables, ours nftables",
        "ours iptables, Go iptables, ours iptables",
        "ours iptables, Go nftables, ours iptables",
        "ours nftables, ours iptables, Go iptables, ours iptables, ours nftables, Go nftables",
        "Go nftables, Go nftables, Go iptables, Go iptables, Go nftables",
    )
)
"""The journeys; the other journeys are compared with the last."""

ALLOWED: Final = 3
"""How much longer a gap on the way to the Go kube-proxy may be than its baseline; a failed sync takes 30 s more."""

SETTLE: Final = 2.0
"""Seconds of traffic before a program ends, and after the next program is ready."""

SOURCES: Final = {"loadBalancerSourceRanges": ["192.168.100.1/32", "fd00:100::1/128"]}
STICKY: Final = {"sessionAffinity": "ClientIP"}
LOCAL: Final = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}


class Offer(NamedTuple):
    """A Service: its endpoints, fields of its spec, annotations, and its clients: place and kind of address."""

    endpoints: str
    spec: Json
    askers: tuple[tuple[str, str], ...]
    annotations: Mapping[str, str] = {}


OFFERS: Final = {
    "plain": Offer(
        "a1 a2 b1", {"type": "NodePort"}, (("pod", "cluster"), ("node", "cluster"), ("outside", "nodeport"))
    ),
    "sticky": Offer(
        "a2 a3 b2",
        STICKY | {"type": "NodePort"},
        (("pod", "cluster"), ("node", "cluster"), ("outside", "nodeport")),
    ),
    "sticky-local": Offer("a1 b2", STICKY | LOCAL, (("outside", "loadbalancer"), ("outside", "nodeport"))),
    "sticky-near": Offer("a3 a4 b3", STICKY | {"internalTrafficPolicy": "Local"}, (("pod", "cluster"),)),
    "ranged": Offer("a4 b2", SOURCES | {"type": "LoadBalancer"}, (("outside", "loadbalancer"), ("pod", "cluster"))),
    "hashed": Offer("a1 a4 b3", {}, (("pod", "cluster"),), {"kube-proxy-py/algorithm": "maglev-251"}),
    "weighted": Offer("a2 b1", {}, (("pod", "cluster"),), {"kube-proxy-py/weights": "node-b=50"}),
    "media": Offer("a1 b1", {}, (("pod", "cluster"),), {"kube-proxy-py/port-ranges": "2990-3010/tcp"}),
    "shrinking": Offer("a4 b3", {}, (("pod", "cluster"),)),
}
LASTING: Final = {"plain", "sticky", "sticky-local", "ranged"}
"""Services that also have open connections."""

OUR_FLAGS: Final = ("--connection-counters", "--reset-gone-endpoints", "--eject-failing-endpoints")
FORWARDING: Final = ("--connection-counters", "--fast-forward-after=3")
"""Fast forwarding and resets exclude each other."""

OUR_CONFIG: Final[dict[str, Json]] = {
    NFT: {"featureGates": {"KubeProxyNFTablesLocalhostNodePorts": True}, "nodePortAddresses": ["primary", "localhost"]},
    IPT: {"iptables": {"minSyncPeriod": "1ms"}},
}
GO_CONFIG: Final[Json] = {"clientConnection": {"contentType": "application/json"}}
CNI: Final = """table inet cni {
    chain masquerading { type nat hook postrouting priority 100; ip saddr 192.0.2.0/24 masquerade; }
}"""
"""Rules like those of a network plugin that masquerades. Without any NAT rule the kernel tracks and translates nothing,
and packets of open connections get lost."""

UNSYNCED: Final = {
    OURS: re.compile(r"^[EF]\d{4} |^Traceback|.*has no flowtables"),
    GO: re.compile(r"^F\d{4} |^E\d{4} .*(sync failed|Failed to (execute|ensure)|Unable to delete|Error cleaning)"),
}
FAILURES: Final = re.compile(r"^(kubeproxy_sync_proxy_rules_\w*failures_total\S*) (\S+)$", re.MULTILINE)


class Step(NamedTuple):
    """One change of programs, and the results of the requests of each kind during it."""

    before: Program
    after: Program
    found: Mapping[str, Figures]
    failures: Sequence[str] = ()
    """Return one line for each client that failed."""

    @property
    def line(self) -> str:
        """Return the row of the table."""
        gap = max(each.gap for each in self.found.values())
        cells = [str(self.before), str(self.after), *(str(self.found[kind]) for kind in KINDS), f"{gap:.1f} s"]
        return f"| {' | '.join(cells)} |"


HEAD: Final = (
    f"| from | to | {', failed | '.join(KINDS)}, failed | longest without an answer |\n|{'---|' * (3 + len(KINDS))}"
)


def faults(steps: Sequence[Step]) -> Iterator[str]:
    """Yield the failures beyond the baseline, in which the Go kube-proxy replaces itself between the same modes."""
    own = {(s.before.mode, s.after.mode): s.found for s in steps if s.before.name == s.after.name == GO}
    for step in steps:
        for kind, found in step.found.items():
            if not found.failed or step.before.name == step.after.name == GO:
                continue
            beside = own.get((step.before.mode, step.after.mode), {}).get(kind) if step.after.name == GO else None
            if beside is None or not beside.failed or found.gap > ALLOWED * beside.gap:
                than = f"{beside} and {beside.gap:.1f} s without us" if beside else "none may"
                yield f"{step.before} to {step.after}, {kind}: {found} failed, {found.gap:.1f} s: {than}"
                yield from [f"  {line}" for line in step.failures if line.startswith(kind)][:5]


def unsynced(name: str, log: str, metrics: str) -> list[str]:
    """Return the lines of a proxy's log and metrics about rules that were not programmed."""
    counted = [f"{series} {value}" for series, value in FAILURES.findall(metrics) if float(value)]
    return [line for line in log.splitlines() if UNSYNCED[name].match(line)][:5] + counted


class Setting(NamedTuple):
    """The Go kube-proxy's path, our flags in nftables mode, another program's rules, the number of further Services."""

    peer: str
    flags: Sequence[str] = OUR_FLAGS
    others: str = CNI
    more: int = 0


class Journey:
    """A cluster with Services, and one proxy after the other. `wrong` has the complaints."""

    def __init__(self, live: Live, setting: Setting) -> None:
        self._live = live
        self._setting = setting
        self._proxies: list[Proxy] = []
        self._made = 0
        self.wrong: list[str] = []

    async def play(self, programs: Sequence[Program]) -> list[Step]:
        """Replace the programs one after the other under traffic."""
        await self._live.add_pods()
        for name, offer in OFFERS.items():
            self._live.service(name, offer.endpoints, **offer.spec, **DUAL)
            self._live.cluster.patch("services", name, {"metadata": {"annotations": dict(offer.annotations)}})
        await self._live.until(lambda: all(map(self._live.has_addresses, OFFERS)), "addresses of load balancers")
        for number in range(self._setting.more):
            self._live.service(f"more-{number}", "a1 b1")
        if self._setting.others:
            await self._live.nft(self._setting.others)
        await self._start(programs[0])
        await self._changes(programs[0])
        await self._shrink()
        with Crowd(self._clients()) as crowd:
            times = [await self._step(before, after) for before, after in itertools.pairwise(programs)]
            await self._stop(programs[-1])
        return [
            Step(before, after, {kind: crowd.figures(kind, *time) for kind in KINDS}, crowd.failures(*time))
            for (before, after), time in zip(itertools.pairwise(programs), times, strict=True)
        ]

    async def _shrink(self) -> None:
        """Terminate and delete an endpoint, so that its connections are reset if this is enabled."""
        self._live.endpoints("shrinking", "a4 b3 b2/draining")
        await asyncio.sleep(0.5)
        self._live.endpoints("shrinking", OFFERS["shrinking"].endpoints)

    def _clients(self) -> Iterator[Client]:
        for (name, offer), family in itertools.product(OFFERS.items(), DUAL["ipFamilies"]):
            for (place, kind), asked in itertools.product(offer.askers, KINDS):
                front = self._live.front(name, kind, family, int(asked.endswith("UDP")))
                client = Client(
                    self._live.cluster.namespace_of(place),
                    place,
                    asked,
                    name,
                    front,
                    frozenset(offer.endpoints.split()),
                )
                if name in LASTING or not client.lasts:
                    yield client

    async def _step(self, before: Program, after: Program) -> tuple[float, float]:
        """Replace one program with the next; return the beginning and end of the replacement."""
        await asyncio.sleep(SETTLE)
        begin = time.monotonic()
        print(f"{before} to {after}", flush=True)
        await self._stop(before)
        await self._start(after)
        await self._changes(after)
        await asyncio.sleep(SETTLE)
        await self._look(after)
        return begin, time.monotonic()

    async def _start(self, program: Program) -> None:
        cluster = self._live.cluster
        if program.name == OURS:
            flags = self._setting.flags if program.mode == NFT else ()
            self._proxies.append(await self._live.start({"mode": program.mode} | OUR_CONFIG[program.mode], flags))
            return
        file = cluster.folder / f"go-{self._made}.yaml"
        file.write_text(yaml.safe_dump(configuration(cluster.node_kubeconfig, GO_CONFIG | {"mode": program.mode})))
        self._proxies.append(await cluster.launch_proxy([self._setting.peer, "--config", str(file)], file))
        await self._proxies[-1].wait_ready(60.0)

    async def _stop(self, program: Program) -> None:
        proxy = self._proxies[-1]
        metrics = await proxy.metrics()
        await proxy.stop()
        said = unsynced(program.name, proxy.log.read_text(errors="replace"), metrics)
        self.wrong += [f"{program}: {line}" for line in said]

    async def _changes(self, program: Program) -> None:
        """Create a Service and delete the previous one; clients must notice both."""
        old, self._made = self._made, self._made + 1
        name = f"later-{self._made}"
        self._live.service(name, "a1 b1", type="NodePort", **STICKY, **DUAL)
        fronts = self._fronts(name)
        gone = self._fronts(f"later-{old}") if old else []
        if old:
            self._live.delete(f"later-{old}")
        await self._awaited(f"{program}: {name}, made afterwards, is not served", fronts, {"a1", "b1"})
        await self._awaited(f"{program}: later-{old}, deleted afterwards, is still served", gone, set())

    def _fronts(self, name: str) -> list[tuple[str, Front]]:
        return [
            (place, self._live.front(name, kind, family))
            for place, kind in (("pod", "cluster"), ("node", "cluster"), ("outside", "nodeport"))
            for family in DUAL["ipFamilies"]
        ]

    async def _awaited(self, wrong: str, fronts: Sequence[tuple[str, Front]], pods: set[str]) -> None:
        async def check() -> str:
            found = await asyncio.gather(*(self._met(place, front) for place, front in fronts))
            return "" if all(pod in pods if pods else not pod for pod in found) else f"{wrong}: {found}"

        try:
            await self._live.eventually(check)
        except AssertionError as error:
            self.wrong.append(str(error))

    async def _met(self, place: str, front: Front, source: str | None = None) -> str:
        """Return the pod that answers, '' for none."""
        answer = await self._live.cluster.probe(place, "tcp", *front, 0.5, source)
        return "" if isinstance(answer, NoAnswer) else answer.pod

    async def _look(self, program: Program) -> None:
        """Check the frontends to which clients do not send requests all the time."""
        denied = self._live.front("ranged", "loadbalancer")
        if pod := await self._met("outside", denied, SECOND_OUTSIDE_IP):
            self.wrong.append(f"{program}: {pod} answered {SECOND_OUTSIDE_IP}, which source ranges leave out")
        loopback = Front("127.0.0.1", self._live.front("plain", "nodeport").port)
        if program != Program(GO, NFT) and not await self._met("node", loopback):
            self.wrong.append(f"{program}: the NodePort of plain is not served on loopback")
        in_range = await self._met("pod", Front(self._live.front("media").address, 3001))
        if bool(in_range) is not (program == Program(OURS, NFT)):
            self.wrong.append(f"{program}: a port of a range is answered by {in_range or 'no pod'}")
        if program.name == OURS:
            code, said = await self._live.ask("verify")
            self.wrong += [f"{program}: verify: {said}"] if code else []


async def run(setting: Setting, journeys: Sequence[Sequence[Program]]) -> int:
    """Play the journeys and print the table; return the exit code."""
    steps: list[Step] = []
    wrong: list[str] = []
    for programs in journeys:
        async with LabCluster() as cluster:
            journey = Journey(Live(cluster), setting)
            try:
                steps += await journey.play(programs)
            except ProxyError as error:
                wrong.append(f"{' to '.join(map(str, programs))}: {error}")
            wrong += journey.wrong
    wrong += faults(steps)
    print("", HEAD, *(step.line for step in steps), "", sep="\n")
    print(*(["FAILED", *wrong] if wrong else ["All changes worked, and only unavoidable requests failed."]), sep="\n  ")
    return int(bool(wrong))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code: 0 if only requests failed that also fail between two Go kube-proxies."""
    parser = argparse.ArgumentParser(prog="python -m prove.wayback", description=__doc__)
    parser.add_argument("--peer", required=True, help="path of the Go kube-proxy")
    parser.add_argument("--journey", type=int, choices=range(len(JOURNEYS) - 1), help="this one alone")
    parser.add_argument("--alone", action="store_true", help="no other program on the node has NAT chains")
    parser.add_argument("--forward", action="store_true", help="fast forwarding instead of resets")
    parser.add_argument("--more", type=int, default=0, help="number of further Services without clients (0)")
    given = parser.parse_args(argv)
    if not Path(given.peer).is_file():
        parser.error(f"--peer: {given.peer} is no file")
    setting = Setting(given.peer, FORWARDING if given.forward else OUR_FLAGS, "" if given.alone else CNI, given.more)
    chosen = JOURNEYS if given.journey is None else (JOURNEYS[given.journey], JOURNEYS[-1])
    return asyncio.run(run(setting, chosen))


if __name__ == "__main__":
    sys.exit(main())
