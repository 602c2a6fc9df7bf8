"""Act 7: a thousand further Services, which change neither the number of rules nor the duration of a change."""

from __future__ import annotations

import asyncio
import functools
from time import monotonic
from typing import Any

from lab.demo.asking import TIMEOUT, ask_until_wrong
from lab.demo.kernel import kernel_sizes
from lab.demo.report import milliseconds
from lab.demo.stage import LABELS, PORT, Front, Stage
from lab.netns import run_in_async
from lab.objects import service

Json = dict[str, Any]
MORE = 1000
REPLACEMENTS, CREATIONS = 20, 10
CREATED, REPLACED = "a Service is created", "an endpoint is replaced"
AMONG = f", among {MORE:,} more Services"
SWITCH = "switch"
SWITCH_FRONT = Front("10.96.0.77", PORT)
SLICE_PORT = {"name": "udp", "protocol": "UDP", "port": PORT}
SERVICE_PORT = SLICE_PORT | {"targetPort": PORT}


def cluster_ip(number: int) -> str:
    """Return the cluster IP of one of the many Services."""
    return f"10.96.{16 + number // 250}.{number % 250 + 1}"


async def thousand_services(stage: Stage) -> None:
    """Create the Services, connect to each, and measure changes before and after."""
    stage.report.act(
        f"{MORE:,} Services more: only map elements",
        "Services are elements of kernel maps, looked up in one step: the number of chains and rules does not grow "
        "with them, nor does the time that a change takes.",
    )
    _make_switch(stage)
    await _creations(stage)
    await _replacements(stage, REPLACED)
    before = await kernel_sizes(stage.cluster)
    took = await _create_more(stage)
    await _replacements(stage, REPLACED + AMONG)
    after = await kernel_sizes(stage.cluster)
    same = (before.chains, before.rules) == (after.chains, after.rules)
    ok = stage.hold(
        f"chains and rules with {MORE:,} Services more",
        same,
        f"{before.chains} and {before.rules} as before",
        f"{after.chains} and {after.rules}",
    )
    rows = [
        [name, f"{s.chains:,}", f"{s.rules:,}", f"{s.elements:,}", verdict]
        for name, s, verdict in (
            ("without any Service", stage.empty, ""),
            ("with the existing Services", before, ""),
            (f"with {MORE:,} more", after, stage.report.verdict(ok)),
        )
    ]
    stage.report.table(["tables ip and ip6 kube-proxy", "chains", "rules", "map elements", ""], rows, " rrr")
    stage.report.fact(took)


def _make_switch(stage: Stage) -> None:
    """A Service whose single endpoint the demo writes itself: a change is one API write, and only one pod answers."""
    stage.cluster.create(service(SWITCH, {}, [SERVICE_PORT], clusterIP=SWITCH_FRONT.address))
    stage.cluster.create(_slice(SWITCH, _addresses(stage)[0]), "default")


def _addresses(stage: Stage) -> list[tuple[str, str]]:
    """Return the name and IPv4 address of two whoami pods."""
    return [(p, stage.cluster.get("pods", p)["status"]["podIP"]) for p in stage.pods[:2]]


def _endpoint(target: tuple[str, str]) -> Json:
    pod, address = target
    reference = {"kind": "Pod", "namespace": "default", "name": pod}
    return {"addresses": [address], "conditions": {"ready": True}, "targetRef": reference}


def _slice(name: str, target: tuple[str, str]) -> Json:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [_endpoint(target)],
        "ports": [SLICE_PORT],
    }


async def _creations(stage: Stage) -> None:
    """Create Services that already have their endpoint, and remove them again."""
    target = _addresses(stage)[0]
    for number in range(CREATIONS):
        name = f"new-{number}"
        stage.cluster.create(_slice(name, target), "default")
        wanted = service(name, {}, [SERVICE_PORT], clusterIP=cluster_ip(number))
        await stage.timed(CREATED, functools.partial(stage.cluster.create, wanted), Front(cluster_ip(number), PORT))
        stage.cluster.delete("services", name)
        stage.cluster.delete("endpointslices", name)


async def _replacements(stage: Stage, change: str) -> None:
    """Replace the only endpoint of a Service, back and forth."""
    targets = _addresses(stage)
    await stage.flood.aim(SWITCH_FRONT.address, PORT)
    if await stage.first_answer(change) is None:
        return
    for number in range(1, REPLACEMENTS + 1):
        target = targets[number % 2]
        patch = {"endpoints": [_endpoint(target)]}
        replace = functools.partial(stage.cluster.patch, "endpointslices", SWITCH, patch)
        await stage.timed(change, replace, SWITCH_FRONT, target[0])


async def _create_more(stage: Stage) -> str:
    """Create the Services and connect to each; return the summary to print."""
    ports = [{"port": 80, "targetPort": PORT}]
    last = Front(cluster_ip(MORE - 1), 80)
    start = monotonic()
    for number in range(MORE):
        stage.cluster.create(service(f"more-{number:04}", LABELS, ports, clusterIP=cluster_ip(number)))
        if number % 20 == 0:
            await asyncio.sleep(0)
    written = monotonic()
    name = f"{MORE:,} Services more"
    alive = await stage.until_answers(lambda heard: heard.failure is None, "outside", last, 1, patience=0.05)
    done = monotonic()
    answered, failures = await run_in_async(stage.cluster.namespace_of("outside"), _ask_each)
    stage.ledger.connections += answered + len(failures)
    said = f"{answered:,} answer" + (f", the others: {', '.join(failures)}" if failures else "")
    stage.hold(name, alive and not failures, f"{MORE:,} answer", said)
    return (
        f"Created in {milliseconds(written - start)}; the last one answers {milliseconds(done - written)} later, "
        f"and a client outside gets an answer from {answered:,} of {MORE:,}."
    )


def _ask_each() -> tuple[int, list[str]]:
    """Send one request to each Service; return the number of answers, and the reasons of failures. Three failures end
    the loop.
    """
    answered, failures = 0, list[str]()
    for number in range(MORE):
        heard = ask_until_wrong("tcp", cluster_ip(number), 80, 1, TIMEOUT, None)
        answered += len(heard.answers)
        if heard.failure is not None:
            failures.append(heard.failure.value)
            if len(failures) == 3:
                break
    return answered, failures


async def remove_more(stage: Stage) -> None:
    """Remove all objects of this act, for a cluster that stays up."""
    made = {f"more-{n:04}" for n in range(MORE)} | {SWITCH}
    for plural in ("services", "endpointslices"):
        for _, name in [r.key for r in stage.cluster.store.records(plural)]:
            if name in made:
                stage.cluster.delete(plural, name)
    await stage.cluster.until(lambda: stage.cluster.store.count("endpointslices") < 10, "the extra slices are gone")
