"""Clients of the sequences in aimed.py: those with session affinity, flows that begin late, a new address of the node.

The expected answers are derived from the objects of the API server and from earlier answers, not from the planner.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress

from kubeproxy.report import flows
from lab.probes import Answer, NoAnswer, ask, http_get
from prove import launcher
from prove.aimed import NODEPORT_NETWORKS
from prove.packets import PLACES
from prove.steps import Json
from prove.world import STEADY, World
from support import tracked_flows

SEARCHES = "kubeproxy_conntrack_reconciler_sync_duration_seconds"
"""The metric that counts the proxy's searches for stale flows."""
POD = "a4"
"""A pod that is a client, in addition to the usual places."""
ANSWERS = 3.0
"""Seconds for an answer."""


async def sticky(world: World, name: str) -> list[str]:
    """Send requests to a Service from each place; return the clients that changed from an endpoint that still serves,
    or reached another Service's endpoint. Remembers the answers.
    """
    service = world.store.get("services", ("default", name))
    if service is None:
        return []
    serving = frozenset(ready(world, name))
    fronts = [(place, address) for place in (*PLACES, POD) for address in service.decode()["spec"]["clusterIPs"]]
    answers = await asyncio.gather(
        *(world.inside(place, functools.partial(ask, "tcp", address, 80, ANSWERS)) for place, address in fronts)
    )
    wrong = []
    for (place, address), got in zip(fronts, answers, strict=True):
        before = world.answered.get((name, place, address), "")
        wanted = {before} if before in serving else serving
        if not isinstance(got, Answer) or got.ip not in wanted:
            said = got.ip if isinstance(got, Answer) else got
            wrong.append(f"client: {place} asks {name} {address}: {said} instead of {sorted(wanted)}, had {before!r}")
        else:
            world.answered[name, place, address] = got.ip
    return wrong


def ready(world: World, name: str) -> Iterator[str]:
    """Yield the addresses of a Service's ready endpoints from its slices."""
    for record in world.store.records("endpointslices"):
        if record.labels.get("kubernetes.io/service-name") == name:
            for endpoint in record.decode()["endpoints"]:
                if endpoint["conditions"]["ready"]:
                    yield from endpoint["addresses"]


async def late(world: World, made: Json, address: str, pod: str) -> list[str]:
    """Write a slice without a pod; after the proxy's search for stale flows, begin a flow from port 80 of an address to
    the pod. If the flow remains, a judge finds it. If the flow may have begun too late for the second search, it is
    deleted."""
    if not world.launched:
        return []
    flow, server = (("192.168.100.1", 40000), (address, 80)), (world.live.ips[pod]["IPv4"], 3000)
    try:
        count, seconds = await _searches(world)
        await world.play(("put", "endpointslices", made))
        changed = before = asked = time.monotonic()
        await asyncio.sleep(flows.ANSWER_TIME)
        while (await _searches(world))[0] == count and before < changed + ANSWERS:
            await asyncio.sleep(0.02)
            before, asked = asked, time.monotonic()
        refused = await world.inside("node", functools.partial(tracked_flows.begin, *flow, server))
        now = time.monotonic()
        certain = now < before - (await _searches(world))[1] + seconds + launcher.SECOND_LOOK * 0.9
    except OSError:  # the proxy ended
        certain, refused = False, 0
    if not certain:
        await world.inside("node", functools.partial(tracked_flows.end, *flow))
    # Without the tested search the flow of the previous step remains.
    return [] if refused in {0, errno.EEXIST} else [f"no flow could be made: {os.strerror(refused)}"]


async def _searches(world: World) -> tuple[float, float]:
    """Return the number of finished searches for stale flows, and their duration in seconds. Raises OSError."""
    series = (f'{SEARCHES}_{part}{{ip_family="IPv4"}}' for part in ("count", "sum"))
    count, seconds = [await world.live.metric(one) for one in series]
    return count, seconds


async def health(world: World, port: int, count: int) -> list[str]:
    """Query a health check port until it answers with a number of ready endpoints in both families; return the
    differences."""
    specs = [record.decode()["spec"] for record in world.store.records("services")]
    wrong, until = ["not asked"], time.monotonic() + 2 * ANSWERS
    if port not in [spec.get("healthCheckNodePort") for spec in specs if isinstance(spec, dict)]:
        return []
    while wrong and time.monotonic() < until:
        await asyncio.sleep(0.02)
        wrong = []
        for address in world.live.ips["node"].values():
            try:
                wrong += await world.inside("node", functools.partial(miscounted, address, port, count, ANSWERS))
            except OSError as error:
                wrong.append(f"health check {port}: {error!r} endpoints, {count} expected")
    return wrong


def miscounted(address: str, port: int, count: int | None, seconds: float) -> list[str]:
    """Return a complaint if a health check port does not answer with this number of endpoints. Raises OSError."""
    _, body = http_get(address, port, "/", seconds)
    found = json.loads(body)["localEndpoints"]
    return [f"health check {port}: {found} endpoints, {count} expected"] if found != count else []


async def closed(world: World, name: str, address: str) -> list[str]:
    """Return the places that reach port 80 of the address of a load balancer that admits no client."""
    if world.store.get("services", ("default", name)) is None:
        return []
    question = functools.partial(ask, "tcp", address, 80, 0.3)
    found = await asyncio.gather(*(world.inside(place, question) for place in ("pod", "outside")))
    return [f"closed: {address} answered as {got.ip}" for got in found if isinstance(got, Answer)]


async def node_addresses(world: World) -> list[str]:
    """Return the new addresses of the node on which the steady NodePort should answer, but does not. Asks for some
    seconds.
    """
    if world.configured.get("nodePortAddresses") != NODEPORT_NETWORKS:
        return []
    port = world.live.front(STEADY, "nodeport").port
    wrong = []
    for address in world.added:
        got: Answer | NoAnswer = NoAnswer.TIMEOUT
        until = time.monotonic() + 2 * ANSWERS
        while not isinstance(got, Answer) and time.monotonic() < until:
            await asyncio.sleep(0.02)
            with suppress(OSError):
                got = await world.inside("outside", functools.partial(ask, "tcp", address, port, ANSWERS))
        wrong += [] if isinstance(got, Answer) else [f"node address: NodePort {port} on {address}: {got}"]
    return wrong
