"""The answer of `kube-proxy plan`: the effects of another configuration on clients (shifts.py) and on this node."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Final

from msgspec import Struct, structs
from msgspec.structs import replace

from kubeproxy.ask.checks import checkup, whereabouts
from kubeproxy.ask.checks.node import number
from kubeproxy.ask.facts import Facts, Objects
from kubeproxy.ask.shifts import ConfiguredNode, Local, Shift, known_pods, lasting, remarks, resized, shifts, spared
from kubeproxy.ask.source import Source
from kubeproxy.backends.leftovers import leftover_chains
from kubeproxy.backends.mode import Mode, Sight, Weight
from kubeproxy.config.types import KubeProxyConfiguration, differences
from kubeproxy.errors import KubeProxyError, Unsupported
from kubeproxy.kernel import chains, route
from kubeproxy.kernel.proc.sysctl import NF_CONNTRACK_MAX
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings, Surroundings, build, pod_cidrs, primary_family
from kubeproxy.setup import host, modes
from kubeproxy.wording import counted

REMOVED: Final = (
    "leftovers that the proxy removes at its next start, once the new rules are in place; do not remove them by hand "
    "before"
)
STAYS: Final = (
    "not removed by the proxy, as this variant of iptables is not installed; install it, and restart the proxy"
)


class Outlook(Struct, frozen=True, kw_only=True, rename="camel"):
    """The effects of another configuration."""

    mode: str
    elsewhere: str  # the reason why this machine is not the node in question, with the fix; '' if it may be the node
    fields: tuple[str, ...]  # lines "path: old -> new"
    shifts: tuple[Shift, ...]  # changes that clients notice
    remarks: tuple[str, ...]  # further changes that clients can observe
    node: tuple[str, ...]  # changes of sysctls, and rules that are written and removed
    connections: str
    lacks: str  # a requirement that this node lacks; '' for none
    unknown: tuple[str, ...]  # effects that could not be determined


def outlook(asked: Source, facts: Facts, now: KubeProxyConfiguration, new: KubeProxyConfiguration) -> Outlook:
    """Return the effects on a proxy's node if `new` replaces the configuration `now`. Raises KubeProxyError."""
    old_mode, mode = modes.named(facts.mode), modes.named(new.active_mode)
    settings, lacks, alone = settings_for(facts, new, mode)
    local = host.packed_local_addresses(tuple(Family))
    world, unknown = world_for(facts, settings, local)
    objects = tuple(asked.objects())
    before, after = planned(facts.world, objects), planned(world, objects)
    slices = [piece for each in objects for piece in each.slices.values()]
    sides = (
        ConfiguredNode(before, old_mode.habits, now.local_mode),
        ConfiguredNode(after, mode.habits, new.local_mode),
    )
    same = mode.name == old_mode.name
    node = [*alone, *_sysctls(mode, new), *_written(old_mode, mode, before, after, local), *leftovers(mode, unknown)]
    away = whereabouts.elsewhere(checkup.checked(asked, facts), "kubectl kubeproxy doctor")
    pods = known_pods(slices, pod_cidrs(facts.node), facts.world.node_name, local)
    found = shifts(*sides, local, pods)
    return Outlook(
        mode=mode.name,
        elsewhere=f"{away.text}. Fix: {away.fix}" if away is not None else "",
        fields=tuple(differences(now, new)),
        shifts=tuple(found),
        remarks=(*_moved(now, new), *_unmet(now, new), *resized(*sides, pods), *remarks(*sides, same_mode=same)),
        node=(*spared(found), *node) if away is None else (),
        connections=lasting(*(side.habits for side in sides), same_mode=same),
        lacks=lacks,
        unknown=tuple(unknown),
    )


def planned(world: Globals, objects: Iterable[Objects]) -> Planner:
    """Return a planner that has compiled these objects for a node with these globals."""
    planner = Planner(world)
    for each in objects:
        services = {each.name: each.service} if each.service is not None else {}
        planner.adopt(services, {each.name: each.slices} if each.slices else {})
    planner.take()
    return planner


