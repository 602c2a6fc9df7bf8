"""The desired state of ipvs mode: the objects that each Service needs, and the union of the objects. Pure.

A virtual server has one pool for all clients, because IPVS cannot distinguish sources. If externalTrafficPolicy is
Local and this node has endpoints, the local pool therefore also serves clients on this node (as in the Go kube-proxy).

Set entries have a reference count: an entry is removed when no Service needs the entry. A virtual server belongs to one
Service. A Service with the same address and port takes precedence over a NodePort, whichever is added first."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from kubeproxy.backends.ipvs.layout import IpsetId, Scheduler
from kubeproxy.backends.state import Difference, diff
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.kernel.ipvs import RealServer, ServerChange, Verb, VirtualServer
from kubeproxy.model.addresses import Range, unpack, within
from kubeproxy.model.plan import Action, Frontend, FrontendKind, Policy, Pool, ServiceName, ServicePlan, Traffic


class NodeAddresses(NamedTuple):
    """This node's addresses in three groups: addresses of interfaces except kube-ipvs0; addresses for NodePorts;
    addresses of the Node object."""

    own: frozenset[bytes] = frozenset()
    nodeports: tuple[bytes, ...] = ()
    primary: tuple[bytes, ...] = ()


class Virtual(NamedTuple):
    """A desired virtual server: whether it serves a NodePort, affinity timeout in seconds (0: none), real servers."""

    nodeport: bool
    affinity: int
    pool: Pool


class DesiredObjects(NamedTuple):
    """The desired objects of a Service. Virtual servers are keyed by address, protocol (1 byte) and port (2 bytes,
    network order); entries are keyed by ipset."""

    servers: dict[bytes, Virtual]
    entries: dict[IpsetId, set[SetEntry]]

    @property
    def addresses(self) -> set[bytes]:
        """Return the addresses for kube-ipvs0."""
        return {entry.ip for entry in self.entries.get(IpsetId.IPVS_IPS, ())}


NOTHING_DESIRED: Final = DesiredObjects({}, {})


def render(plans: Iterable[ServicePlan], node: NodeAddresses) -> DesiredObjects:
    """Return the desired objects of a Service's plans of one family on a node."""
    objects = DesiredObjects({}, {})
    for plan in plans:
        for frontend in plan.frontends:
            _frontend(plan, frontend, node, objects)
        if plan.health_port:
            _enter(objects, IpsetId.HEALTH_CHECK_NODE_PORT, SetEntry(port=plan.health_port))
        for destination in _hairpin(plan):
            address, port = destination[:-2], int.from_bytes(destination[-2:], "big")
            _enter(objects, IpsetId.LOOP_BACK, SetEntry(address, plan.key.protocol, port, address))
    return objects


def pool_of(plan: ServicePlan, traffic: Traffic) -> Pool:
    """Return the real servers of a frontend; if there are none, the kernel refuses the frontend's connections."""
    if traffic.outside.picks_local or traffic.node.picks_local:
        return plan.local
    return plan.cluster if any(action.forwards for action in traffic) else ()


def service_entry(key: bytes) -> SetEntry:
    """Return a virtual server's key as an entry of address, protocol and port."""
    return SetEntry(key[:-3], key[-3], int.from_bytes(key[-2:], "big"))


def _enter(objects: DesiredObjects, set_id: IpsetId, entry: SetEntry) -> None:
    objects.entries.setdefault(set_id, set()).add(entry)


def _frontend(plan: ServicePlan, frontend: Frontend, node: NodeAddresses, objects: DesiredObjects) -> None:
    traffic = plan.traffic(frontend)
    nodeport = frontend.kind is FrontendKind.NODEPORT
    virtual = Virtual(nodeport, plan.affinity, pool_of(plan, traffic))
    keys = [address + frontend.key for address in node.nodeports] if nodeport else [frontend.key]
    for key in keys:
        # If the Service has another frontend with this address and port, that frontend takes precedence over the
        # NodePort.
        objects.servers.setdefault(key, virtual)
        if traffic.outside is Action.DROP:
            dropping = IpsetId.DROP if traffic.node is Action.DROP else IpsetId.DROP_OUTSIDE
            _enter(objects, dropping, service_entry(key))
    if frontend.kind is FrontendKind.CLUSTER or not (nodeport or frontend.address in node.own):
        _enter(objects, IpsetId.IPVS_IPS, SetEntry(frontend.address))
    # With externalTrafficPolicy Local the client's address is kept: only connections of this node are masqueraded.
    keeps_source = plan.policies.external is Policy.LOCAL and plan.usable
    for set_id, entry in _memberships(frontend, keys, local=keeps_source):
        _enter(objects, set_id, entry)
    # If there are no endpoints, connections from all clients are refused, as in iptables mode.
    if any(action.forwards for action in traffic):
        for set_id, entry in _sources(frontend, plan.sources(frontend), node):
            _enter(objects, set_id, entry)


