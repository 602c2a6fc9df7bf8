"""The effects on clients if another configuration replaces the present one. For each address of each Service,
model/answer.py computes the outcome of a connection from a pod, from this node and from elsewhere, under both
configurations. Further differences follow from the habits of the two modes."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from itertools import islice
from typing import Any, Final, NamedTuple

from msgspec import Struct

from kubeproxy.ask.why import unmasqueraded
from kubeproxy.model.addresses import (
    PROTOCOL_NAMES,
    Family,
    Range,
    family_of,
    is_link_local,
    is_loopback,
    parse_network,
    unpack,
)
from kubeproxy.model.answer import Outcome, Packet, answer
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.index import Index
from kubeproxy.model.plan import (
    Detector,
    FamilyGlobals,
    Frontend,
    FrontendKind,
    Habits,
    HealthCheck,
    ServiceName,
    ServicePlan,
)
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import LOOPBACK
from kubeproxy.wording import counted

_OUTSIDE: Final = {
    Family.IPV4: bytes((198, 51, 100, 77)),  # RFC 5737
    Family.IPV6: b"\x20\x01\x0d\xb8" + bytes(11) + b"\x77",  # RFC 3849
}
_KINDS: Final = {
    FrontendKind.CLUSTER: "cluster IPs",
    FrontendKind.EXTERNAL: "external IPs",
    FrontendKind.LOADBALANCER: "load balancer addresses",
}
_SHOWN: Final = 5
_HERE, _ELSEWHERE = "pods on this node", "pods on other nodes"
_OUTSIDER: Final = "outside"
_SERVED: Final = frozenset({Outcome.FORWARDED, Outcome.HEALTH})
_WORDS: Final = {
    **dict.fromkeys(_SERVED, "served"),
    Outcome.NOT_OURS: "not answered by Services",
    Outcome.DROPPED: "dropped without an answer",
}


class ConfiguredNode(NamedTuple):
    """The node under one configuration: its compiled plans, the properties of its mode, and its detectLocalMode."""

    planner: Planner
    habits: Habits
    local_mode: str = "ClusterCIDR"


class ClientKind(NamedTuple):
    """A kind of client: its name, its address (None for this node), its incoming interface, whether only its
    connections to itself are compared, and more addresses of this kind."""

    words: str
    source: bytes | None
    interface: str = ""
    is_endpoint: bool = False
    others: tuple[bytes, ...] = ()

    def besides(self, endpoints: Collection[bytes]) -> ClientKind:
        """Return the client, if possible with an address that is not an endpoint of the Service, because an endpoint's
        connection may lead back to the endpoint itself."""
        if self.source not in endpoints or self.is_endpoint:
            return self
        return self._replace(source=next((one for one in self.others if one not in endpoints), self.source))


class Shift(Struct, frozen=True, rename="camel"):
    """A change in the outcomes of connections from `who` to `where`, which is the same for all of `services`."""

    where: tuple[str, ...]
    who: tuple[str, ...]
    before: str
    after: str
    services: tuple[str, ...]  # all affected Services as NAMESPACE/NAME
    text: str  # a sentence that describes this change of outcomes


class _Met(NamedTuple):
    """The outcome of connections, and more text; the outcome is None if the text is complete without it."""

    outcome: Outcome | None
    more: str = ""

    @property
    def words(self) -> str:
        return (_WORDS.get(self.outcome, self.outcome.value) if self.outcome is not None else "") + self.more


def _shift(where: tuple[str, ...], who: tuple[str, ...], old: _Met, new: _Met, services: tuple[str, ...]) -> Shift:
    places, clients = ", ".join(where), ", ".join(who)
    count = f"{counted(len(services), 'Service')}: " if len(services) > 1 else ""
    shown = count + ", ".join(services[:_SHOWN]) + (", ..." if len(services) > _SHOWN else "")
    text = f"{places}, for {clients}: {old.words} -> {new.words} ({shown})"
    if old.outcome is Outcome.NOT_OURS and new.outcome in _SERVED:
        text = f"{places} begin to answer {clients}{new.more} ({shown})"
    elif old.outcome in _SERVED and new.outcome is Outcome.NOT_OURS:
        text = f"{places} cease to answer {clients} ({shown})"
    return Shift(where, who, old.words, new.words, services, text)


Local = Mapping[Family, Sequence[bytes]]  # the node's own addresses, packed


class KnownPod(NamedTuple):
    """A pod or a pod network: an address, the name in texts, and the Node ('' if unknown)."""

    address: bytes
    words: str
    node: str


def known_pods(slices: Iterable[Slice], cidrs: Iterable[str], node: str, local: Local) -> list[KnownPod]:
    """Return the pods to compare: all endpoints except this node's own addresses, and the pod networks of the Node."""
    own = {address for addresses in local.values() for address in addresses}
    found = {each.address: each.node for piece in slices for each in piece.endpoints if each.address not in own}
    networks = ((cidr, parse_network(cidr)) for cidr in cidrs)
    named = [KnownPod(address, unpack(address), where) for address, where in sorted(found.items())]
    return [*named, *(KnownPod(_late_address(network), cidr, node) for cidr, network in networks if network)]


