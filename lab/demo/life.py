"""Generates activity in a cluster that stays up: further Services, a few requests per second, and occasional changes.

So the page and the commands have something to show. All activity ends with the cluster.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from kubeproxy.errors import KubeProxyError
from lab.apiserver.status import ApiError
from lab.demo.stage import LABELS, NAME, PORT, Stage
from lab.netns import run_in_async
from lab.objects import service, whoami_rc
from lab.probes import ask

Json = dict[str, Any]
SHOP, SEARCH, ORPHAN = "shop", "search", "orphan"
"""A Service whose pods change, a Service with the pods of the demo, and a Service without pods."""
PORTS: list[Json] = [{"name": "http", "port": 80, "targetPort": PORT}]
FEW, MORE = 2, 4
"""Numbers of pods of the shop, in turn."""
EVERY = 0.25
"""Seconds between two requests."""
CHANGE = 8.0
"""Seconds between two changes."""
_TURNS = [(SHOP, "pod"), (NAME, "outside"), (SHOP, "node"), (SEARCH, "pod"), (SHOP, "outside")]
"""Pairs of a client and a Service, in turn."""


@asynccontextmanager
async def life(stage: Stage) -> AsyncIterator[None]:
    """Run the activity until the context ends."""
    cluster = stage.cluster
    cluster.create(whoami_rc(SHOP, FEW, PORT))
    await cluster.pods_ready(f"app={SHOP}", FEW)
    dual = {"ipFamilyPolicy": "RequireDualStack"}
    for name, labels in ((SHOP, {"app": SHOP}), (SEARCH, LABELS), (ORPHAN, {"app": "nobody"})):
        cluster.create(service(name, labels, PORTS, **dual))
    tasks = [asyncio.create_task(_requests(stage)), asyncio.create_task(_changes(stage))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _requests(stage: Stage) -> None:
    """Send requests to each Service in turn, by each of its addresses; the operator may have deleted a Service."""
    for number, (name, place) in enumerate(itertools.cycle(_TURNS)):
        await asyncio.sleep(EVERY)
        with suppress(ApiError, KubeProxyError, OSError, LookupError):
            spec = stage.cluster.get("services", name)["spec"]
            address = spec["clusterIPs"][number % len(spec["clusterIPs"])]
            question = functools.partial(ask, "tcp", address, spec["ports"][0]["port"])
            await run_in_async(stage.cluster.namespace_of(place), question)


async def _changes(stage: Stage) -> None:
    """Scale the shop up and down."""
    for replicas in itertools.cycle((MORE, FEW)):
        await asyncio.sleep(CHANGE)
        with suppress(ApiError):
            stage.cluster.scale(SHOP, replicas)