NODE_PORTS: Final[dict[int, tuple[IpsetId, IpsetId]]] = {
    socket.IPPROTO_TCP: (IpsetId.NODE_PORT_TCP, IpsetId.NODE_PORT_LOCAL_TCP),
    socket.IPPROTO_UDP: (IpsetId.NODE_PORT_UDP, IpsetId.NODE_PORT_LOCAL_UDP),
    socket.IPPROTO_SCTP: (IpsetId.NODE_PORT_SCTP, IpsetId.NODE_PORT_LOCAL_SCTP),
}


_SETS: Final = {
    FrontendKind.CLUSTER: ((IpsetId.CLUSTER_IP,), (IpsetId.CLUSTER_IP,)),
    FrontendKind.EXTERNAL: ((IpsetId.EXTERNAL_IP,), (IpsetId.EXTERNAL_IP_LOCAL,)),
    FrontendKind.LOADBALANCER: ((IpsetId.LOAD_BALANCER,), (IpsetId.LOAD_BALANCER, IpsetId.LOAD_BALANCER_LOCAL)),
}
"""The sets of a frontend's address and port, in two cases: the client's source address is masqueraded, or kept."""


def _memberships(frontend: Frontend, keys: Iterable[bytes], *, local: bool) -> Iterator[tuple[IpsetId, SetEntry]]:
    if frontend.kind is not FrontendKind.NODEPORT:
        return product(_SETS[frontend.kind][local], [service_entry(frontend.key)])
    sets = NODE_PORTS[frontend.protocol][: 1 + local]
    if frontend.protocol == socket.IPPROTO_SCTP:  # entries of the SCTP sets also contain an address
        return product(sets, map(service_entry, keys))
    return product(sets, [SetEntry(port=frontend.port)])


def _sources(
    frontend: Frontend, allowed: Sequence[Range] | None, node: NodeAddresses
) -> Iterator[tuple[IpsetId, SetEntry]]:
    """Yield the set entries that admit clients to a frontend; `allowed` are the source ranges, or None. The node's own
    connections have the frontend's address as their source, because that address is on kube-ipvs0. If the ranges
    include one of the node's addresses, an entry for the frontend's address admits these connections."""
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
    """Yield the networks of a range; all addresses are two networks, because hash:net allows no /0 (ipset(8))."""
    ends = (ipaddress.ip_address(unpack(first)), ipaddress.ip_address(unpack(last)))
    for network in ipaddress.summarize_address_range(*ends):
        yield from [network] if network.prefixlen else network.subnets()


def _hairpin(plan: ServicePlan) -> set[bytes]:
    """Return the endpoints on this node. Their connections to themselves through a Service need masquerade."""
    if not plan.hairpin:
        return set()
    own = set(plan.hairpin)
    return {destination for pool in (plan.cluster, plan.local) for destination in pool if destination[:-2] in own}


