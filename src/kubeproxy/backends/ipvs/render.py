"""Plans to wishes: the virtual servers, addresses and set entries that a Service wants. Pure.

A virtual server has one pool, whoever asks. Where externalTrafficPolicy is Local and this node has endpoints, pods and
the node get those as well, not the cluster's: ipvs cannot tell by source (kube-proxy does the same).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.addresses import Range, unpack, within
from kubeproxy.model.plan import Action, Frontend, FrontendKind, Policy, Pool, ServicePlan, Traffic


class NodeAddresses(NamedTuple):
    """This node's own addresses, without those on kube-ipvs0; which NodePorts answer on; which it is known by."""

    own: frozenset[bytes] = frozenset()
    nodeports: tuple[bytes, ...] = ()
    primary: tuple[bytes, ...] = ()


class Virtual(NamedTuple):
    """A virtual server: whether it is a NodePort's, the affinity in seconds (0 for none), its real servers."""

    nodeport: bool
    affinity: int
    pool: Pool


class ServiceWish(NamedTuple):
    """What a Service wants. Servers are keyed by address, protocol (1 byte) and port (2 bytes, network order)."""

    servers: dict[bytes, Virtual]
    entries: dict[IpsetId, set[SetEntry]]

    @property
    def addresses(self) -> set[bytes]:
        """Return the addresses for kube-ipvs0."""
        return {entry.ip for entry in self.entries.get(IpsetId.IPVS_IPS, ())}


NO_WISH: Final = ServiceWish({}, {})


def render(plans: Iterable[ServicePlan], node: NodeAddresses) -> ServiceWish:
    """Return what a Service's plans of one family want on a node."""
    wish = ServiceWish({}, {})
    for plan in plans:
        for frontend in plan.frontends:
            _frontend(plan, frontend, node, wish)
        if plan.health_port:
            _enter(wish, IpsetId.HEALTH_CHECK_NODE_PORT, SetEntry(port=plan.health_port))
        for destination in _hairpin(plan):
            address, port = destination[:-2], int.from_bytes(destination[-2:], "big")
            _enter(wish, IpsetId.LOOP_BACK, SetEntry(address, plan.key.protocol, port, address))
    return wish


def pool_of(plan: ServicePlan, traffic: Traffic) -> Pool:
    """Return the real servers of a frontend: none refuses, as the kernel answers for a virtual server without any."""
    if traffic.outside.picks_local or traffic.node.picks_local:
        return plan.local
    return plan.cluster if any(action.forwards for action in traffic) else ()


def server_key(address: bytes, protocol: int, port: int) -> bytes:
    """Return the key of a virtual server."""
    return address + bytes((protocol,)) + port.to_bytes(2, "big")


def service_entry(key: bytes) -> SetEntry:
    """Return a virtual server's key as an entry of address, protocol and port."""
    return SetEntry(key[:-3], key[-3], int.from_bytes(key[-2:], "big"))


def _enter(wish: ServiceWish, set_id: IpsetId, entry: SetEntry) -> None:
    wish.entries.setdefault(set_id, set()).add(entry)


def _frontend(plan: ServicePlan, frontend: Frontend, node: NodeAddresses, wish: ServiceWish) -> None:
    traffic = plan.traffic(frontend)
    nodeport = frontend.kind is FrontendKind.NODEPORT
    virtual = Virtual(nodeport, plan.affinity, pool_of(plan, traffic))
    keys = [address + frontend.key for address in node.nodeports] if nodeport else [frontend.key]
    for key in keys:
        # A NodePort on an address that the Service names itself, with that port: the address came first.
        wish.servers.setdefault(key, virtual)
        dropping = _dropping(traffic)
        if dropping is not None:
            _enter(wish, dropping, service_entry(key))
    if frontend.kind is FrontendKind.CLUSTER or not (nodeport or frontend.address in node.own):
        _enter(wish, IpsetId.IPVS_IPS, SetEntry(frontend.address))
    for set_id, entry in _memberships(frontend, keys, local=_keeps_source(plan)):
        _enter(wish, set_id, entry)
    # Without endpoints all are refused alike, as in iptables mode.
    if any(action.forwards for action in traffic):
        for set_id, entry in _sources(frontend, plan.sources(frontend), node):
            _enter(wish, set_id, entry)


