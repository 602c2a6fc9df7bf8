"""The proxy dies, or is refused, at one thing that it says to the kernel: at every one of them, in a small world.

Three ways of a start: on an empty node, over what an earlier proxy left while objects changed meanwhile, and over the
rules of another mode. Each point is one start of the launcher with its fault, then a start without; steady traffic runs
all the time but on the empty node, and the judges ask afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from prove import judges, launcher
from prove.world import World
from support.traffic import DUAL

WAYS = ("empty", "adoption", "switch")
DEATHS = ("die-before", "die-after")
REFUSALS = ("ENOBUFS", "EPERM", "ENOMEM", "EINTR")
OTHER = {
    "nftables": {"mode": "iptables", "iptables": {"minSyncPeriod": "1ms"}},
    "iptables": {"mode": "nftables"},
    "userspace": {"mode": "nftables"},
}
"""The mode that ran before, by the mode that starts."""


class Crashes:
    """Points in one world whose proxy does not run at first."""

    def __init__(self, world: World, tell: Callable[[str], None]) -> None:
        self.world = world
        self.live = world.live
        self.tell = tell
        self._turn = 0

    async def prepare(self) -> None:
        """Make the Services of the small world."""
        self.live.service("moved", "a1", sessionAffinity="ClientIP", **DUAL)
        self.live.service("local", "a1 a2", type="NodePort", externalTrafficPolicy="Local")
        self.live.service("none", "")
        self.live.service("many", "a1 a2 a3 a4 b1", externalIPs=["198.51.100.1"])
        self._change()

    def _change(self) -> None:
        """Change objects so that every start has something to make up for: back and forth."""
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

    async def count(self, way: str) -> int:
        """Return how many calls a start makes, until it is ready."""
        file = self.live.cluster.folder / f"calls-{way}"
        file.unlink(missing_ok=True)
        await self._before(way)
        await self.world.start(by=launcher.command(count=file))
        await self.live.proxy.kill()
        return file.stat().st_size

    async def point(self, way: str, word: str, number: int) -> list[str]:
        """Have the proxy meet one fault, start it without, and judge."""
        traffic = await self._before(way)
        await self.world.start(wait=False, by=launcher.command(word, number))
        if word in DEATHS:
            await self._dies_or_is_ready()
        else:
            await self._gets_over_it()
        failures = self.world.failures()
        if word in DEATHS or self.live.proxy.returncode is not None:
            await self.live.proxy.kill()
            await self.world.start()
        wrong = await judges.quiet(self.world, random.Random(f"{way} {word} {number}"))
        wrong += [f"traffic: {one}" for one in [*failures, *(await self.world.stop_traffic() if traffic else [])]]
        await self.world.stop_traffic()
        await self.live.proxy.kill()
        return [f"{self.world.mode.name}, {way}, {word} at call {number}: {one}" for one in wrong]

    async def _before(self, way: str) -> bool:
        """Bring about what the proxy starts over; return whether traffic runs."""
        if way == "empty":
            await self._emptied()
            self._change()
            return False
        if way == "switch":
            await self._emptied()
            mode = self.world.mode.config["mode"]
            await self.live.start(OTHER[mode])
            await self.live.proxy.kill()
        else:
            with suppress(AttributeError):
                await self.live.proxy.kill()
        if not self.world.carries:
            await self.world.settle_traffic()
        self._change()
        return not self.world.carries

    async def _emptied(self) -> None:
        """Remove all rules of the node."""
        await self.live.nft("flush", "ruleset")
        for command in ("iptables-legacy", "ip6tables-legacy"):
            for table in ("nat", "filter", "mangle"):
                for word in ("-F", "-X"):
                    await self.live.cluster.exec("node", [command, "-w", "-t", table, word])
        await self.live.choose_variant(self.world.mode.variant)

    async def _dies_or_is_ready(self) -> None:
        proxy = self.live.proxy

        async def check() -> str:
            return "" if proxy.returncode is not None else await self.live.unready()

        await self.live.eventually(check)

    async def _gets_over_it(self) -> None:
        """A proxy that is refused tries again; one that ends with an error at its start is started again by others."""
        await self._dies_or_is_ready()


def points(counts: dict[str, int], words: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
    """Yield every way, fault and number."""
    for way, count in counts.items():
        for number in range(1, count + 1):
            for word in words:
                yield way, word, number


async def run(mode: str, words: tuple[str, ...], share: int, seed: str, tell: Callable[[str], None]) -> list[Any]:
    """Try all points, or `share` of them by chance unless that is 0; return what is wrong."""
    async with World(mode) as world:
        crashes = Crashes(world, tell)
        await world.stop_traffic()
        await world.live.proxy.kill()
        await crashes.prepare()
        counts = {way: await crashes.count(way) for way in WAYS}
        await world.stop_traffic()
        tell(f"{mode}: calls of a start: {counts}")
        everything = list(points(counts, words))
        if share:
            everything = random.Random(seed).sample(everything, min(share, len(everything)))
        wrong: list[str] = []
        for at, (way, word, number) in enumerate(everything, 1):
            found = await crashes.point(way, word, number)
            wrong += found
            if found or not at % 20:
                tell(f"{mode}: {at} of {len(everything)} points" + "".join(f"\n  {one}" for one in found))
        tell(f"{mode}: {len(everything)} points, {len(wrong)} complaints")
        return wrong
