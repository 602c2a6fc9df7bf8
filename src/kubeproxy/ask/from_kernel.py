"""The question of `kube-proxy plan --from-kernel`: do present and new rules give all packets the same outcome? The
present rules may be those of any kube-proxy, and are only read. The new rules are those that this program would write
for a configuration. They are written into an empty network namespace, beside kubelet's rules, and read back from there.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

from msgspec import Struct

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.outlook import planned, settings_for, world_for
from kubeproxy.ask.source import Source
from kubeproxy.backends.mode import Mode
from kubeproxy.backends.state import Plans
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.proc.capability import in_empty_network
from kubeproxy.kernel.xtables import xtables
from kubeproxy.meaning.compare import Shares, compare
from kubeproxy.meaning.found import place_of, rules_of_kube_proxy, rules_of_kubelet
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family, unpack
from kubeproxy.model.plan import Globals
from kubeproxy.registry import MetricRegistry
from kubeproxy.setup import host, modes


class SwitchDifference(Struct, frozen=True, kw_only=True, rename="camel"):
    """A group of differences."""

    classes: int  # the number of classes of packets
    packet: str  # a packet of one of these classes
    now: tuple[str, ...]  # the present outcomes of this packet
    then: tuple[str, ...]  # its outcomes with the new rules


class Switch(Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer for one family."""

    family: str
    classes: int  # the number of classes of packets
    differences: tuple[SwitchDifference, ...]  # in groups
    unknown: tuple[str, ...]  # rules that this program does not support


def switches(asked: Source, facts: Facts, config: KubeProxyConfiguration) -> tuple[Switch, ...]:
    """Compare the rules of this network namespace with those for a configuration. Raises KubeProxyError."""
    mode = modes.named(config.active_mode)
    if not mode.comparable:
        names = " and ".join(each.name for each in modes.every() if each.comparable)
        raise Unsupported(f"--from-kernel compares the modes {names}, not {mode.name}")
    settings, lacks, _ = settings_for(facts, config, mode)
    if lacks:
        raise Unsupported(lacks)
    world, unknown = world_for(facts, settings, host.packed_local_addresses(tuple(Family), modes.interfaces()))
    if unknown:
        raise Unsupported(unknown[0])
    planner = planned(world, asked.objects())
    plans = {name: compiled.plans for name, compiled in planner.compiled.items()}
    return _switches(mode, config, planner.world, plans)


def _switches(mode: Mode, config: KubeProxyConfiguration, world: Globals, plans: Plans) -> tuple[Switch, ...]:
    places = {family: place_of(family) for family in world.families}
    now = {family: rules_of_kube_proxy(family, places[family]) for family in world.families}

    kubelets = {family: text for family in world.families if (text := rules_of_kubelet(family))}

    def written() -> dict[Family, CompiledRules]:
        for family, text in kubelets.items():
            xtables.variant_commands(family, xtables.chosen()).restore([text])
        with ExitStack() as stack:
            for backend in mode.operations().open(config, world, MetricRegistry()):
                stack.enter_context(closing(backend))
                own = {
                    name: tuple(plan for plan in each if plan.key.family is backend.family)
                    for name, each in plans.items()
                }
                for _ in backend.resync(own):
                    pass
            return {family: rules_of_kube_proxy(family, places[family]) for family in world.families}

    then = in_empty_network(written)
    return tuple(_compared(family, now[family], then[family], places[family]) for family in world.families)


def _compared(family: Family, now: CompiledRules, then: CompiledRules, place: NodePlace) -> Switch:
    found = compare(now, then, place)
    return Switch(
        family=family.label,
        classes=found.classes,
        differences=tuple(
            SwitchDifference(
                classes=group.classes,
                packet=str(group.witness.packet),
                now=_words(group.witness.first, family),
                then=_words(group.witness.second, family),
            )
            for group in found.causes
        ),
        unknown=found.unknown,
    )


def _words(shares: Shares, family: Family) -> tuple[str, ...]:
    return tuple(
        f"{share:.1%} {outcome.kind}"
        + (
            f" to {unpack(outcome.address.to_bytes(family.address_size, 'big'))} port {outcome.port}"
            if outcome.kind == "translated"
            else ""
        )
        + (", masqueraded" if outcome.masquerade else "")
        + (", remembered" if outcome.remembered else "")
        for outcome, share in shares
    )