def shifts(before: ConfiguredNode, after: ConfiguredNode, local: Local, pods: Sequence[KnownPod] = ()) -> list[Shift]:
    """Return the changes for clients; `pods` are the known pods of the cluster. IPv6 link-local addresses of the node
    are omitted, because a client can use them only with the name of an interface."""
    found: dict[tuple[str, str, _Met, _Met, str], set[int]] = {}
    protocols: dict[tuple[str, str], set[int]] = {}  # by place and Service
    indices = Index(before.planner), Index(after.planner)
    here = {address for addresses in local.values() for address in addresses}
    places = {
        family: [one for one in each if len(one) == 4 or not is_link_local(one)] for family, each in local.items()
    }
    clients = {family: _clients(family, before, after, pods) for family in Family}
    away = {pod.address for pod in pods if pod.node != before.planner.world.node_name}
    for name in sorted({*before.planner.compiled, *after.planner.compiled}):
        service = "/".join(name)
        for where, client, packet in _questions(name, (before, after), clients, away, places):
            old, new = (
                _met(side, packet, here, index, client, away)
                for side, index in zip((before, after), indices, strict=True)
            )
            protocols.setdefault((where, service), set()).add(packet.protocol)
            if old != new and old is not None and new is not None:
                (was, _), (will, _) = old, new
                shown = will if was.words != will.words else _Met(None, "other endpoints")
                key = (where, client.words, was, shown, service)
                found.setdefault(key, set()).add(packet.protocol)
    rows: list[tuple[Any, ...]] = []
    for (where, *others, service), some in found.items():
        names = ", ".join(PROTOCOL_NAMES[one] for one in sorted(some))
        rows.append((where if some == protocols[where, service] else f"{where} ({names})", *others, service))
    for column in (4, 1, 0):  # Services, clients, addresses
        rows = _joined(rows, column)
    return [_shift(*row) for row in rows]


