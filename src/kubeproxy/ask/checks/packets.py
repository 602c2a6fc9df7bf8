"""Computes the packets of one connection at this node's hooks, before and after translation, for checks of other
programs' rules. Translation at a hook has the priority NF_IP_PRI_NAT_DST or NF_IP_PRI_NAT_SRC. Chains with the same
priority may run before or after the translation. At the hook output, the interface follows from the route to the
original destination, even after translation. Source: include/uapi/linux/netfilter_ipv4.h, and
net/netfilter/ipvs/ip_vs_core.c, of Linux 6.18."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.ask.finding import End
from kubeproxy.kernel.route import source_for, way_out
from kubeproxy.kernel.routing_policy import RoutedPacket
from kubeproxy.meaning.firewall import PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.answer import Packet

_FIRST, _LAST = -math.inf, math.inf
FILTER: Final = 0  # NF_IP_PRI_FILTER, the priority of the proxy's chains that reject
_DESTINATION: Final = -100  # NF_IP_PRI_NAT_DST
_SOURCE: Final = 100  # NF_IP_PRI_NAT_SRC
_SERVERS: Final = 98  # the priorities of IPVS at the hooks input and forward
_NONE: Final = ""
_LOOPBACK: Final = "lo"


class CheckedConnection(Struct, frozen=True, dict=True):
    """A connection. Each route is looked up in the kernel once per connection. Properties raise NetlinkError."""

    packet: Packet  # the first packet; its source is None if this node sends it and the kernel picks the address
    local: Collection[bytes]  # this node's addresses
    taken_in: bool = False  # a packet passes the hook input before it is sent to an endpoint (ipvs)
    arrival: str = ""  # the interface of incoming packets; '' for the interface of the route to the client
    mark: int = 0  # the mark of packets that are masqueraded; 0 if the proxy's rules mark no packet of the connection
    direct: bool = False  # the destination is the endpoint's own address, and no rule translates the packets
    bridge: str = ""  # the bridge that delivers packets from pod to pod without routing

    @property
    def is_local(self) -> bool:
        """Whether the connection begins on this node."""
        return self.packet.source is None or self.packet.source in self.local

    @cached_property
    def client(self) -> bytes | None:
        """The client's address; if this node is the client, the kernel picks the address. None without a route."""
        return self.packet.source if self.packet.source is not None else source_for(self.packet.destination)

    @property
    def interface(self) -> str | None:
        """The incoming interface, derived from the routes if it is not given, or None if unknown."""
        return self.arrival if self.arrival and not self.is_local else self.way_back

    @cached_property
    def way_back(self) -> str | None:
        """The outgoing interface of answers to a client elsewhere; '' if the client is on this node; None if
        unknown."""
        if self.is_local or self.packet.source is None:
            return _NONE
        return self.bridge or interface_to(self.packet.source)

    @cached_property
    def first_way(self) -> tuple[str, str | None]:
        """The incoming and outgoing interface at the hook output, for a connection that begins on this node."""
        return _NONE, _LOOPBACK if self.packet.destination in self.local else interface_to(self.packet.destination)


def interface_to(address: bytes) -> str | None:
    """Return the outgoing interface of packets to an address, or None without a route. Raises NetlinkError."""
    return way_out(bytes(len(address)), address) or None


def early(connection: CheckedConnection) -> Iterator[PassingPacket]:
    """Yield the first packet before translation. Raises NetlinkError."""
    packet, entrance = connection.packet, connection.interface
    hook, ways = ("output", connection.first_way) if connection.is_local else ("prerouting", (entrance, _NONE))
    made = _untranslated(packet, ways)
    if connection.taken_in:
        yield made.request(hook, _FIRST, _LAST)
        yield made.request("input", _FIRST, _SERVERS)
    else:
        yield made.request(hook, _FIRST, _DESTINATION)._replace(tracked=not connection.direct)


