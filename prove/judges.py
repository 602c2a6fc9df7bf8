"""Judges: each looks at a world in which nothing is left to happen and says, in words, what is not as it should be.

`quiet` waits until the proxy has the newest version of everything, then asks all of them. What it is compared with
is of `truth` alone, never of the proxy under test; only what holds for the node is what the proxy says.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kubeproxy import host, modes
from kubeproxy.commands.kernel import examiners
from kubeproxy.commands.looks import look
from kubeproxy.commands.source import Running
from kubeproxy.control.client import Client
from kubeproxy.control.wire import Facts, Held
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.addresses import PROTOCOL_NAMES, pack, unpack
from kubeproxy.model.answer import Answer as Predicted
from kubeproxy.model.answer import Outcome, Packet, answer
from kubeproxy.model.plan import ServiceName
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Surroundings, build
from kubeproxy.observe.registry import Registry
from lab.netns import run_in, run_in_async, run_in_new
from lab.probes import Answer
from lab.proxyprocess import METRICS_PORT
from prove import truth
from prove.world import NO_FAULTS, UDP_IDLE, World
from support.nftables_ground import KernelGround, without_slots

T = TypeVar("T")
PATIENCE = 20.0
"""Seconds within which everything has arrived, is programmed and repaired."""
SAMPLES = 8
"""Connections of which the answer is foretold, at each quiet moment; at most two of them wait for a timeout."""
HISTORIC = {"gone-endpoints"}
"""Sets whose contents are of what was, on purpose."""
PLACES = ("pod", "node", "outside")


class Scene(NamedTuple):
    """What the judges compare: what the proxy says, and what should be."""

    facts: Facts
    held: Mapping[ServiceName, Held]
    planner: Planner


async def quiet(world: World, chance: random.Random) -> list[str]:
    """Wait until nothing is left to happen; return what is wrong then."""
    world.live.cluster.faults.update(NO_FAULTS)
    try:
        scene = await _settled(world)
    except AssertionError as error:
        return [str(error)]
    wrong = [*await _verified(world), *await _as_fresh(world, scene)]
    wrong += await _foretold(world, scene, chance)
    wrong += await _pages(world, scene)
    wrong += look_now(world)
    if not wrong:
        world.harmed = False
        await world.settle_traffic()
    return wrong


def look_now(world: World) -> list[str]:
    """Return what is wrong of what holds at every moment."""
    proxy = world.live.proxy
    wrong = [f"steady traffic: {failure}" for failure in world.failures()[:3]]
    if proxy.returncode is not None:
        wrong.append(f"the proxy ended with status {proxy.returncode}:\n{proxy.tail()}")
    said = world.live.logged("Traceback|internal error|Task exception|was never awaited|ResourceWarning")
    return wrong + [f"the proxy logged: {line}" for line in said[:3]]


async def _eventually(check: Callable[[], list[str]]) -> list[str]:
    """Ask a blocking check in a thread until it has no complaint; return its last ones."""
    until = time.monotonic() + PATIENCE
    while True:
        wrong = await asyncio.to_thread(check)
        if not wrong or time.monotonic() > until:
            return wrong
        await asyncio.sleep(0.02)


async def _settled(world: World) -> Scene:
    """Wait until the proxy has everything that the API server has. Raises AssertionError."""
    path = str(world.live.proxy.control)
    found: list[Scene] = []

    def check() -> list[str]:
        if world.live.proxy.returncode is not None:
            return []
        try:
            running = Running(Client(path))
            facts, held = running.facts(), {one.name: one for one in running.services()}
        except KubeProxyError as error:
            return [str(error)]
        wrong = [f"not ready, {part}: {why}" for part, why in facts.unready.items()]
        wrong += [f"{'/'.join(n)} is on its way ({one.reason})" for n, one in held.items() if one.wanted is not None]
        wrong += truth.unknown(world.store, held) + _node_differs(world, facts)
        wrong += [f"{one.family.label}: {one.refusal or one.difference}" for one in facts.standings if _troubled(one)]
        found[:] = [Scene(facts, held, truth.planned(world.store, facts.world))]
        return wrong

    wrong = await _eventually(check)
    if world.live.proxy.returncode is not None:
        raise AssertionError(f"the proxy ended with status {world.live.proxy.returncode}:\n{world.live.proxy.tail()}")
    if wrong:
        shown = "\n".join(wrong[:8])
        raise AssertionError(
            f"nothing settles within {PATIENCE:.0f} s: {shown}\nthe proxy said:\n{world.live.proxy.tail()}"
        )
    return found[0]


def _troubled(standing: Any) -> bool:
    return bool(standing.refusal or standing.difference)


def _node_differs(world: World, facts: Facts) -> list[str]:
    """Return whether the proxy has not heard yet of the Node, or of a ServiceCIDR."""
    record = world.store.get("nodes", ("", "node-a"))
    zone = record.labels.get("topology.kubernetes.io/zone") or ""
    wrong = [] if facts.world.zone == zone else [f"zone {zone!r} expected, has {facts.world.zone!r}"]
    cidrs = [c for r in world.store.records("servicecidrs") for c in r.decode()["spec"].get("cidrs") or ()]
    settings = host.settings(facts.configuration())
    wanted = build(settings, Surroundings(facts.node, cidrs, {}))
    for family in facts.world.families:
        ours, theirs = facts.world.of(family), wanted.of(family)
        if ours is not None and theirs is not None and ours.service_cidrs != theirs.service_cidrs:
            wrong.append(f"ServiceCIDRs {cidrs} expected, has others")
    return wrong


async def _verified(world: World) -> list[str]:
    """The examiner that `kube-proxy verify` uses: the kernel beside the proxy's own plans."""
    running = Running(Client(str(world.live.proxy.control)))

    def work() -> list[str]:
        facts = running.facts()
        with examiners(facts, facts.world.families) as kernel:
            return [f"verify: {finding}" for finding in look(running.services, kernel, []).findings[:5]]

    return await _eventually(functools.partial(run_in, world.live.proxy.namespace, work))


