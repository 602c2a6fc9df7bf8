"""Judges: each checks a world in which nothing more is pending, and returns complaints as text.

`quiet` waits until the proxy has the newest version of all objects, then calls all judges. The expected state is from
`truth`, never from the tested proxy, except facts about the node.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.ask.kernel.looks import examiners, look
from kubeproxy.ask.source import Running
from kubeproxy.config.load import decode
from kubeproxy.control.client import Client
from kubeproxy.errors import ApplyError, KubeProxyError
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack
from kubeproxy.model.addresses import PORT_BYTES, Family, unpack
from kubeproxy.model.plan import ServiceName
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings, Surroundings, build
from kubeproxy.setup import host
from lab.probes import http_get
from lab.proxyprocess import HEALTH_PORT, METRICS_PORT
from prove import clients, dumps, meant, packets, truth
from prove.world import NO_FAULTS, STEADY, UDP_IDLE, World
from support.modes import GUEST

_PENDING = re.compile(r"^kubeproxy_sync_proxy_rules_(?:service|endpoint)_changes_pending [^0].*", re.MULTILINE)
TIMEOUT = 120.0 if GUEST else 40.0
"""Seconds within which all changes must be received, programmed and repaired."""

UDP: Final = 17
ENDS = 5.0
"""Seconds until the end of a killed process is noticed."""


class Scene(NamedTuple):
    """The input of the judges: the proxy's state, and the expected state."""

    facts: Facts
    held: Mapping[ServiceName, ProgrammedService]
    planner: Planner


async def quiet(world: World, chance: random.Random, only: Sequence[str] | None = None) -> list[str]:
    """Wait until nothing is pending; return the complaints, of these judges only if some are given. A proxy with a
    fault that ends it is started again.
    """
    wrong = await _quiet(world, chance, only)
    if wrong and world.may_end:
        with suppress(TimeoutError):
            await asyncio.wait_for(world.live.proxy.wait(), ENDS)
            wrong = await _quiet(world, chance, only)
    return wrong


async def _quiet(world: World, chance: random.Random, only: Sequence[str] | None) -> list[str]:
    world.live.cluster.faults.update(NO_FAULTS)
    await world.back()
    await world.supervise()
    try:
        scene = await settled(world)
    except AssertionError as error:
        return [str(error)]
    try:
        if only is not None:
            wrong = await _verified(world) if "verify" in only else []
            return wrong + (await _no_stale_flows(world, scene, Family.IPV4) if "stale flows" in only else [])
        # Waits until a change by another program is repaired; rules of other programs have an effect until they are
        # removed.
        wrong = [*await _verified(world), *(await _others_gone(world) if world.mixed else [])]
        wrong += await _no_stale_flows(world, scene, chance.choice(list(Family)))
        wrong += await _health_checks(world, scene)
        wrong += await clients.node_addresses(world)
        judged = [packets.foretold(world, scene.facts, scene.planner, chance)]
        if chance.random() < world.shares.pages:
            judged.append(_pages_say_so(world, scene))
        if chance.random() < world.shares.dumps:
            judged.append(_as_fresh(world, scene))
        if world.mode.name == "nftables" and chance.random() < world.shares.meanings:
            judged.append(_eventually(world, functools.partial(meant.different, world)))
        wrong += [one for found in await asyncio.gather(*judged) for one in found]
    except (KubeProxyError, OSError) as error:
        wrong = [f"asking: {error!r}"]
    wrong += look_now(world)
    world.judged += 1
    if not wrong:
        world.harmed = world.mixed = False
        await world.settle_traffic()
    return wrong


def look_now(world: World) -> list[str]:
    """Return complaints about conditions that must always hold."""
    proxy = world.live.proxy
    # A fault that ends the proxy, perhaps only at a later call, ends the connections that userspace mode carries.
    may_fail = world.carries and world.may_end and proxy.returncode is not None
    wrong = [f"steady traffic: {failure}" for failure in world.failures()[:3] if not may_fail]
    if proxy.returncode is not None and not world.may_end:
        wrong.append(f"the proxy ended with status {proxy.returncode}:\n{proxy.tail()}")
    said = world.live.logged("Traceback|internal error|Task exception|was never awaited|ResourceWarning")
    if world.may_end and proxy.returncode is not None and _ended_without_memory(proxy.tail()):
        said = said[:-1]  # of several tracebacks the last one is the end
    return wrong + [f"the proxy logged: {line}" for line in said[:3]]


