"""The columns of `kube-proxy services`: addresses, number of endpoints, policies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from kubeproxy.model.addresses import FAMILIES, PORT_BYTES, Family, host_port, unpack
from kubeproxy.model.choosing import NO_PORT, READY, endpoint_states
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.objects import Service
from kubeproxy.model.plan import Globals, Policy, ServicePlan


class EndpointCount(NamedTuple):
    """Number of ready endpoints and number of all endpoints; an endpoint is an address and port."""

    ready: int
    total: int


def addresses(plans: Iterable[ServicePlan], here: Globals | None = None) -> Iterator[str]:
    """Yield the distinct frontends of a Service as text. A NodePort has its addresses on the node `here`. It has the
    address * if no node is given, or if it answers on all addresses except loopback."""
    yield from dict.fromkeys(
        host_port(address, one.port_text.lower())
        for plan in plans
        for one in plan.all_frontends
        for address in ([unpack(one.address)] if one.address else nodeport_hosts(plan.key.family.label, here))
    )


def nodeport_hosts(family: str, here: Globals | None) -> list[str]:
    """Return the addresses of NodePorts of a family ('IPv4' or 'IPv6') as text, as in `addresses`."""
    ours = here.of(FAMILIES[family]) if here is not None else None
    return ["*"] if ours is None or ours.nodeport_ips is None else list(map(unpack, ours.nodeport_ips))


def endpoints(slices: Iterable[Slice], plans: Iterable[ServicePlan]) -> EndpointCount:
    """Count the endpoints of a Service's slices, in the families of its plans if it has plans. An endpoint in two
    slices, for example while it moves, counts once. A dual-stack pod has an address in each family, so only the family
    with more ready endpoints is counted. Drained endpoints (weight 0), ejected endpoints, and endpoints of a slice
    without ports (no container has the named targetPort) are never ready. If no port has an endpoint, because no
    EndpointSlice has the Service's ports, no endpoint is ready."""
    every = list(plans)
    served = {plan.key.family for plan in every}
    pieces = [piece for piece in slices if not served or piece.family in served]
    drained = {one for plan in every if plan.balance is not None for one in plan.balance.drained}
    drained.update(one for plan in every for one in plan.ejected or ())
    lacks = not any(plan.usable for plan in every) and _lack_ports(pieces, every)
    if len(pieces) == 1 and len(pieces[0].destinations) == 1 and not (drained or lacks):  # nearly always
        count = len(pieces[0].destinations[0])
        return EndpointCount(count, count)
    families = {piece.family for piece in pieces}
    each = [_counted((piece for piece in pieces if piece.family is family), drained) for family in families]
    most = max(each, default=EndpointCount(0, 0))
    return most._replace(ready=0) if lacks else most


def _counted(slices: Iterable[Slice], drained: set[bytes]) -> EndpointCount:
    ready: set[bytes] = set()
    known: set[bytes] = set()
    for piece in slices:
        if piece.particular is None:
            for destinations in piece.destinations:
                ready.update(destinations)
            continue
        for number in [PORT_BYTES[port.port] for port in piece.ports]:
            known.update([one.address + number for one in piece.particular])
            ready.update([one.address + number for one in piece.particular if one.ready])
        if not piece.ports:
            known.update([one.address for one in piece.particular])
    return EndpointCount(len(ready - drained), len(known | ready))


def unserved(plans: Sequence[ServicePlan]) -> Iterator[str]:
    """Yield the ports without an available endpoint, such as 80/TCP, or 80/TCP (IPv6) if only one family has no
    endpoint. The metric kubeproxy_services_without_endpoints counts the Services with such ports."""
    empty = _empty(plans)
    if not empty:  # nearly always
        return
    served = {plan.key._replace(family=family) for plan in plans if plan.usable for family in Family}
    texts = (one.frontends[0].port_text + f" ({one.key.family.label})" * (one.key in served) for one in empty)
    yield from dict.fromkeys(texts)


def _empty(plans: Iterable[ServicePlan]) -> list[ServicePlan]:
    return [plan for plan in plans if not plan.usable and plan.frontends]


def cause(plans: Iterable[ServicePlan], slices: Collection[Slice]) -> str:
    """Return the reasons why the ports of `unserved` have no available endpoint, in a few words; '' if the slices do
    not contain them."""
    return "; ".join(filter(None, dict.fromkeys(_cause(plan, slices) for plan in _empty(plans))))


def _cause(plan: ServicePlan, slices: Collection[Slice]) -> str:
    states = endpoint_states(slices, plan.key)
    if NO_PORT in states:
        return f"no port named {plan.key.port_name}" if plan.key.port_name else "no port without a name"
    if READY in states:
        return "drained" if plan.balance is not None and plan.balance.drained else ""
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no endpoints"


def _lack_ports(slices: Collection[Slice], plans: Iterable[ServicePlan]) -> bool:
    """Return whether some ports have no endpoint, and no EndpointSlice has any of these ports."""
    empty = _empty(plans)
    return bool(empty) and all(NO_PORT in endpoint_states(slices, plan.key) for plan in empty)


def flags(plans: Sequence[ServicePlan], slices: Collection[Slice]) -> str:
    """Return letters for unusual settings of a Service. L: external policy Local. l: internal policy Local. A:
    affinity. H: hints exclude ready endpoints. E: failing endpoints are ejected. P: some ports have no
    endpoint, because no EndpointSlice has these ports."""
    hinted = [piece for piece in slices if piece.particular and any(e.zones or e.nodes for e in piece.particular)]
    found = {
        "L": any(plan.policies.external is Policy.LOCAL and plan.accessible for plan in plans),
        "l": any(plan.policies.internal is Policy.LOCAL for plan in plans),
        "A": any(plan.affinity for plan in plans),
        "H": any(plan.cluster and not {*_ready(plan, hinted)} <= {*plan.cluster} for plan in plans if hinted),
        "E": any(plan.ejected for plan in plans),
        "P": _lack_ports(slices, plans),
    }
    return "".join(letter for letter, is_so in found.items() if is_so)


def _ready(plan: ServicePlan, slices: Iterable[Slice]) -> Iterator[bytes]:
    key = plan.key
    for piece in slices:
        for port in piece.ports:
            if piece.family is key.family and (port.name, port.protocol) == (key.port_name, key.protocol):
                yield from (e.address + PORT_BYTES[port.port] for e in piece.particular or () if e.ready)


def changed_at(service: Service | None, slices: Iterable[Slice]) -> float:
    """Return the time of a Service's last change, in seconds since the epoch; 0 if unknown. The result is the latest of
    the Service's creation and the trigger times of its slices."""
    made = service.metadata.creation_timestamp if service is not None else None
    return max((_seconds(text) for text in (made, *(piece.triggered for piece in slices)) if text), default=0.0)


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0