def _joined(rows: Iterable[tuple[Any, ...]], column: int) -> list[tuple[Any, ...]]:
    """Join rows that differ only in one column, which then contains a tuple of all its values."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        found.setdefault((*row[:column], *row[column + 1 :]), []).append(row[column])
    return [(*rest[:column], tuple(values), *rest[column:]) for rest, values in found.items()]


def spared(found: Iterable[Shift]) -> Iterator[str]:
    """Yield a sentence if known pods are affected, but only on other nodes."""
    affected = {place for one in found for who in one.who for place in (_HERE, _ELSEWHERE) if who.startswith(place)}
    if affected == {_ELSEWHERE}:
        yield "no known pod of this node is affected, only pods of other nodes"


def _met(
    side: ConfiguredNode, packet: Packet, here: set[bytes], index: Index, client: ClientKind, away: Collection[bytes]
) -> tuple[_Met, frozenset[bytes]] | None:
    """Return the outcome for a client, and the endpoints. If only the client's connections to itself are compared,
    return the outcome of these connections, or None without such connections. `away` are endpoints on other nodes."""
    made, to_itself = answer(side.planner, packet, here, side.habits, index), client.is_endpoint
    own = [choice for choice in made.choices if choice.destination[:-2] == packet.source]
    if to_itself and not own:
        return None
    if made.outcome is not Outcome.FORWARDED:
        return _Met(made.outcome), frozenset()
    if not side.habits.carries_sctp and packet.protocol == socket.IPPROTO_SCTP:
        return _Met(Outcome.REFUSED, ", as this mode carries no SCTP"), frozenset()
    if to_itself and not all(choice.masqueraded for choice in own):
        return _Met(None, "a timeout, as the pod gets a packet from itself"), frozenset()
    # A pod of this node that connects to itself receives this node's address as the source in every configuration.
    shown = own if to_itself else [choice for choice in made.choices if choice not in own] or own
    hidden = any(choice.masqueraded for choice in shown)
    endpoints = frozenset(choice.destination for choice in made.choices)
    astray = client == ClientKind(_OUTSIDER, packet.source) and made.keeps_outside and not hidden
    if astray and any(one[:-2] in away for one in endpoints):
        reason, _ = unmasqueraded(side.local_mode, family_of(packet.destination))
        lost = "answers of endpoints on other nodes bypass this node"
        return _Met(made.outcome, f", except that {lost} ({reason})"), endpoints
    return _Met(made.outcome, ", with this node's address" * hidden), endpoints


def _questions(
    name: ServiceName,
    sides: Sequence[ConfiguredNode],
    clients: Mapping[Family, Sequence[ClientKind]],
    away: Collection[bytes],
    local: Local,
) -> Iterator[tuple[str, ClientKind, Packet]]:
    asked: set[tuple[Family, bytes]] = set()
    for side in sides:
        compiled = side.planner.compiled.get(name)
        for plan in compiled.plans if compiled is not None else ():
            endpoints = {one[:-2] for one in plan.serving}
            for frontend in plan.all_frontends:
                family = plan.key.family
                if (family, frontend.key) not in asked:
                    asked.add((family, frontend.key))
                    kinds = [client.besides(endpoints) for client in clients[family]]
                    yield from _packets(frontend, family, [*kinds, *_itself(plan, sides, away)], local)
        if compiled is not None and compiled.health is not None:
            yield from _health_checks(compiled.health, local)


def _health_checks(check: HealthCheck, local: Local) -> Iterator[tuple[str, ClientKind, Packet]]:
    for family, _ in check.counts:
        for address in local.get(family, ()):
            client, tcp = ClientKind("load balancers", _OUTSIDE[family]), socket.IPPROTO_TCP
            yield f"health check ports on {unpack(address)}", client, Packet(client.source, address, tcp, check.port)


def _itself(plan: ServicePlan, sides: Sequence[ConfiguredNode], away: Collection[bytes]) -> Iterator[ClientKind]:
    """Yield at most one client: an endpoint of the plan on another node, which is recognised as a pod. If the endpoint
    connects to its own Service's NodePort on this node, this node may send the connection back to the endpoint. `away`
    are addresses on other nodes."""
    detectors = [(side.planner.world.of(plan.key.family) or FamilyGlobals()).detector for side in sides]
    pods = (one[:-2] for one in plan.cluster if one[:-2] in away)
    for address in islice((pod for pod in pods if any(detector.holds(pod, "") for detector in detectors)), 1):
        yield ClientKind(
            "endpoints with another nodeName, or without one, that receive their own connections",
            address,
            is_endpoint=True,
        )


def _packets(
    frontend: Frontend, family: Family, clients: Sequence[ClientKind], local: Local
) -> Iterator[tuple[str, ClientKind, Packet]]:
    if frontend.kind is not FrontendKind.NODEPORT:
        places = [(f"{family.label} {_KINDS[frontend.kind]}", frontend.address)]
    else:
        addresses = dict.fromkeys((*local.get(family, ()), LOOPBACK[family]))
        places = [(f"NodePorts on {unpack(address)}", address) for address in addresses]
    for where, address in places:
        for client in clients:
            # This node translates connections of another node's pods only if they go to an address of this node. The
            # other node translates the rest.
            passes = address in local.get(family, ()) if client.is_endpoint else not is_loopback(address)
            if client.source is None or passes:
                packet = Packet(client.source, address, frontend.protocol, frontend.port, client.interface)
                yield where, client, packet


def _clients(
    family: Family, before: ConfiguredNode, after: ConfiguredNode, pods: Sequence[KnownPod]
) -> list[ClientKind]:
    """Return the clients to compare: this node, an outside client, and pods. A pod is a client that at least one
    configuration recognises as a pod. Known pods are grouped by the configurations that recognise them; without known
    pods, a made-up pod represents each configuration."""
    found = [ClientKind("this node", None), ClientKind(_OUTSIDER, _OUTSIDE[family])]
    detectors = dict.fromkeys((side.planner.world.of(family) or FamilyGlobals()).detector for side in (before, after))
    if len(detectors) == 1:
        return found + [pod for detector in detectors if (pod := _pod(detector, family)) is not None]
    known = [one for one in pods if len(one.address) == family.address_size]
    if known and all(detector.kind == "network" for detector in detectors):
        groups: dict[tuple[str, str], list[KnownPod]] = {}
        for one in known:
            words = " and ".join(d.words for d in detectors if d.holds(one.address, ""))
            where = _HERE if one.node == before.planner.world.node_name else _ELSEWHERE
            groups.setdefault((where if one.node else "pods", words), []).append(one)
        ordered = sorted(groups.items(), key=lambda item: (_HERE, _ELSEWHERE, "pods").index(item[0][0]))
        return found + [_known(f"{who} by {words}", each) for (who, words), each in ordered if words]
    made_up = [(detector.words, pod) for detector in detectors if (pod := _pod(detector, family)) is not None]
    return found + _together(made_up)


def _together(pods: Sequence[tuple[str, ClientKind]]) -> list[ClientKind]:
    """Return made-up pods of two configurations. If one configuration recognises pods by a network and the other by an
    interface, return three pods: one pod that both configurations recognise, and for each configuration a pod that the
    other does not recognise."""
    networks, entering = ([one for one in pods if bool(one[1].interface) is by] for by in (False, True))
    if not networks or not entering:
        return [pod._replace(words=f"pods by {words}") for words, pod in pods]
    ((network, inside), *_), ((by, entered), *_) = networks, entering
    return [
        inside._replace(words=f"pods by {network} that come in by {by}", interface=entered.interface),
        inside._replace(words=f"pods by {network} that do not come in by {by}"),
        entered._replace(words=f"what comes in by {by} from outside of {network}"),
    ]


def _known(words: str, pods: Sequence[KnownPod]) -> ClientKind:
    more = f", and {len(pods) - _SHOWN} more" if len(pods) > _SHOWN else ""
    first, *others = (pod.address for pod in pods)
    return ClientKind(f"{words} ({', '.join(pod.words for pod in pods[:_SHOWN])}{more})", first, others=tuple(others))


def _pod(detector: Detector, family: Family) -> ClientKind | None:
    if detector.kind == "network":
        network = parse_network(detector.value)
        if network is None or len(network[0]) != family.address_size:
            return None
        return ClientKind("pods", _late_address(network))
    return ClientKind("pods", _OUTSIDE[family], detector.value) if detector.implemented else None


def _late_address(network: Range) -> bytes:
    last = network[1]
    return last[:-1] + bytes((last[-1] & 0xFE,))


def remarks(before: ConfiguredNode, after: ConfiguredNode, *, same_mode: bool) -> Iterator[str]:
    """Yield a sentence for each further change that clients can observe, with the number of affected Services."""
    old, new = before.habits, after.habits
    was, plans = ([p for each in one.planner.compiled.values() for p in each.plans] for one in (before, after))
    had, has = (_services(plan for plan in each if plan.balance) for each in (was, plans))
    if had and not has:
        yield f"annotations for weights and consistent hashing are ignored: shares become equal ({had})"
    if has and not had:
        yield f"annotations for weights and consistent hashing take effect: shares become unequal ({has})"
    if old.affinity is not new.affinity and (count := _services(plan for plan in plans if plan.affinity)):
        scopes = f"for {new.affinity.value}, no longer for {old.affinity.value}"
        yield f"session affinity keeps a client's endpoint {scopes} ({count})"
    if not same_mode and (count := _services(plan for plan in plans if plan.affinity)):
        yield f"session affinity starts again: each client may get another endpoint once ({count})"
    kinds = {frontend.kind for plan in plans for frontend in plan.frontends}
    for kind in sorted(kinds & _KINDS.keys()):
        if (refused := kind in new.refuses_ports) is not (kind in old.refuses_ports):
            sense = "are refused" if refused else "are no longer refused, and follow their route"
            yield f"connections to {_KINDS[kind]} on ports that no Service has {sense}"
    if old.drops_unowned is not new.drops_unowned:
        sense = "is dropped" if new.drops_unowned else "is not dropped any more"
        yield f"traffic to addresses of ServiceCIDRs that no Service has {sense}"


def resized(before: ConfiguredNode, after: ConfiguredNode, pods: Sequence[KnownPod]) -> Iterator[str]:
    """Yield the address ranges that only one of the two pod networks contains, because unknown clients may have such
    addresses."""
    for family in Family:
        old, new = ((side.planner.world.of(family) or FamilyGlobals()).detector for side in (before, after))
        if old == new or {old.kind, new.kind} != {"network"}:
            continue
        count = sum(len(pod.address) == family.address_size for pod in pods)
        compared = (
            "1 known pod or network was compared" if count == 1 else f"{count} known pods or networks were compared"
        )
        ours, theirs = ip_network(old.value), ip_network(new.value)
        for one, other, verb in ((ours, theirs, "no longer count"), (theirs, ours, "newly count")):
            if parts := _without(one, other):
                where = ", ".join(map(str, parts[:_SHOWN])) + (", ..." if len(parts) > _SHOWN else "")
                yield f"a client in {where} would {verb} as a pod; only {compared}"


def _without(one: IPv4Network | IPv6Network, other: IPv4Network | IPv6Network) -> list[IPv4Network | IPv6Network]:
    if not one.overlaps(other):
        return [one]
    # The two networks are of one family.
    return sorted(one.address_exclude(other)) if one.prefixlen < other.prefixlen else []  # type: ignore[arg-type]


def lasting(before: Habits, after: Habits, *, same_mode: bool) -> str:
    """Return a sentence about the effect on established connections."""
    if not before.outlives_mode and (not same_mode or before.carries):
        return "established connections end: the old proxy relays them, or its virtual servers contain them"
    if not same_mode and not after.outlives_mode:
        return "established connections continue; connections made in the new mode end when the mode changes again"
    return "established connections continue"


def _services(plans: Iterable[ServicePlan]) -> str:
    count = len({(plan.key.namespace, plan.key.name) for plan in plans})
    return counted(count, "Service") if count else ""
