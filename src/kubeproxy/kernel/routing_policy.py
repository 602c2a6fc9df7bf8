"""Finds the reason why the kernel does not route a packet: a policy routing rule (`ip rule`) or a refusing route.
`refusal` asks the kernel whether it routes the packet; `RoutingTables.refusing` names the rule or route. Sources:
rtnetlink(7), include/uapi/linux/fib_rules.h, fib_validate_source in net/ipv4/fib_frontend.c of Linux 6.18."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.route import FROM, GET_ROUTE, NO_ROUTE, ROUTE_HEAD, TO, ask_route, dumped
from kubeproxy.model.addresses import PROTOCOLS, Family, unpack

_GET_RULES: Final = 34  # RTM_GETRULE
_IN, _MARK, _PROTOCOL, _PORT = 3, 16, 27, 29  # RTA_IIF, RTA_MARK, RTA_IP_PROTO, RTA_DPORT
_TABLE: Final = 15  # RTA_TABLE, FRA_TABLE
_PRIORITY, _RULE_MARK, _RULE_MASK = 6, 10, 16  # FRA_PRIORITY, FRA_FWMARK, FRA_FWMASK
_WORDS: Final = {6: "blackhole", 7: "unreachable", 8: "prohibit"}  # RTN_... and FR_ACT_...
_TO_TABLE: Final = 1  # FR_ACT_TO_TBL
_ALL_BITS: Final = 0xFFFFFFFF


class RoutedPacket(NamedTuple):
    """A packet to route: packed addresses (source None: the kernel selects it); the incoming interface, or '' for a
    packet from this node; mark, protocol and destination port."""

    source: bytes | None
    destination: bytes
    arrival: str = ""
    mark: int = 0
    protocol: int = 0
    port: int = 0


def refusal(packet: RoutedPacket) -> int:
    """Return the errno with which the kernel refuses to route a packet; 0 if it does not refuse. Raises NetlinkError.
    EXDEV and EINVAL mean that the source is refused (reverse path filter); EINVAL may also mean a blackhole route."""
    more = b""
    if packet.arrival:
        more = nl.attribute(_IN, struct.pack("=I", socket.if_nametoindex(packet.arrival)))
    if packet.mark:
        more += nl.attribute(_MARK, struct.pack("=I", packet.mark))
    if packet.protocol in {PROTOCOLS["TCP"], PROTOCOLS["UDP"]}:  # RTA_IP_PROTO accepts few protocols
        more += nl.number_attribute(_PROTOCOL, packet.protocol, 1) + nl.number_attribute(_PORT, packet.port, 2)
    try:
        ask_route(packet.destination, packet.source, more)
    except nl.NetlinkError as error:
        if error.code in NO_ROUTE | {errno.EXDEV}:
            return error.code
        raise
    return 0


@nl.understood("the rules of policy routing")
def marks() -> set[int]:
    """Return the packet marks, except 0, that occur in policy routing rules. Raises ApplyError."""
    tested = (values.get(_RULE_MARK, b"") for family in Family for _, values in _entries(_rules(family)))
    return {nl.host_number(value) for value in tested} - {0}


class RoutingTables(NamedTuple):
    """The policy routing rules and the routes of a family, as messages of the kernel."""

    rules: list[bytes]
    routes: list[bytes]

    @nl.understood("the rules of policy routing")
    def refusing(self, packet: RoutedPacket) -> str:
        """Return the rule or route that refuses a packet, such as 'ip rule 100 (prohibit)' or 'prohibit default in
        table 7 (ip rule 100)'; '' if neither a rule nor a route refuses it. Raises ApplyError."""
        for (_, to_bits, from_bits, _, table, _, _, action, _), values in _entries(self.rules):
            if not _matches(packet, values, to_bits, from_bits):
                continue
            name = f"ip rule {nl.host_number(values.get(_PRIORITY, b''))}"
            if action in _WORDS:
                return f"{name} ({_WORDS[action]})"
            number = nl.host_number(values.get(_TABLE, bytes([table])))
            route = _longest(packet.destination, self.routes, number) if action == _TO_TABLE else ""
            if route:
                return f"{route} ({name})"
        return ""


def routing_tables(family: Family) -> RoutingTables:
    """Return all rules and routes of a family; there may be many. Raises NetlinkError."""
    return RoutingTables(_rules(family), dumped(GET_ROUTE, ROUTE_HEAD.pack(family, *bytes(7), 0), "the routes"))


def _rules(family: Family) -> list[bytes]:
    return dumped(_GET_RULES, ROUTE_HEAD.pack(family, *bytes(7), 0), "the rules of policy routing")


def _entries(buffers: list[bytes]) -> Iterator[tuple[tuple[int, ...], dict[int, bytes]]]:
    """Yield the header's fields, and the attributes, of each rule or route."""
    for data, start, end in nl.answers(buffers, ROUTE_HEAD.size):
        yield ROUTE_HEAD.unpack_from(data, start - ROUTE_HEAD.size), nl.parts(data, start, end)


def _matches(packet: RoutedPacket, values: dict[int, bytes], to_bits: int, from_bits: int) -> bool:
    mask = nl.host_number(values[_RULE_MASK]) if _RULE_MASK in values else _ALL_BITS
    return (
        _covers(values.get(TO), to_bits, packet.destination)
        and _covers(values.get(FROM), from_bits, packet.source)
        and nl.text_of(values.get(_IN, b"")) in {"", packet.arrival or "lo"}
        and (_RULE_MARK not in values or nl.host_number(values[_RULE_MARK]) == packet.mark & mask)
    )


def _longest(destination: bytes, routes: list[bytes], table: int) -> str:
    """Return a table's most specific route to a destination if this route refuses packets, else ''."""
    longest, found = -1, ""
    for (_, bits, _, _, own, _, _, kind, _), values in _entries(routes):
        number = nl.host_number(values.get(_TABLE, bytes([own])))
        if number == table and bits > longest and _covers(values.get(TO), bits, destination):
            longest, where = bits, f"{unpack(values[TO])}/{bits}" if bits else "default"
            found = f"{_WORDS[kind]} {where} in table {table}" if kind in _WORDS else ""
    return found


def _covers(prefix: bytes | None, bits: int, address: bytes | None) -> bool:
    """Return whether a prefix of `bits` bits contains an address; a missing prefix contains every address."""
    if not bits or prefix is None:
        return True
    if address is None:
        return False
    free = 8 * len(address) - bits
    return int.from_bytes(prefix, "big") >> free == int.from_bytes(address, "big") >> free