def _ended_without_memory(log: str) -> bool:
    """Return whether a log ends with the traceback of a MemoryError, as the log of a process that it ended does."""
    return log.rstrip().rpartition("\n")[2].startswith("MemoryError")


async def _eventually(world: World, check: Callable[[], list[str]]) -> list[str]:
    """Run a blocking check in a thread on the proxy's node until it has no complaint; return its last complaints."""
    until, pause = time.monotonic() + TIMEOUT, 0.002
    while True:
        wrong = await world.inside("node", check)
        if not wrong or time.monotonic() > until:
            return wrong
        await asyncio.sleep(pause)
        pause = min(0.16, 2 * pause)


async def settled(world: World) -> Scene:
    """Wait until the proxy has all objects of the API server. Raises AssertionError."""
    found: list[Scene] = []

    def check() -> list[str]:
        if world.live.proxy.returncode is not None:
            return []  # reported below
        try:
            running = Running(Client(str(world.live.proxy.control)))
            facts = running.facts()
            wrong = _not_ready(facts) or _node_differs(world, facts)
            if wrong:
                return wrong  # Expensive checks run only when nothing is pending.
            held = {one.name: one for one in running.services()}
            unknown = truth.unknown(world.store, running.objects())
        except KubeProxyError as error:  # also if the proxy ends meanwhile, after a refusal at its start
            return [str(error)]
        wrong = [f"{'/'.join(n)} is pending ({one.reason})" for n, one in held.items() if one.wanted is not None]
        wrong += unknown
        if wrong:
            return wrong
        found[:] = [Scene(facts, held, truth.planned(world.store, facts.world))]
        return _other_plans(found[0])

    wrong = await _eventually(world, check)
    world.calm()
    if world.may_end and world.live.proxy.returncode is not None:
        await world.supervise()
        wrong = await _eventually(world, check)
    if world.live.proxy.returncode is not None:
        raise AssertionError(f"the proxy ended with status {world.live.proxy.returncode}:\n{world.live.proxy.tail()}")
    if wrong:
        shown = "\n".join(wrong[:8])
        raise AssertionError(
            f"nothing settles within {TIMEOUT:.0f} s: {shown}\nthe proxy said:\n{world.live.proxy.tail()}"
        )
    return found[0]


def _not_ready(facts: Facts) -> list[str]:
    wrong = [f"not ready, {part}: {why}" for part, why in facts.unready.items()]
    return wrong + [
        f"{one.family.label}: {one.refusal or one.difference}"
        for one in facts.standings
        if one.refusal or one.difference
    ]


def _other_plans(scene: Scene) -> list[str]:
    """Return the plans that differ from the plans of the final state."""
    wanted = truth.plans(scene.planner)
    has = {name: one.plans for name, one in scene.held.items() if one.plans}
    return [
        f"plans of {'/'.join(name)} are not those of its objects: {has.get(name)} instead of {wanted.get(name)}"
        for name in sorted(wanted.keys() | has.keys())
        if sorted(has.get(name, ()), key=repr) != sorted(wanted.get(name, ()), key=repr)
    ]


def _node_differs(world: World, facts: Facts) -> list[str]:
    """Return the differences of the Node, the ServiceCIDRs and the node's addresses that the proxy has not received.
    Runs on the node."""
    record = world.store.get("nodes", ("", "node-a"))
    if record is None:
        return []
    zone = record.labels.get("topology.kubernetes.io/zone") or ""
    wrong = [] if facts.world.zone == zone else [f"zone {zone!r} expected, has {facts.world.zone!r}"]
    cidrs = [c for r in world.store.records("servicecidrs") for c in r.decode()["spec"].get("cidrs") or ()]
    local = host.packed_local_addresses(facts.world.families)
    wanted = build(_settings(msgspec.json.encode(facts.config)), Surroundings(facts.node, cidrs, local))
    for family in facts.world.families:
        ours, theirs = facts.world.of(family), wanted.of(family)
        if ours is not None and theirs is not None and ours.service_cidrs != theirs.service_cidrs:
            wrong.append(f"ServiceCIDRs {cidrs} expected, has others")
        if ours is not None and theirs is not None and ours.nodeport_ips != theirs.nodeport_ips:
            wrong.append(f"NodePorts answer on {theirs.nodeport_ips} expected, has {ours.nodeport_ips}")
    return wrong


