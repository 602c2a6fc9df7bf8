"""The packets of one connection at the hooks of this node: requests before and after translation, and answers.

Translation at a hook has the priority NF_IP_PRI_NAT_DST or NF_IP_PRI_NAT_SRC. Chains with the same priority may run
before or after it, so they are left out. At the hook output, the interface by which a packet leaves may change with the
translation, so it counts as unknown. Source: include/uapi/linux/netfilter_ipv4.h, and net/netfilter/ipvs/ip_vs_core.c,
of Linux 6.18.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from kubeproxy.kernel.route.addresses import source_for, way_out
from kubeproxy.meaning.firewall import PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.answer import Packet

_FIRST, _LAST = -math.inf, math.inf
_DESTINATION: Final = -100  # NF_IP_PRI_NAT_DST
_SOURCE: Final = 100  # NF_IP_PRI_NAT_SRC
_SERVERS: Final = 98  # of IPVS at the hooks input and forward
_NONE: Final = ""
_LOOPBACK: Final = "lo"


class CheckedConnection(NamedTuple):
    """A connection: its first packet on arrival, with the source None if the node picks it, and this node's addresses.

    `taken_in`: the packet is delivered locally, through the hook input, before it is sent to an endpoint (ipvs).
    """

    packet: Packet
    local: Collection[bytes]
    taken_in: bool = False

    @property
    def is_local(self) -> bool:
        """Whether the connection begins on this node."""
        return self.packet.source is None or self.packet.source in self.local

    @property
    def interface(self) -> str | None:
        """The interface of arrival, derived from the routes; None if unknown."""
        if self.is_local or self.packet.source is None:
            return _NONE
        return interface_to(self.packet.source)


def interface_to(address: bytes) -> str | None:
    """Return the interface by which packets to an address leave, None without a route. Raises NetlinkError."""
    return way_out(bytes(len(address)), address) or None


def early(connection: CheckedConnection) -> Iterator[PassingPacket]:
    """Yield the first packet before it is translated. Raises NetlinkError."""
    packet, entrance = connection.packet, connection.interface
    hook, ways = ("output", (_NONE, None)) if connection.is_local else ("prerouting", (entrance, _NONE))
    made = _Made(packet, ways)
    if connection.taken_in:
        yield made.request(hook, _FIRST, _LAST)
        yield made.request("input", _FIRST, _SERVERS)
    else:
        yield made.request(hook, _FIRST, _DESTINATION)


def translated(connection: CheckedConnection, end: tuple[bytes, int], *, masqueraded: bool) -> Iterator[PassingPacket]:
    """Yield the packets of a connection to one endpoint, and its answers. Raises NetlinkError."""
    packet, entrance, destination = connection.packet, connection.interface, end[0]
    exit_ = _LOOPBACK if destination in connection.local else interface_to(destination)
    here = connection.is_local
    forwarded = not here and exit_ != _LOOPBACK
    made = _Made(packet, (entrance, exit_), end, not connection.taken_in)
    if connection.taken_in:
        yield made.request("output", _FIRST, _LAST, (_NONE, None))
    elif here:
        yield made.request("output", _DESTINATION, _LAST, (_NONE, None))
    else:
        yield made.request("prerouting", _DESTINATION, _LAST, (entrance, _NONE))
    if forwarded and not connection.taken_in:
        yield made.request("forward", _FIRST, _LAST)
    if exit_ == _LOOPBACK:
        yield made.request("input", _FIRST, _SOURCE, (_LOOPBACK if here else entrance, _NONE))
        if here:
            return
    else:
        yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    client = packet.source if packet.source is not None else source_for(packet.destination)
    if client is not None:
        yield from _answers(made, connection, client, masqueraded=masqueraded)


def covered(connection: CheckedConnection, ends: Sequence[tuple[bytes, int, bool]]) -> Collection[str]:
    """Return the hooks at which `early` and `translated` yield every packet of a connection to all its endpoints.

    `ends`: each endpoint's address, port, and whether the connection to it is masqueraded. An answer to a masqueraded
    connection has the node's address until it is translated back.
    """
    here = connection.is_local
    if connection.taken_in or (here and any(address in connection.local for address, _, _ in ends)):
        return ()
    if any(masqueraded for _, _, masqueraded in ends):
        return ("forward", "postrouting", "input", "output") if here else ("forward", "postrouting", "input")
    return ("prerouting", "forward", "postrouting", "input", "output")


def own(packet: Packet, local: Collection[bytes]) -> Iterator[PassingPacket]:
    """Yield the packets of this node's own connection to an address without translation. Raises NetlinkError."""
    if packet.destination in local:
        return
    exit_, client = interface_to(packet.destination), source_for(packet.destination)
    made = _Made(packet, (_NONE, exit_), (packet.destination, packet.port), False)
    yield made.request("output", _FIRST, _LAST, (_NONE, None))
    yield made.request("postrouting", _FIRST, _SOURCE, (None, exit_))
    if client is not None:
        yield made.answer("prerouting", _FIRST, _LAST, client, (exit_, _NONE))
        yield made.answer("input", _FIRST, _SOURCE, client, (exit_, _NONE))