class Desired:
    """The union of the objects of all Services. `take` does not return the effect of the initial `services`."""

    def __init__(self, services: Iterable[tuple[ServiceName, DesiredObjects]] = ()) -> None:
        self.servers: dict[bytes, Virtual] = {}
        self.touched = 0
        """The number of virtual servers, real servers and entries that may have changed since the last `take`."""
        self._desired_objects: dict[ServiceName, DesiredObjects] = {}
        self._owner: dict[bytes, ServiceName] = {}
        # For each key that several Services claim: the virtual server that each of these Services needs.
        self._rivals: dict[bytes, dict[ServiceName, Virtual]] = {}
        self._entries: dict[IpsetId, Counter[SetEntry]] = {set_id: Counter() for set_id in IpsetId}
        self._servers_before: dict[bytes, Virtual | None] = {}
        self._entries_before: dict[IpsetId, dict[SetEntry, bool]] = {}
        for name, objects in services:
            self.change(name, objects)
        self._servers_before, self._entries_before, self.touched = {}, {}, 0

    def take(self) -> tuple[Mapping[bytes, Virtual | None], Difference[IpsetId, SetEntry, bool]]:
        """Return the effect of all changes since the last call: the changed virtual servers as they were before, and
        the difference of the sets."""
        noted, servers = self._entries_before, self._servers_before
        self._servers_before, self._entries_before, self.touched = {}, {}, 0
        before = {set_id: {entry: True for entry, there in its.items() if there} for set_id, its in noted.items()}
        after = {
            set_id: {entry: True for entry in its if entry in self._entries[set_id]} for set_id, its in noted.items()
        }
        return servers, diff(before, after)

    @property
    def addresses(self) -> Iterable[bytes]:
        """Return the desired addresses of kube-ipvs0."""
        return (entry.ip for entry in self._entries[IpsetId.IPVS_IPS])

    def entries(self, set_id: IpsetId) -> Mapping[SetEntry, bool]:
        """Return the entries of a set in the form of a `State`."""
        return dict.fromkeys(self._entries[set_id], True)

    def count(self, set_id: IpsetId) -> int:
        """Return the desired number of entries of a set."""
        return len(self._entries[set_id])

    def owner(self, key: bytes) -> ServiceName | None:
        """Return the Service of a virtual server; None if the virtual server belongs to no Service."""
        return self._owner.get(key)

    def change(self, name: ServiceName, objects: DesiredObjects) -> None:
        """Replace the desired objects of a Service; NOTHING_DESIRED stands for a deleted Service."""
        before = self._desired_objects.pop(name, NOTHING_DESIRED)
        if objects is not NOTHING_DESIRED:
            self._desired_objects[name] = objects
        for key in before.servers.keys() - objects.servers.keys():
            self._claim(name, key, None)
        for key, virtual in objects.servers.items():
            if before.servers.get(key) != virtual:
                self._claim(name, key, virtual)
        for set_id in before.entries.keys() | objects.entries.keys():
            self._count(set_id, before.entries.get(set_id, set()), objects.entries.get(set_id, set()))

    def _claim(self, name: ServiceName, key: bytes, virtual: Virtual | None) -> None:
        claims = self._rivals.get(key)
        if claims is None:
            owner = self._owner.get(key, name)
            claims = {owner: self.servers[key]} if key in self.servers else {}
        if virtual is None:
            claims.pop(name, None)
        else:
            claims[name] = virtual
        if len(claims) > 1:
            self._rivals[key] = claims
        else:
            self._rivals.pop(key, None)
        if key not in self._servers_before:
            self._servers_before[key] = before = self.servers.get(key)
            self.touched += 1 + len(before.pool if before else ())
        if claims:
            winner = min(claims, key=lambda claimant: (claims[claimant].nodeport, claimant))
            self._owner[key], self.servers[key] = winner, claims[winner]
        else:
            self._owner.pop(key, None)
            self.servers.pop(key, None)

    def _count(self, set_id: IpsetId, before: set[SetEntry], after: set[SetEntry]) -> None:
        if before == after:
            return
        counts, noted = self._entries[set_id], self._entries_before.setdefault(set_id, {})
        self.touched += len(after ^ before)
        for entry in after - before:
            noted.setdefault(entry, entry in counts)
            counts[entry] += 1
        for entry in before - after:
            noted.setdefault(entry, True)
            counts[entry] -= 1
            if not counts[entry]:
                del counts[entry]


CHECK: Final = 5.0
"""Seconds between two reads of the connection count of a draining TCP real server (Go kube-proxy: 60)."""

FIRST_CHECK: Final = 1.0  # seconds until the first read; most real servers have no connections left

ANSWER_TIME: Final = 0.2
"""Minimum seconds in which a removed UDP or SCTP endpoint may still answer, as in report/flows.py."""

WEIGHT: Final = 1  # the weight of every endpoint, as in the Go kube-proxy


class ActualServer(NamedTuple):
    """A found virtual server, and the weights of its real servers."""

    server: VirtualServer
    weights: Mapping[bytes, int]