@functools.lru_cache(maxsize=64)
def _settings(config: bytes) -> Settings:
    tree = {name: value for name, value in msgspec.json.decode(config).items() if name not in {"apiVersion", "kind"}}
    return host.settings(decode(tree).config)


async def _verified(world: World) -> list[str]:
    """Compare the kernel with the proxy's plans, with the examiner of `kube-proxy verify`."""
    running = Running(Client(str(world.live.proxy.control)))

    def work() -> list[str]:
        facts = running.facts()
        try:
            with examiners(facts, facts.world.families) as kernel:
                return [f"verify: {finding}" for finding in look(running.services, kernel, []).findings[:5]]
        except ApplyError as error:  # The table is being created again.
            return [f"verify: {error}"]

    return await _eventually(world, work)


async def _as_fresh(world: World, scene: Scene) -> list[str]:
    """The dump must equal the rules that a new proxy writes for the final state."""
    if world.mode.name not in dumps.COMPARED:
        return []
    made = await _made_fresh(world, scene)

    def compare() -> list[str]:
        there = dumps.dump(world.mode.name, scene.facts)
        return [f"dump: {one}" for one in dumps.differences(there, made)[:8]]

    return await _eventually(world, compare)


async def _made_fresh(world: World, scene: Scene) -> dumps.Dump:
    mode, plans = world.mode.name, truth.plans(scene.planner)
    if not dumps.COMPARED[mode]:
        return await asyncio.to_thread(dumps.fresh, mode, scene.facts, plans)
    folder = world.live.cluster.folder
    asked, said = folder / "fresh.asked", folder / "fresh.said"
    asked.write_bytes(dumps.asked(scene.facts, plans))
    said.unlink(missing_ok=True)
    status = await world.forked("prove.dumps:main", [mode, str(asked)], said)
    text = said.read_text(errors="replace")
    if status:
        raise AssertionError(f"a fresh {mode} failed: {text[-2000:]}")
    made: dumps.Dump = json.loads(text.splitlines()[-1])
    return made


async def _others_gone(world: World) -> list[str]:
    """Leftovers of other modes, or of another kube-proxy, must be removed."""

    def check() -> list[str]:
        return [f"left of others: {one}" for one in dumps.others(world.mode.name)[:5]]

    return await _eventually(world, check)


async def _no_stale_flows(world: World, scene: Scene, family: Family) -> list[str]:
    """No UDP flow to a frontend's address may lead to an endpoint that does not serve the frontend; userspace mode has
    no such flows.

    Checks one family without the steady Service, whose endpoints do not change: a search takes some 10 ms.
    """
    if world.mode.name not in dumps.COMPARED:
        return []
    serving: dict[bytes, set[bytes]] = {}
    for (_, name), plans in truth.plans(scene.planner).items():
        for plan in plans:
            fronts = plan.all_frontends if plan.key.family is family and name != STEADY else ()
            for frontend in (each for each in fronts if each.protocol == UDP):
                for port in {frontend.port, frontend.last_port, *packets.ANSWERED}:
                    if frontend.port <= port <= frontend.last_port:
                        served = plan.at_port(frontend, PORT_BYTES[port]).serving
                        serving.setdefault(target_of(frontend.address, UDP, port), set()).update(served)

    def check() -> list[str]:
        with Conntrack() as tracking:
            flows = list(tracking.udp_flows(2 if family is Family.IPV4 else 10)) if serving else []
        return [
            f"stale flow: {unpack(one.client[:-2])} to {unpack(one.target[:-3])} leads to {unpack(one.server[:-2])}"
            for one in flows
            if one.target in serving and one.server not in {*serving[one.target], one.target[:-3] + one.target[-2:]}
        ][:3]

    return await _eventually(world, check)