def to_node(connection: CheckedConnection, before: float = _LAST) -> Iterator[PassingPacket]:
    """Yield the packets of a connection to this node's own address that no rule translates. Raises NetlinkError.

    Without the answers, and only to chains of the hook input with a lower priority, if `before` is given.
    """
    packet, here = connection.packet, connection.is_local
    entrance = _LOOPBACK if here else connection.interface
    made = _Made(packet, (entrance, _NONE), (packet.destination, packet.port), False)
    if here:
        yield made.request("output", _FIRST, _LAST, (_NONE, None))
        yield made.request("postrouting", _FIRST, _SOURCE, (None, _LOOPBACK))
    yield made.request("prerouting", _FIRST, _LAST)
    yield made.request("input", _FIRST, min(before, _SOURCE))
    client = packet.source if packet.source is not None else source_for(packet.destination)
    if before == _LAST and client is not None:
        yield made.answer("output", _FIRST, _LAST, client, (_NONE, None))
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, entrance))
        if here:
            yield made.answer("prerouting", _FIRST, _LAST, client, (_LOOPBACK, _NONE))
            yield made.answer("input", _FIRST, _SOURCE, client, (_LOOPBACK, _NONE))


def _answers(
    made: _Made, connection: CheckedConnection, client: bytes, *, masqueraded: bool
) -> Iterator[PassingPacket]:
    entrance, exit_ = made.interfaces
    hook, ways = ("output", (_NONE, None)) if exit_ == _LOOPBACK else ("prerouting", (exit_, _NONE))
    if not masqueraded:
        yield made.answer(hook, _FIRST, _DESTINATION, client, ways)
    yield made.answer(hook, _DESTINATION, _LAST, client, ways)
    if connection.is_local:
        yield made.answer("input", _FIRST, _SOURCE, client, ways)
        return
    before = _SERVERS if connection.taken_in else _LAST
    if exit_ != _LOOPBACK:
        yield made.answer("forward", _FIRST, before, client, (exit_, entrance))
    if not connection.taken_in:
        yield made.answer("postrouting", _FIRST, _SOURCE, client, (None, entrance))


class _Made(NamedTuple):
    """The common fields of a connection's packets; `end` is the endpoint, None before one is chosen."""

    packet: Packet
    interfaces: tuple[str | None, str | None]
    end: tuple[bytes, int] | None = None
    by_rules: bool = True

    def request(
        self, hook: str, after: float, before: float, interfaces: tuple[str | None, str | None] | None = None
    ) -> PassingPacket:
        """Return the first packet at a hook; `interfaces` default to those of the whole way."""
        end = self.end or (self.packet.destination, self.packet.port)
        changed = self.by_rules and self.end is not None
        return self._passing((hook, after, before), self.packet.source, end, interfaces or self.interfaces, changed)

    def answer(
        self, hook: str, after: float, before: float, client: bytes, interfaces: tuple[str | None, str | None]
    ) -> PassingPacket:
        """Return a packet of the endpoint to the client at a hook."""
        source, port = self.end or (self.packet.destination, self.packet.port)
        made = self._passing((hook, after, before), source, (client, port), interfaces, self.by_rules)
        return made._replace(purpose=CompiledFor.ANSWER)

    def _passing(
        self,
        where: tuple[str, float, float],
        source: bytes | None,
        end: tuple[bytes, int],
        interfaces: tuple[str | None, str | None],
        changed: bool,
    ) -> PassingPacket:
        original = self.packet.destination, self.packet.port
        protocol = self.packet.protocol
        return PassingPacket(*where, source, end[0], protocol, end[1], original, interfaces, changed)