async def _as_fresh(world: World, scene: Scene) -> list[str]:
    """The plans are those of the final state, and in nftables mode the dump is what a fresh table gets of it."""
    wanted = truth.plans(scene.planner)
    has = {name: one.plans for name, one in scene.held.items() if one.plans}
    wrong = [
        f"plans of {'/'.join(name)} are not those of its objects: {has.get(name)} instead of {wanted.get(name)}"
        for name in sorted(wanted.keys() | has.keys())
        if sorted(has.get(name, ()), key=repr) != sorted(wanted.get(name, ()), key=repr)
    ]
    if world.mode.name != "nftables" or wrong:
        return wrong[:3]
    fresh = await asyncio.to_thread(run_in_new, functools.partial(_fresh, scene.facts, wanted))

    def compare() -> list[str]:
        return differences(_dump(scene.facts), fresh)

    return await _eventually(functools.partial(run_in, world.live.proxy.namespace, compare))


def _fresh(facts: Facts, plans: truth.Plans) -> dict[str, Any]:
    """Return what a proxy without a history makes of plans. In a namespace that has nothing."""
    backends = modes.named(facts.mode).operations().open(facts.configuration(), facts.world, Registry())
    for backend in backends:
        of_family = {n: tuple(p for p in found if p.key.family is backend.family) for n, found in plans.items()}
        for _ in backend.resync({name: found for name, found in of_family.items() if found}):
            pass
    try:
        return _dump(facts)
    finally:
        for backend in backends:
            backend.close()


def _dump(facts: Facts) -> dict[str, Any]:
    """Return all elements and rules, by family, set and chain, as nft lists them; endpoints in no order."""
    ground, found = KernelGround(), {}
    for family in facts.world.families:
        contents = {n: e for n, e in ground.contents(family).items() if n not in HISTORIC}
        found |= {f"{family.label} {name}": value for name, value in without_slots(contents).items()}
    return found