def settings_for(facts: Facts, new: KubeProxyConfiguration, mode: Mode) -> tuple[Settings, str, list[str]]:
    """Return the settings on this node, a missing requirement ('' for none), and remarks about a family without
    support."""
    settings = host.settings(new, facts.world.features.values)
    primary = primary_family(settings, facts.node)
    try:
        able = host.supported(settings.families, primary, partial(mode.operations().look, new))
    except Unsupported as error:
        return settings, str(error), []
    return structs.replace(settings, families=able.families), "", [able.words] if able.lack else []


def world_for(facts: Facts, settings: Settings, local: Local) -> tuple[Globals, list[str]]:
    """Return the node's globals under the new settings, and sentences about unknown parts."""
    unknown = []
    if settings.node_name != facts.world.node_name:
        unknown.append(
            f"Node {settings.node_name} is another one than {facts.world.node_name}: its addresses, zone and pod "
            f"networks are not known here, and this comparison assumes those of {facts.world.node_name}"
        )
    world = build(settings, Surroundings(facts.node, (), local))
    parts = {}
    for family, part in world.parts.items():
        old = facts.world.of(family)
        parts[family] = replace(part, service_cidrs=old.service_cidrs) if old is not None else part
    return replace(world, ipv4=parts.get(Family.IPV4), ipv6=parts.get(Family.IPV6)), unknown


def _moved(now: KubeProxyConfiguration, new: KubeProxyConfiguration) -> list[str]:
    old, other = now.healthz_bind_address, new.healthz_bind_address
    ends = f"/healthz and /livez answer on {other or 'no address'}, no longer on {old}"
    return [f"load balancers that check this node may stop using it: {ends}"] if old and old != other else []


def _unmet(now: KubeProxyConfiguration, new: KubeProxyConfiguration) -> list[str]:
    name = new.detect_local.bridge_interface
    if new.local_mode != "BridgeInterface" or name == now.detect_local.bridge_interface:
        return []
    if any(one.name == name for one in route.interfaces()):
        return []
    return [f"pods of this node count as outside: there is no interface {name} (detectLocal.bridgeInterface)"]


def _sysctls(mode: Mode, new: KubeProxyConfiguration) -> list[str]:
    lines = []
    for key, wanted in (*host.conntrack_sysctls(new.conntrack), *mode.operations().sysctls(new)):
        actual = number(key)
        if actual is None:
            lines.append(f"sysctl {key.replace('/', '.')}: {wanted}, which this kernel does not have now")
        elif actual != wanted and not (key == NF_CONNTRACK_MAX and actual > wanted):
            lines.append(f"sysctl {key.replace('/', '.')}: {actual} -> {wanted}")
    return lines


def _written(old: Mode, new: Mode, before: Planner, after: Planner, local: Local) -> list[str]:
    weights = []
    for mode, planner in ((old, before), (new, after)):
        plans, weigh = {name: one.plans for name, one in planner.compiled.items()}, mode.operations().weigh
        each = [weigh(planner.world, family, plans, local.get(family, ())) for family in planner.world.families]
        weights.append(Weight(sum(weight.amount for weight in each), each[0].of if each else ""))
    if old is new and weights[0] == weights[1]:
        return []
    services = counted(len(after.compiled), "Service")
    was, will = (f"{weight.amount} {weight.of}" for weight in weights)
    return [f"the proxy would write {will} for {services}; the running configuration writes {was}"]


def leftovers(mode: Mode, unknown: list[str]) -> list[str]:
    """Return descriptions of the existing rules of all modes and proxies except the given mode, each with a safe way to
    remove the rules. The function assumes that the given mode uses the node's iptables variant; in ipvs mode, the
    variant could be detected only by writing rules."""
    owns = mode.operations().owns

    @cache
    def used(family: Family) -> str:
        return xtables.variant_commands(family, xtables.chosen()).name

    def keeps(commands: Commands, table: str, chain: str) -> bool:
        return owns(table, chain) and commands.name == used(commands.family)

    try:
        known = chains.chains()
        removed, stuck = leftover_chains(chains.iptables_chains(known), keeps)
        others = [other for other in modes.every() if other.name != mode.name]
        removed = [*(trace for other in others for trace in other.traces(Sight(known, ()))), *removed]
    except (KubeProxyError, OSError) as error:
        unknown.append(f"what other modes and proxies left: {error}")
        return []
    return [f"{REMOVED}: {trace.what}" for trace in removed] + [f"{STAYS}: {trace.what}" for trace in stuck]
