"""The answer of `kube-proxy plan --from-kernel`, which states whether present and new rules give all packets the same
outcome. The present rules may belong to any kube-proxy, and are only read. The new rules are the rules of this program
for a configuration. The command writes the new rules into an empty network namespace, together with the kubelet's
rules, and reads them from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from ipaddress import ip_address

from msgspec import Struct

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.outlook import planned, settings_for, world_for
from kubeproxy.ask.source import Source
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.proc.capability import in_empty_network
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables_lock import nobodys_lock
from kubeproxy.meaning.compare import Comparison, FirstPacket, Shares, Witness, alike, compare, outcomes
from kubeproxy.meaning.found import place_of, rules_of_kube_proxy, rules_of_kubelet, rulesets_of_kube_proxies
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family, pack, unpack
from kubeproxy.model.claims import written_addresses
from kubeproxy.model.plan import NOTHING
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings
from kubeproxy.registry import MetricRegistry
from kubeproxy.setup import host, modes


class SwitchDifference(Struct, frozen=True, kw_only=True, rename="camel"):
    """A group of differences of the same kind."""

    classes: int  # the number of packet classes (see meaning/compare.py)
    packet: str  # a packet of one of these classes
    now: tuple[str, ...]  # the present outcomes of this packet
    then: tuple[str, ...]  # the packet's outcomes with the new rules


class Switch(Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer for one family."""

    family: str
    classes: int  # the number of all packet classes
    differences: tuple[SwitchDifference, ...]  # one for each group
    unknown: tuple[str, ...]  # rules that this program does not support


def switches(asked: Source, facts: Facts, config: KubeProxyConfiguration) -> tuple[Switch, ...]:
    """Compare the rules of this network namespace with this program's rules for a configuration. Raises
    KubeProxyError."""
    settings = settings_of_compared(facts, config)
    world, unknown = world_for(facts, settings, host.packed_local_addresses(tuple(Family)))
    if unknown:
        raise Unsupported(unknown[0])
    found = comparisons(config, planned(world, asked.objects()))
    return tuple(_switch(family, comparison) for family, comparison in found.items())


def settings_of_compared(facts: Facts, config: KubeProxyConfiguration) -> Settings:
    """Return the node's settings for a configuration. Raises Unsupported if its mode cannot be compared or used."""
    mode = modes.named(config.active_mode)
    if not mode.comparable:
        names = " and ".join(each.name for each in modes.every() if each.comparable)
        raise Unsupported(f"--from-kernel compares the modes {names}, not {mode.name}")
    settings, lacks, _ = settings_for(facts, config, mode)
    if lacks:
        raise Unsupported(lacks)
    return settings


def comparisons(config: KubeProxyConfiguration, planner: Planner) -> dict[Family, Comparison]:
    """Compare the rules of this network namespace with this program's rules for a planner's objects. Raises
    KubeProxyError."""
    places = {family: place_of(family) for family in planner.world.families}
    now = {family: rules_of_kube_proxy(family, place) for family, place in places.items()}
    then = _rules_for(config, planner, places)
    return {family: _compared(family, now[family], then[family], place) for family, place in places.items()}


def _compared(family: Family, now: CompiledRules, then: CompiledRules, place: NodePlace) -> Comparison:
    """Compare two rulesets. If both the table kube-proxy and iptables, or both variants of iptables, have rules for
    Services, the order of these rules is unknown, because the kernel does not report the order of chains with equal
    priorities."""
    found, several = compare(now, then, place), rulesets_of_kube_proxies(family)
    if len(several) < 2:
        return found
    text = f"{' and '.join(several)} both have rules for Services, and may belong to two kube-proxies: {_ONE}"
    return found._replace(unknown=(*found.unknown, text))


_ONE = "see that only one kube-proxy runs, and restart it: it then removes the rules of the other kube-proxy"


def _rules_for(
    config: KubeProxyConfiguration, planner: Planner, places: Mapping[Family, NodePlace]
) -> dict[Family, CompiledRules]:
    planner.take()
    plans = {name: compiled.plans for name, compiled in planner.compiled.items()}
    kubelets = {family: text for family in places if (text := rules_of_kubelet(family))}

    def written() -> dict[Family, CompiledRules]:
        for family, text in kubelets.items():
            xtables.variant_commands(family, xtables.chosen()).restore([text])
        with ExitStack() as stack:
            for backend in modes.named(config.active_mode).operations().open(config, planner.world, MetricRegistry()):
                stack.enter_context(closing(backend))
                own = {
                    name: tuple(plan for plan in each if plan.key.family is backend.family)
                    for name, each in plans.items()
                }
                for _ in backend.resync(own):
                    pass
            return {family: rules_of_kube_proxy(family, place) for family, place in places.items()}

    with nobodys_lock():  # all network namespaces share the usual lock, which the running kube-proxy needs
        return in_empty_network(written)


def on_purpose(
    strict: KubeProxyConfiguration, planner: Planner, found: Iterable[tuple[Family, Witness]]
) -> tuple[str, ...]:
    """Return a reason for each difference that is intended (see docs/migrate.md), and '' for any other difference. A
    difference is intended if `strict`, the configuration of `planner`, gives the present outcome, if the Service with
    the address has a problem, or if an endpoint with two ports connects to itself. Raises KubeProxyError."""
    places = {family: place_of(family) for family in planner.world.families}
    rules = _rules_for(strict, planner, places)
    return tuple(
        "the outcome is the same with --strict"
        if alike(outcomes(rules[family], places[family], witness.packet), witness.first)
        else _problem_at(planner, witness.packet) or _to_itself(witness)
        for family, witness in found
    )


def _to_itself(witness: Witness) -> str:
    source = int(ip_address(witness.packet.source))
    one, other = ({each._replace(masquerade=False) for each, _ in shares} for shares in witness[1:])
    own = [each for each in one if each.kind == "translated" and each.address == source]
    return "an endpoint that is behind two ports connects to itself" if one == other and len(own) > 1 else ""


def _problem_at(planner: Planner, packet: FirstPacket) -> str:
    address = pack(packet.destination)
    for name, service in planner.services.items():
        ports = service.spec.ports or ()
        given = {*map(pack, service.spec.cluster_ips or ()), *written_addresses(service)}
        if packet.port in {each.node_port for each in ports} or (
            address in given and packet.port in {each.port for each in ports}
        ):
            for problem in planner.compiled.get(name, NOTHING).problems:
                return f"Service {'/'.join(name)}: {problem.field}: {problem.reason}"
    return ""


def _switch(family: Family, found: Comparison) -> Switch:
    return Switch(
        family=family.label,
        classes=found.classes,
        differences=tuple(
            SwitchDifference(
                classes=group.classes,
                packet=str(group.witness.packet),
                now=outcome_words(group.witness.first, family),
                then=outcome_words(group.witness.second, family),
            )
            for group in found.causes
        ),
        unknown=found.unknown,
    )


def outcome_words(shares: Shares, family: Family) -> tuple[str, ...]:
    """Return the outcomes of a packet and their shares as text."""
    texts = []
    for outcome, share in shares:
        address = unpack(outcome.address.to_bytes(family.address_size, "big"))
        to = f" to {address} port {outcome.port}" * (outcome.kind == "translated")
        more = ", masqueraded" * outcome.masquerade + ", remembered" * outcome.remembered
        texts.append(f"{share:.1%} {outcome.kind}{to}{more}")
    return tuple(texts)