def differences(has: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return in what two dumps differ."""
    wrong = []
    for name in sorted(has.keys() | wanted.keys()):
        one, other = has.get(name) or {}, wanted.get(name) or {}
        if one == other:
            continue
        if isinstance(one, set) and isinstance(other, set):
            wrong.append(
                f"{name}: too much {sorted(map(str, one - other))[:5]}, lacks {sorted(map(str, other - one))[:5]}"
            )
        else:
            keys = [k for k in {*one, *other} if _of(one, k) != _of(other, k)]
            wrong += [f"{name}, {k}: {_of(one, k)} instead of {_of(other, k)}" for k in keys[:3]]
    return wrong


def _of(found: Any, key: Any) -> Any:
    return found.get(key) if isinstance(found, dict) else key in found


async def _foretold(world: World, scene: Scene, chance: random.Random) -> list[str]:
    """Real packets meet what the model foretells, for a sample of frontends and places."""
    local = await run_in_async(
        world.live.proxy.namespace,
        lambda: host.packed_local_addresses(scene.facts.world.families, modes.interfaces()),
    )
    everything = frozenset(address for found in local.values() for address in found)
    fronts = [(p, f) for found in truth.plans(scene.planner).values() for p in found for f in p.frontends]
    habits = modes.named(scene.facts.mode).habits
    waits, wrong = 2, []
    for plan, frontend in chance.sample(fronts, min(SAMPLES, len(fronts))):
        place = chance.choice(PLACES)
        protocol = PROTOCOL_NAMES[frontend.protocol]
        if protocol == "SCTP":
            continue
        family = plan.key.family.label
        destination = frontend.address or pack(world.live.ips["node"][family])
        source = None if place == "node" else pack(world.live.ips[place][family])
        packet = Packet(source, destination, frontend.protocol, frontend.port)
        predicted = answer(scene.planner, packet, everything, habits)
        if not _answerable(world, predicted):
            continue
        waits -= predicted.outcome is Outcome.DROPPED
        if waits >= 0:
            wrong += await _asked(world, place, protocol.lower(), packet, predicted)
    return wrong


def _answerable(world: World, predicted: Predicted) -> bool:
    """Whether somebody is at every endpoint who says that he is."""
    pods = {pack(ip) for pod, ips in world.live.ips.items() if pod[0] in "ab" for ip in ips.values()}
    return predicted.outcome in {Outcome.FORWARDED, Outcome.REFUSED, Outcome.DROPPED} and all(
        choice.destination[:-2] in pods and int.from_bytes(choice.destination[-2:], "big") in {3000, 3001}
        for choice in predicted.choices
    )


async def _asked(world: World, place: str, protocol: str, packet: Packet, predicted: Predicted) -> list[str]:
    address = unpack(packet.destination)
    timeout = 0.25 if predicted.outcome is Outcome.DROPPED else 3.0
    count = 3 if predicted.outcome is Outcome.FORWARDED else 1
    answers = await world.live.cluster.probes(place, protocol, address, packet.port, count, timeout)
    wanted = {unpack(choice.destination[:-2]) for choice in predicted.choices}
    for got in answers:
        fine = {
            Outcome.FORWARDED: isinstance(got, Answer) and got.ip in wanted,
            Outcome.REFUSED: got == "refused",
            Outcome.DROPPED: got == "timeout",
        }[predicted.outcome]
        if not fine:
            steps = "; ".join(step.text for step in predicted.steps)
            foretold = f"{predicted.outcome.value} {sorted(wanted)}".strip()
            return [f"packet: {place} {protocol} {address}:{packet.port}: {foretold} foretold ({steps}), got {got}"]
    return []


async def _pages(world: World, scene: Scene) -> list[str]:
    """Health, metrics and /debug/state say what is so."""
    wrong = []
    for path in ("/healthz", "/livez", "/readyz"):
        status, body = await world.live.page(path)
        if status != 200:
            wrong.append(f"{path} says {status} while everything is programmed: {body[:300]}")
    for name in ("service", "endpoint"):
        pending = await world.live.metric(f"kubeproxy_sync_proxy_rules_{name}_changes_pending")
        if pending:
            wrong.append(f"{pending:g} {name} changes are pending while nothing is")
    _, text = await world.live.page("/debug/state", METRICS_PORT)
    found = {(s["namespace"], s["name"]): s["state"] for s in json.loads(text)["services"]}
    return wrong + [
        f"/debug/state says {found.get(name)} of {'/'.join(name)}, which is programmed"
        for name in truth.plans(scene.planner)
        if found.get(name) != "programmed"
    ]


async def nothing_left(world: World) -> list[str]:
    """With all objects of a history gone again, the proxy has what it had at first: descriptors, threads."""
    if world.carries:  # connections are descriptors
        if failures := await world.stop_traffic():
            return [f"steady traffic: {failures[0]}"]
        await asyncio.sleep(UDP_IDLE + 1)
    now = _usage(world.live.proxy.pid)
    if not world.baseline:
        world.baseline = now
        await world.settle_traffic()
        return []
    # Connections of watches that are being renewed, and of who just asked, come and go.
    until = time.monotonic() + 5
    while any(now[name] > before + 2 for name, before in world.baseline.items()) and time.monotonic() < until:
        await asyncio.sleep(0.1)
        now = _usage(world.live.proxy.pid)
    await world.settle_traffic()
    return [
        f"left: {now[name]} {name} are open after a history, {before} were before"
        for name, before in world.baseline.items()
        if now[name] > before + 2
    ]


def _usage(pid: int) -> dict[str, int]:
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"descriptors": descriptors, "threads": len(list(Path(f"/proc/{pid}/task").iterdir()))}
