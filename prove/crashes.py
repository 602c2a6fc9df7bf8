"""Ends the proxy, or lets a call fail, at each call into the kernel or turn of its loop, in a small world.

There are three kinds of start: on an empty node, over the rules of an earlier proxy while objects have changed, and
over the rules of another mode. For each point the launcher starts the proxy with the fault, then without; steady
traffic runs all the time, except on the empty node, and then the judges check the state. The points are divided between
several worlds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from prove import judges, launcher
from prove.steps import Json
from prove.world import Shares, World
from support.traffic import DUAL

WAYS = ("empty", "adoption", "switch")
IPVS_WAYS = ("adoption",)
"""The guest supports no other mode, and flush_node does not remove virtual servers."""
DEATHS = ("die-before", "die-after", "die-turn")
REFUSALS = ("ENOBUFS", "EPERM", "ENOMEM", "EINTR", "no-memory")
ANSWERS = ("answer-ENOBUFS", "answer-EPERM")
WORDS = {"deaths": DEATHS, "refusals": (*REFUSALS, *ANSWERS), "answers": ANSWERS}
OTHER: dict[str, Json] = {
    "nftables": {"mode": "iptables", "iptables": {"minSyncPeriod": "1ms"}},
    "iptables": {"mode": "nftables"},
    "userspace": {"mode": "nftables"},
}
"""The mode that ran before, keyed by the mode that starts."""


class Crashes:
    """Tries points in one world whose proxy does not run at first."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.live = world.live
        self._turn = 0

    async def prepare(self) -> None:
        """Make the Services of the small world."""
        self.live.service("moved", "a1", sessionAffinity="ClientIP", **DUAL)
        self.live.service("local", "a1 a2", type="NodePort", externalTrafficPolicy="Local")
        self.live.service("none", "")
        self.live.service("many", "a1 a2 a3 a4 b1", externalIPs=["198.51.100.1"])
        self._change()

    def _change(self) -> None:
        """Change objects, alternately in both directions, so that every start finds changes."""
        self._turn += 1
        odd = self._turn % 2
        self.live.endpoints("moved", "b1" if odd else "a1 a2")
        self.live.endpoints("none", "b2" if odd else "")
        self.live.endpoints("many", "a1 b3" if odd else "a1 a2 a3 a4 b1")
        if odd:
            self._put_brief()
        else:
            with suppress(KeyError):
                self.world.store.remove("services", ("default", "brief"))

    def _put_brief(self) -> None:
        spec = {"type": "NodePort", "clusterIP": "10.96.201.1", "clusterIPs": ["10.96.201.1"], "ipFamilies": ["IPv4"]}
        port = {"name": "tcp", "port": 80, "protocol": "TCP", "targetPort": 3000, "nodePort": 31999}
        metadata = {"name": "brief", "namespace": "default", "uid": "brief"}
        metadata["creationTimestamp"] = "2024-01-01T00:00:00Z"
        self.world.store.put("services", {"metadata": metadata, "spec": spec | {"ports": [port]}, "status": {}})

    async def count(self, way: str) -> dict[str, int]:
        """Return the numbers of calls, and of turns of the loop, until a start is ready, for each kind of fault."""
        file = self.live.cluster.folder / f"calls-{way}"
        file.unlink(missing_ok=True)
        await self._before(way)
        await self.world.start(by=launcher.command(count=file))
        await self.live.proxy.kill()
        said = file.read_bytes()
        kinds = dict.fromkeys(ANSWERS, b"a") | {"die-turn": b"t"}
        return {word: said.count(kinds.get(word, b".")) for word in (*DEATHS, *REFUSALS, *ANSWERS)}

    async def point(self, way: str, word: str, number: int) -> list[str]:
        """Start the proxy with one fault, then without, and check the state."""
        await self._before(way)
        await self.world.start(wait=False, by=launcher.command(word, number))
        await self._dies_or_is_ready()
        if word in DEATHS or self.live.proxy.returncode is not None:
            await self.live.proxy.kill()
            await self.world.start()
        self.world.may_end = word == "no-memory"  # The fault may occur later than the start.
        wrong = await judges.quiet(self.world, random.Random(f"{way} {word} {number}"))
        self.world.may_end = False
        if self.world.carries or way != "adoption" or wrong:
            wrong += [f"traffic: {one}" for one in await self.world.stop_traffic()]
        await self.live.proxy.kill()
        return [f"{self.world.mode.name}, {way}, {word} at call {number}: {one}" for one in wrong]

    async def _before(self, way: str) -> None:
        """Create the state in which the proxy starts, with traffic if there are rules for it."""
        if way != "adoption" or self.world.carries:
            await self.world.stop_traffic()
        if way != "adoption":
            await self._emptied()
        if way == "switch":
            mode = self.world.mode.config["mode"]
            await self.live.start(OTHER[mode])
            await self.live.proxy.kill()
            self.world.mixed = True
        if way != "empty" and not self.world.carries:
            await self.world.settle_traffic()
        self._change()

    async def _emptied(self) -> None:
        """Remove all rules of the node."""
        await self.live.nft("flush", "ruleset")
        nothing = self.live.cluster.folder / "nothing.rules"
        nothing.write_text("".join(f"*{table}\nCOMMIT\n" for table in ("nat", "filter", "mangle")))
        for command in ("iptables-legacy-restore", "ip6tables-legacy-restore"):
            await self.live.run(command, str(nothing))
        await self.live.choose_variant(self.world.mode.variant)

    async def _dies_or_is_ready(self) -> None:
        proxy = self.live.proxy

        async def check() -> str:
            return "" if proxy.returncode is not None else await self.live.unready()

        await self.live.eventually(check)


class Part(NamedTuple):
    """The share of one of `worlds` worlds: all its points of a kind of fault, or a random `share` of all points."""

    mode: str
    kind: str
    share: int
    seed: str
    number: int = 0
    worlds: int = 1


def points(counts: dict[str, dict[str, int]], part: Part) -> list[tuple[str, str, int]]:
    """Return the kinds of start, faults and numbers of a part."""
    mine = [
        (way, word, number)
        for way, known in counts.items()
        for word in WORDS[part.kind]
        for number in range(1, known[word] + 1)
        if number % part.worlds == part.number
    ]
    if not part.share:
        return mine
    share = part.share // part.worlds + (part.number < part.share % part.worlds)
    return random.Random(part.seed).sample(mine, min(share, len(mine)))


async def run(part: Part, tell: Callable[[str], None]) -> dict[str, int]:
    """Try points, and print complaints; return the number of tried points of each kind, and the number of failures."""
    tally = Counter[str]()
    async with World(part.mode) as world:
        world.shares = Shares(dumps=0.1, pages=0.4) if not part.share else Shares()
        crashes = Crashes(world)
        await world.stop_traffic()
        await world.live.proxy.kill()
        await crashes.prepare()
        counts = {}
        for way in IPVS_WAYS if part.mode == "ipvs" else WAYS:
            counts[way] = await crashes.count(way)
        if not part.number:
            said = [f"{way} {known['die-before']} and {known['die-turn']}" for way, known in counts.items()]
            tell(f"{part.mode}: calls and turns of a start: {', '.join(said)}")
        for way, word, number in points(counts, part):
            found = await crashes.point(way, word, number)
            tally.update({"points": 1, f"{way} {word}": 1, "failed": bool(found)})
            if found:
                tell("\n  ".join(found))
            elif not tally["points"] % 100:
                tell(f"{part.mode}, world {part.number}: {tally['points']} points")
        await world.stop_traffic()
    return dict(tally)
