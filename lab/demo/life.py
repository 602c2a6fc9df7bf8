"""What goes on in a cluster that is kept: a few more Services, a few requests a second, and now and then a change.

So there is something to see, on the page and by the commands. All of it ends with the cluster.
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
"""A Service whose pods come and go, one with the pods of the demo, and one that selects none."""
PORTS: list[Json] = [{"name": "http", "port": 80, "targetPort": PORT}]
FEW, MORE = 2, 4
"""Pods of the shop, in turn."""
EVERY = 0.25
"""Seconds between two requests."""
CHANGE = 8.0
"""Seconds between two changes."""
_TURNS = [(SHOP, "pod"), (NAME, "outside"), (SHOP, "node"), (SEARCH, "pod"), (SHOP, "outside")]
"""Who is asked, and from where, in turn."""


@asynccontextmanager
async def life(stage: Stage) -> AsyncIterator[None]:
    """Have something go on meanwhile."""
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
    """Ask one Service after the other, by each of its addresses; whoever is at the keyboard may have removed them."""
    for number, (name, place) in enumerate(itertools.cycle(_TURNS)):
        await asyncio.sleep(EVERY)
        with suppress(ApiError, KubeProxyError, OSError, LookupError):
            spec = stage.cluster.get("services", name)["spec"]
            address = spec["clusterIPs"][number % len(spec["clusterIPs"])]
            question = functools.partial(ask, "tcp", address, spec["ports"][0]["port"])
            await run_in_async(stage.cluster.namespace_of(place), question)


async def _changes(stage: Stage) -> None:
    """Give the shop pods and take them away."""
    for replicas in itertools.cycle((MORE, FEW)):
        await asyncio.sleep(CHANGE)
        with suppress(ApiError):
            stage.cluster.scale(SHOP, replicas)