def translated(connection: CheckedConnection, end: End, *, masqueraded: bool) -> Iterator[PassingPacket]:
    """Yield the packets of a connection to one endpoint, and the endpoint's answers. Raises NetlinkError."""
    packet, entrance, destination = connection.packet, connection.interface, end[0]
    exit_ = _LOOPBACK if destination in connection.local else connection.bridge or interface_to(destination)
    here = connection.is_local
    forwarded = not here and exit_ != _LOOPBACK
    # The mark of a pod's connection to itself is unknown: depending on the mode, it is set before or after forwarding.
    bit = connection.mark if destination != packet.source else 0
    by_rules = not (connection.taken_in or connection.direct)
    made = _Made(packet, (entrance, exit_), end, by_rules, (bit, bit * masqueraded))
    if connection.taken_in:
        yield made.request("output", _FIRST, _LAST, (_NONE, exit_))
    elif here:
        yield made.request("output", _DESTINATION, _LAST, connection.first_way)
    else:
        yield made.request("prerouting", _DESTINATION, _LAST, (entrance, _NONE))
    if forwarded and not connection.taken_in:
        yield made.request("forward", _FIRST, _LAST)
    if exit_ == _LOOPBACK:
        arriving = made.request("input", _FIRST, _SOURCE, (_LOOPBACK if here else entrance, _NONE))
        yield arriving._replace(marks=(0, 0)) if here else arriving  # masquerading has cleared the mark
        if here:
            return
    else:
        yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    if connection.client is not None:
        yield from _answers(made, connection, connection.client, masqueraded=masqueraded)


def routed(connection: CheckedConnection, ends: Sequence[tuple[bytes, int, bool]]) -> Iterator[RoutedPacket]:
    """Yield the packets of a connection at the kernel's routing decisions. Raises NetlinkError. `ends` has each
    endpoint's address and port, and whether its connection is masqueraded."""
    packet, arrival, here, client = connection.packet, connection.interface, connection.is_local, connection.client
    if here:
        yield RoutedPacket(packet.source, packet.destination)
    for address, port, masqueraded in ends if client is not None else ():
        near = address in connection.local
        if connection.taken_in:
            yield RoutedPacket(None, address, _NONE, 0, packet.protocol, port)
        elif arrival is not None:
            yield RoutedPacket(client, address, arrival, connection.mark * masqueraded, packet.protocol, port)
        exit_ = _NONE if near else interface_to(address)
        if client is not None and exit_ is not None and not (here and near):
            yield RoutedPacket(address, client, exit_)
    if not ends and arrival and packet.destination in connection.local:
        yield RoutedPacket(client, packet.destination, arrival)


def masqueraded_answers(
    passing: Iterable[PassingPacket], masqueraded: Collection[End], local: Collection[bytes]
) -> Iterator[PassingPacket]:
    """Yield the possible answers of these endpoints before they are translated back; masquerading may pick any address
    of this node."""
    for one in passing:
        if one.purpose is CompiledFor.ANSWER and one.before == _DESTINATION and (one.source, one.port) in masqueraded:
            yield from (one._replace(destination=address) for address in local)


def own_packets(packet: Packet, local: Collection[bytes]) -> Iterator[PassingPacket]:
    """Yield the packets of this node's own connection to an address without translation. Raises NetlinkError."""
    if packet.destination in local:
        return
    exit_, client = interface_to(packet.destination), source_for(packet.destination)
    made = _untranslated(packet, (_NONE, exit_))
    yield made.request("output", _FIRST, _LAST, (_NONE, exit_))
    yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    if client is not None:
        yield made.answer("prerouting", _FIRST, _LAST, client, (exit_, _NONE))
        yield made.answer("input", _FIRST, _SOURCE, client, (exit_, _NONE))


