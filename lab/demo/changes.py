"""Act 6: pods are deleted and replaced under traffic; the Service is scaled to no pods, and back to three."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from time import monotonic

from lab.apiserver.store import Change
from lab.cluster import NotInTimeError
from lab.demo.fronts import BY_NODE, CLUSTER_FRONTS, balancer_fronts
from lab.demo.report import Cells, milliseconds, short
from lab.demo.stage import IN_TIME, NAME, PORT, REPLICAS, SELECTOR, Stage
from lab.demo.traffic import Total, Traffic
from lab.netns import names

ROUNDS = 3
GONE, NEW = "a pod is told to end", "a new pod is ready"


class ReadyTimes:
    """The time at which each pod's endpoint was first written as ready, in monotonic seconds."""

    def __init__(self, stage: Stage) -> None:
        self.ready: dict[str, float] = {}
        self._unsubscribe: Callable[[], None] = stage.cluster.store.subscribe("endpointslices", self._on_change)

    def stop(self) -> None:
        """Remove the listener."""
        self._unsubscribe()

    def _on_change(self, change: Change) -> None:
        now = monotonic()
        if change.new.labels.get("kubernetes.io/service-name") != NAME:
            return
        for endpoint in change.new.decode()["endpoints"] or ():
            if endpoint["conditions"]["ready"]:
                self.ready.setdefault(endpoint["targetRef"]["name"], now)


async def pods_come_and_go(stage: Stage) -> None:
    """Delete pods under traffic until all are replaced; scale the Service to 0, and back to 3."""
    stage.report.act(
        "A pod is deleted and replaced: no client notices",
        f"Clients outside and in a pod connect without pause while {ROUNDS} pods are deleted, one after the "
        "other. Each time the ReplicationController makes a new one.",
    )
    times = ReadyTimes(stage)
    try:
        await _replace_pods(stage, times)
        await _no_pods(stage, times)
    finally:
        times.stop()


async def _replace_pods(stage: Stage, times: ReadyTimes) -> None:
    front, cluster = balancer_fronts(stage)[0], CLUSTER_FRONTS[0]
    clients = {
        f"outside to {front}": (Traffic(stage.cluster.namespace_of("outside"), "tcp"), front),
        f"a pod to {cluster}": (Traffic(stage.cluster.namespace_of("pod"), "tcp"), cluster),
    }
    watcher = Traffic(stage.cluster.namespace_of("outside"), "udp")
    deleted: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        for client, target in (*clients.values(), (watcher, front)):
            await stack.enter_async_context(client)
            await client.aim(target.address, target.port)
        for _ in range(ROUNDS):
            await _replace_one(stage, times, watcher, deleted)
        total = await watcher.stop()
        totals = {name: await client.stop() for name, (client, _) in clients.items()}
    for victim, when in deleted.items():
        stage.ledger.took(GONE, total.last_sent.get(victim, when) - when)
    _note_traffic(stage, totals)


async def _replace_one(stage: Stage, times: ReadyTimes, watcher: Traffic, deleted: dict[str, float]) -> None:
    victim = stage.pods[0]
    before = set(stage.pods)
    await watcher.mark()
    deleted[victim] = monotonic()
    stage.cluster.delete("pods", victim)
    await stage.refresh_pods()
    (new,) = set(stage.pods) - before
    try:
        seen = await watcher.saw(new, IN_TIME)
    except NotInTimeError as e:
        stage.hold(NEW, False, f"an answer from {short(new)}", str(e))
        return
    stage.ledger.took(NEW, seen.heard - times.ready[new])
    stage.report.literal(
        f"{short(victim)} deleted; {short(new)} was ready after {milliseconds(times.ready[new] - deleted[victim])} "
        f"and got its first packet {milliseconds(seen.heard - times.ready[new])} later"
    )


def _note_traffic(stage: Stage, totals: dict[str, Total]) -> None:
    rows: list[Cells] = []
    for name, total in totals.items():
        failed = sum(total.failed.values())
        stage.ledger.connections += total.asked
        said = ", ".join(f"{n} {why}" for why, n in total.failed.items()) or "none"
        ok = stage.hold(
            f"connections from {name} while pods change", not failed and total.asked > 0, "none failed", said
        )
        rows.append([name, f"{total.asked:,}", str(failed), stage.report.verdict(ok)])
    stage.report.table(["from", "connections", "failed", ""], rows, " rr")
    stage.report.fact(
        f"A pod that is told to end gets no new connections from {milliseconds(stage.ledger.median(GONE))} on "
        "(p50); open connections may finish."
    )


async def _no_pods(stage: Stage, times: ReadyTimes) -> None:
    fronts = [CLUSTER_FRONTS[0], balancer_fronts(stage)[0], CLUSTER_FRONTS[1]]
    stage.cluster.scale(NAME, 0)
    await stage.cluster.until(lambda: not stage.cluster.select("pods", SELECTOR), "no whoami pods")
    # A pod whose server has ended also refuses connections, as long as its network namespace exists.
    pods = f"{stage.cluster.topology.prefix}pod"
    await stage.cluster.until(lambda: not names(pods), "no network of whoami pods")
    refused = await stage.refused("scaled to 0", fronts)
    await stage.flood.aim(fronts[0].address, PORT)
    stage.cluster.scale(NAME, REPLICAS)
    seen = await stage.first_answer("scaled back to 3")
    await stage.refresh_pods()
    if refused and seen is not None:
        stage.report.fact(
            "Scaled to 0, the Service refuses connections instead of letting clients wait. Scaled to 3, it answers "
            f"again {milliseconds(seen.heard - min(times.ready[p] for p in stage.pods))} after the first pod is ready:"
        )
    await stage.spread("scaled back to 3", fronts[1:2], BY_NODE)