def _dropping(traffic: Traffic) -> IpsetId | None:
    if traffic.outside is not Action.DROP:
        return None
    return IpsetId.DROP if traffic.node is Action.DROP else IpsetId.DROP_OUTSIDE


def _keeps_source(plan: ServicePlan) -> bool:
    """Return whether external frontends keep the client's source: only this node's own connections are masqueraded."""
    return plan.policies.external is Policy.LOCAL and plan.usable


_NODE_PORTS: Final[dict[int, tuple[IpsetId, IpsetId]]] = {
    socket.IPPROTO_TCP: (IpsetId.NODE_PORT_TCP, IpsetId.NODE_PORT_LOCAL_TCP),
    socket.IPPROTO_UDP: (IpsetId.NODE_PORT_UDP, IpsetId.NODE_PORT_LOCAL_UDP),
    socket.IPPROTO_SCTP: (IpsetId.NODE_PORT_SCTP, IpsetId.NODE_PORT_LOCAL_SCTP),
}


def _memberships(frontend: Frontend, keys: Iterable[bytes], *, local: bool) -> Iterator[tuple[IpsetId, SetEntry]]:
    """Yield the sets that a frontend is in, and its entries there."""
    if frontend.kind is FrontendKind.NODEPORT:
        everybody, kept = _NODE_PORTS[frontend.protocol]
        entries = [SetEntry(port=frontend.port)]
        if frontend.protocol == socket.IPPROTO_SCTP:  # these sets are of addresses and ports
            entries = [service_entry(key) for key in keys]
        for entry in entries:
            yield everybody, entry
            if local:
                yield kept, entry
        return
    entry = service_entry(frontend.key)
    if frontend.kind is FrontendKind.CLUSTER:
        yield IpsetId.CLUSTER_IP, entry
    elif frontend.kind is FrontendKind.EXTERNAL:
        yield IpsetId.EXTERNAL_IP_LOCAL if local else IpsetId.EXTERNAL_IP, entry
    else:
        yield IpsetId.LOAD_BALANCER, entry
        if local:
            yield IpsetId.LOAD_BALANCER_LOCAL, entry


def _sources(
    frontend: Frontend, allowed: Sequence[Range] | None, node: NodeAddresses
) -> Iterator[tuple[IpsetId, SetEntry]]:
    """Yield who may use a frontend, `allowed` being its source ranges, or None.

    The node's own connections come from the frontend's address itself, for that is on kube-ipvs0. They may when one of
    the node's addresses may: then the address is among those that are named one by one, whatever range holds it.
    """
    if allowed is None:
        return
    entry = service_entry(frontend.key)
    yield IpsetId.LOAD_BALANCER_FW, entry
    if any(within(address, allowed) for address in node.primary):
        yield IpsetId.LOAD_BALANCER_SOURCE_IP, entry._replace(ip2=frontend.address)
    for first, last in allowed:
        if first == last:
            yield IpsetId.LOAD_BALANCER_SOURCE_IP, entry._replace(ip2=first)
            continue
        for network in _networks(first, last):
            yield (
                IpsetId.LOAD_BALANCER_SOURCE_CIDR,
                entry._replace(ip2=network.network_address.packed, prefixlen=network.prefixlen),
            )


def _networks(first: bytes, last: bytes) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Yield the networks of a range; all addresses are two halves, for hash:net has no prefix of 0 (ipset(8))."""
    ends = (ipaddress.ip_address(unpack(first)), ipaddress.ip_address(unpack(last)))
    for network in ipaddress.summarize_address_range(*ends):
        yield from [network] if network.prefixlen else network.subnets()


def _hairpin(plan: ServicePlan) -> set[bytes]:
    """Return the destinations on this node, whose connections to themselves need masquerade."""
    if not plan.hairpin:
        return set()
    own = set(plan.hairpin)
    return {destination for pool in (plan.cluster, plan.local) for destination in pool if destination[:-2] in own}