def to_node(connection: CheckedConnection) -> Iterator[PassingPacket]:
    """Yield the packets of an untranslated connection to this node's own address. Raises NetlinkError."""
    packet, here = connection.packet, connection.is_local
    entrance, back = (_LOOPBACK, _LOOPBACK) if here else (connection.interface, connection.way_back)
    made = _untranslated(packet, (entrance, _NONE))
    if here:
        yield made.request("output", _FIRST, _LAST, (_NONE, _LOOPBACK))
        yield made.request("postrouting", _FIRST, _SOURCE, (None, _LOOPBACK))
    yield made.request("prerouting", _FIRST, _LAST)
    yield made.request("input", _FIRST, _SOURCE)
    if (client := connection.client) is not None:
        yield made.answer("output", _FIRST, _LAST, client, (_NONE, back))
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, back))
        if here:
            yield made.answer("prerouting", _FIRST, _LAST, client, (_LOOPBACK, _NONE))
            yield made.answer("input", _FIRST, _SOURCE, client, (_LOOPBACK, _NONE))


def rejected(connection: CheckedConnection) -> Iterator[PassingPacket]:
    """Yield the first packet of a rejected connection at the hook prerouting, and at the hook of the proxy's rejecting
    chain (input or forward) up to this chain. The kernel may run two chains with the same priority in any order. Raises
    NetlinkError."""
    packet, here = connection.packet, connection.packet.destination in connection.local
    exit_ = _NONE if here else interface_to(packet.destination)
    made = _untranslated(packet, (connection.interface, exit_))
    yield made.request("prerouting", _FIRST, _LAST, (connection.interface, _NONE))
    yield made.request("input" if here else "forward", _FIRST, FILTER + 1)


def _answers(
    made: _Made, connection: CheckedConnection, client: bytes, *, masqueraded: bool
) -> Iterator[PassingPacket]:
    exit_, back = made.interfaces[1], connection.way_back
    out = None if masqueraded else back
    hook, ways = ("output", (_NONE, out)) if exit_ == _LOOPBACK else ("prerouting", (exit_, _NONE))
    seen = source_for(made.end[0]) if masqueraded else client
    if seen is not None:
        yield made.answer(hook, _FIRST, _DESTINATION, seen, ways)._replace(tracked=made.by_rules)
    yield made.answer(hook, _DESTINATION, _LAST, client, ways)
    if connection.is_local:
        yield made.answer("input", _FIRST, _SOURCE, client, ways)
        return
    before = _SERVERS if connection.taken_in else _LAST
    if exit_ != _LOOPBACK:
        yield made.answer("forward", _FIRST, before, client, (exit_, back))
    if not connection.taken_in:
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, back))


class _Made(NamedTuple):
    """A connection's packets to and from `end`. `interfaces` are the incoming and the outgoing interface of the whole
    path. `by_rules` means that rules translate the packets."""

    packet: Packet
    interfaces: _Ways
    end: End
    by_rules: bool = False
    marks: tuple[int, int] = (0, 0)

    def request(self, hook: str, after: float, before: float, interfaces: _Ways | None = None) -> PassingPacket:
        """Return the first packet at a hook. The default of `interfaces` is the incoming and the outgoing interface of
        the whole path."""
        source, destination, protocol, port, *_ = self.packet
        ends = source, self.end[0], protocol, self.end[1], (destination, port)
        return PassingPacket(hook, after, before, *ends, interfaces or self.interfaces, self.by_rules, marks=self.marks)

    def answer(self, hook: str, after: float, before: float, client: bytes, interfaces: _Ways) -> PassingPacket:
        made = self.request(hook, after, before, interfaces)
        return made._replace(source=self.end[0], destination=client, purpose=CompiledFor.ANSWER)


_Ways = tuple[str | None, str | None]
"""The incoming and the outgoing interface: None if unknown, '' if there is none."""


def _untranslated(packet: Packet, interfaces: _Ways) -> _Made:
    return _Made(packet, interfaces, (packet.destination, packet.port))