class Draining:
    """The draining real servers, and the operations that lead from a found to a desired state.

    A real server that is no longer desired gets weight 0: its connections continue, and new connections use other real
    servers. A TCP real server is deleted when it has no connections left; the kernel forgets an idle connection after
    15 minutes (IP_VS_TCP_S_ESTABLISHED in net/netfilter/ipvs/ip_vs_proto_tcp.c). UDP and SCTP real servers are deleted
    after ANSWER_TIME, so that the kernel moves UDP flows to other real servers (expire_nodest_conn). With weight 0
    alone, the flow of a client that sends without pause would remain on a dead endpoint. With immediate deletion, as in
    the Go kube-proxy, answers to earlier requests would be lost: since Linux 5.9 the kernel removes the connections of
    a deleted real server, and their entries of connection tracking, within a tick (ip_vs_expire_nodest_conn_flush)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._servers: dict[bytes, dict[bytes, float]] = {}  # times of the next check, by virtual and real server

    def due(self, now: float) -> list[bytes]:
        """Return the virtual servers with draining real servers that must be checked now."""
        return [key for key, checks in self._servers.items() if min(checks.values()) <= now]

    def expected(self, key: bytes, virtual: Virtual | None) -> ActualServer | None:
        """Return the state in the kernel after a desired virtual server is written."""
        if virtual is None:
            return None
        weights = dict.fromkeys(virtual.pool, WEIGHT) | dict.fromkeys(self._servers.get(key, ()), 0)
        return ActualServer(self._scheduler.server(key, virtual.affinity), weights)

    def retain(self, found: Mapping[bytes, ActualServer]) -> None:
        """Remove from the record the draining real servers that the kernel no longer has."""
        for key, checks in list(self._servers.items()):
            there = found[key].weights if key in found else {}
            for destination in checks.keys() - there.keys():
                self._forget(key, destination)

    def change(
        self, key: bytes, found: ActualServer | None, wanted: Virtual | None, now: float
    ) -> Iterator[ServerChange]:
        """Yield the operations from the found to the wanted virtual server, additions of real servers first."""
        if wanted is None:
            self._servers.pop(key, None)
            if found is not None:
                yield ServerChange(Verb.DELETE_SERVICE, found.server)
            return
        server = self._scheduler.server(key, wanted.affinity)
        weights: Mapping[bytes, int] = {}
        if found is None:
            yield ServerChange(Verb.ADD_SERVICE, server)
        else:
            weights = found.weights
            if found.server != server:
                yield ServerChange(Verb.SET_SERVICE, server)
        for destination in wanted.pool:
            self._forget(key, destination)
            weight = weights.get(destination)
            if weight != WEIGHT:
                verb = Verb.ADD_SERVER if weight is None else Verb.SET_SERVER
                yield ServerChange(verb, server, RealServer(destination, WEIGHT))
        for destination in sorted(weights.keys() - frozenset(wanted.pool)):
            if not self._scheduler.skips_draining:
                yield ServerChange(Verb.DELETE_SERVER, server, RealServer(destination))
                continue
            check = now + (FIRST_CHECK if key[-3] == socket.IPPROTO_TCP else ANSWER_TIME)
            self._servers.setdefault(key, {}).setdefault(destination, check)
            if weights[destination]:  # a real server with weight 0 drains already
                yield ServerChange(Verb.SET_SERVER, server, RealServer(destination, 0))

    def finished(self, connections: Mapping[bytes, Mapping[bytes, int]], now: float) -> Iterator[ServerChange]:
        """Yield the deletion of due real servers, except TCP real servers with connections. `connections` are counts by
        due virtual server and real server; a real server without a count is already deleted."""
        for key, counts in connections.items():
            for destination in [one for one, at in self._servers[key].items() if at <= now]:
                if counts.get(destination) and key[-3] == socket.IPPROTO_TCP:
                    self._servers[key][destination] = now + CHECK
                    continue
                self._forget(key, destination)
                if destination in counts:
                    yield ServerChange(Verb.DELETE_SERVER, VirtualServer(key), RealServer(destination))

    def _forget(self, key: bytes, destination: bytes) -> None:
        draining = self._servers.get(key, {})
        draining.pop(destination, None)
        if not draining:
            self._servers.pop(key, None)