async def _health_checks(world: World, scene: Scene) -> list[str]:
    """The health check port of each Service must answer with the number of its ready endpoints on the node."""
    node = world.live.ips["node"]
    wanted = [
        (family, each.health.port, each.health.local_endpoints(family))
        for each in scene.planner.compiled.values()
        for family in (Family.IPV4, Family.IPV6)
        if each.health is not None and each.health.local_endpoints(family) is not None
    ]
    ports = [port for _, port, _ in wanted]

    def check() -> list[str]:
        wrong = []
        for family, port, count in wanted:
            if ports.count(port) <= len(Family):  # otherwise several Services claim the port
                wrong += clients.miscounted(node[family.label], port, count, 5.0)
        return wrong

    def checked() -> list[str]:
        try:
            return check()
        except OSError as error:
            return [f"health check: {error!r}"]

    return await _eventually(world, checked)


async def _pages_say_so(world: World, scene: Scene) -> list[str]:
    """Query the pages until they show the expected state; the proxy tries every 5 s to open a port that was in use."""
    plans = truth.plans(scene.planner)

    def check() -> list[str]:
        if world.live.proxy.returncode is not None:
            return []  # reported elsewhere
        try:
            return _pages(plans)
        except OSError as error:
            return [f"pages: {error!r}"]

    return await _eventually(world, check)


def _pages(plans: truth.Plans) -> list[str]:
    """Health, metrics and /debug/state must show the expected state."""
    wrong = []
    for path in ("/healthz", "/livez", "/readyz"):
        status, body = _page(path, HEALTH_PORT)
        if status != 200:
            wrong.append(f"{path} says {status} while everything is programmed: {body[:300]}")
    wrong += [
        f"/metrics reports pending changes while nothing is pending: {line}"
        for line in _PENDING.findall(_page("/metrics", METRICS_PORT)[1])
    ]
    _, text = _page("/debug/state", METRICS_PORT)
    found = {(s["namespace"], s["name"]): s["state"] for s in json.loads(text)["services"]}
    return wrong + [
        f"/debug/state says {found.get(name)} of {'/'.join(name)}, which is programmed"
        for name in plans
        if found.get(name) != "programmed"
    ]


def _page(path: str, port: int) -> tuple[int, str]:
    status, body = http_get("127.0.0.1", port, path, 5.0)
    return status, body.decode()


async def nothing_left(world: World) -> list[str]:
    """After the deletion of all objects of a history the proxy must have as many descriptors and threads as at the
    beginning."""
    if world.carries:  # Connections are descriptors.
        if failures := await world.stop_traffic():
            return [f"steady traffic: {failures[0]}"]
        await asyncio.sleep(UDP_IDLE + 1)
    if not world.baseline:
        world.baseline = _usage(world.live.proxy.pid)
    # The connections of renewed watches, and of recent clients, are temporary.
    wrong = await _eventually(world, functools.partial(_left, world))
    if wrong:
        command = ["ss", "--tcp", "--udp", "--all", "--numeric", "--processes"]
        _, sockets, _ = await world.live.cluster.exec("node", command)
        wrong.append(f"sockets on the node: {sockets}")
    await world.settle_traffic()
    return wrong


def _left(world: World) -> list[str]:
    now = _usage(world.live.proxy.pid)
    return [
        f"left: {now[name]} {name} are open after a history, {before} were before"
        for name, before in world.baseline.items()
        if now.get(name, 0) > max(before + 2, _KEPT.get(name, 0))
    ]


_KEPT: Final = {"threads": 1 + 2 + min(32, (os.cpu_count() or 1) + 4)}
"""Return the threads that a proxy may keep: the main thread, one per family, and the event loop's pool."""


def _usage(pid: int) -> dict[str, int]:
    """Return no complaints about a proxy that was expected to die, and has died."""
    with suppress(FileNotFoundError, ProcessLookupError):
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        if not descriptors:  # The process has ended, and its exit status was not collected yet.
            return {}
        return {"descriptors": descriptors, "threads": len(list(Path(f"/proc/{pid}/task").iterdir()))}
    return {}
