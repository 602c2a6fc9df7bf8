"""Interfaces, addresses and routes of the network namespace, and announcements of their changes; the dummy interface of
ipvs mode; bridges, and whether the packets that they forward pass iptables and nftables. Sources: rtnetlink(7),
include/uapi/linux/if_link.h, Documentation/networking/bridge.rst and net/bridge/br_netfilter_hooks.c of Linux 6.18."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, NamedTuple, Self

from msgspec import Struct

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.model.addresses import Family, Range, family_of, unpack, within

_NEW_LINK, _DELETE_LINK, _GET_LINK, _NEW_ADDRESS, _DELETE_ADDRESS = 16, 17, 18, 20, 21
_GROUP: Final = 1  # RTNLGRP_LINK
_RECEIVE_BUFFER: Final = 4 << 20

_NAME: Final = 3  # IFLA_IFNAME
_INFO: Final = 18  # IFLA_LINKINFO
_INFO_KIND: Final = 1
_FAMILY_SPECIFIC: Final = 26  # IFLA_AF_SPEC
_ADDRESS_GENERATION: Final = 8  # IFLA_INET6_ADDR_GEN_MODE
_NO_GENERATED_ADDRESS: Final = 1
_ADDRESS: Final = 1  # IFA_ADDRESS
_LOCAL: Final = 2
_CACHE: Final = 6  # IFA_CACHEINFO: preferred and valid lifetime, and two values that the kernel sets
_FLAGS: Final = 8
_ETHERNET: Final = 1  # ARPHRD_ETHER
_UP: Final = 1  # IFF_UP
_RUNNING: Final = 0x40  # IFF_RUNNING
_NO_DUPLICATE_DETECTION: Final = 0x02  # IFA_F_NODAD
_NO_PREFIX_ROUTE: Final = 0x200
_FOREVER: Final = 0xFFFFFFFF

_LINK: Final = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, changed flags
_ANY_LINK: Final = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
_ADDRESS_HEAD: Final = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefix length, flags, scope, interface


class NetworkInterface(NamedTuple):
    """An interface: whether it is Ethernet (no loopback, no tunnel), whether it is up, and whether it has a carrier."""

    number: int
    name: str
    ethernet: bool
    up: bool
    running: bool


def dumped(kind: int, head: bytes, what: str) -> list[bytes]:
    """Return the buffers of a dump; `what` names the dump in errors. Raises NetlinkError."""
    with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
        return netlink.dump_all(kind, head, what)


@nl.understood("interfaces")
def interfaces() -> list[NetworkInterface]:
    """Return all interfaces. Raises NetlinkError."""
    found = []
    for data, start, end in nl.answers(dumped(_GET_LINK, _ANY_LINK, "the interfaces"), _LINK.size):
        _, kind, index, flags, _ = _LINK.unpack_from(data, start - _LINK.size)
        name = nl.text_of(nl.parts(data, start, end)[_NAME])
        found.append(NetworkInterface(index, name, kind == _ETHERNET, bool(flags & _UP), bool(flags & _RUNNING)))
    return found


def ethernet_interfaces() -> dict[int, str]:
    """Return the names of Ethernet interfaces by index. Raises NetlinkError."""
    return {one.number: one.name for one in interfaces() if one.ethernet}


def interface_changes() -> Announcements:
    """Return a socket that receives changes of interfaces. Raises NetlinkError."""
    return Announcements.open("interface changes", (_GROUP,), _RECEIVE_BUFFER, nl.NETLINK_ROUTE)


def link_index(name: str) -> int | None:
    """Return an interface's index; None if the interface is missing. Raises NetlinkError. Unlike if_nametoindex, this
    function does not make the kernel run modprobe."""
    return next((one.number for one in interfaces() if one.name == name), None)


def ensure_dummy(name: str) -> int:
    """Return the index of a dummy interface without a link-local address; create the interface if it is missing, and
    set it up. Raises NetlinkError, with code EOPNOTSUPP if the module dummy is missing."""
    index = link_index(name)
    with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
        if index is None:
            made = _ANY_LINK + nl.text_attribute(_NAME, name) + nl.nested(_INFO, nl.text_attribute(_INFO_KIND, "dummy"))
            what = f"create the dummy interface {name}"
            netlink.request(_NEW_LINK, made, what, nl.NLM_F_CREATE | nl.NLM_F_EXCL, accepted=(errno.EEXIST,))
            index = socket.if_nametoindex(name)
        mode = nl.nested(socket.AF_INET6, nl.attribute(_ADDRESS_GENERATION, bytes([_NO_GENERATED_ADDRESS])))
        no_address = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + nl.nested(_FAMILY_SPECIFIC, mode)
        netlink.requests(_NEW_LINK, [no_address], "an interface")  # a kernel without IPv6 refuses this
        netlink.request(_NEW_LINK, _LINK.pack(socket.AF_UNSPEC, 0, index, _UP, _UP), f"set {name} up")
    return index


def delete_link(name: str) -> bool:
    """Remove an interface; return whether it existed. Raises NetlinkError."""
    index = link_index(name)
    if index is None:
        return False
    with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
        link = _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0)
        return not netlink.request(_DELETE_LINK, link, f"remove the interface {name}", accepted=(errno.ENODEV,))


def link_addresses(name: str, family: int) -> set[bytes]:
    """Return an interface's packed addresses of a family. Raises NetlinkError."""
    return {address.ip for address in local_addresses(family) if address.interface == name}


def add_addresses(index: int, ips: Collection[bytes]) -> None:
    """Add packed addresses to an interface as /32 or /128; an existing address is no error. Raises RefusedError."""
    _change(_NEW_ADDRESS, index, ips, "add", errno.EEXIST)


def remove_addresses(index: int, ips: Collection[bytes]) -> None:
    """Remove packed addresses from an interface; a missing address is no error. Raises ApplyError."""
    _change(_DELETE_ADDRESS, index, ips, "remove", errno.EADDRNOTAVAIL)


def _change(kind: int, index: int, ips: Collection[bytes], verb: str, accepted: int) -> None:
    flags = nl.NLM_F_CREATE | nl.NLM_F_EXCL if kind == _NEW_ADDRESS else 0
    with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
        results = netlink.requests(kind, [_pack(index, ip) for ip in ips], "addresses", flags)
    refused = [
        (ip, nl.NetlinkError(code, f"cannot {verb} the address {unpack(ip)} (interface {index})", text))
        for ip, (code, text) in zip(ips, results, strict=True)
        if code not in (0, accepted)
    ]
    if refused:
        raise nl.RefusedError(refused)


def _pack(index: int, ip: bytes) -> bytes:
    family = family_of(ip)
    payload = (
        _ADDRESS_HEAD.pack(family, 8 * len(ip), 0, 0, index) + nl.attribute(_LOCAL, ip) + nl.attribute(_ADDRESS, ip)
    )
    if family is Family.IPV6:
        # Without duplicate detection the address is usable immediately. A prefix route is not needed, because the local
        # table already has a route to the address.
        payload += nl.attribute(_FLAGS, struct.pack("=I", _NO_DUPLICATE_DETECTION | _NO_PREFIX_ROUTE))
        # The address is deprecated, so that the longest matching prefix never makes it the source address (RFC 6724,
        # rules 3 and 8).
        payload += nl.attribute(_CACHE, struct.pack("=IIII", 0, _FOREVER, 0, 0))
    return payload


SYS: Final = Path("/sys/class/net")
SYSCTLS: Final = Path("/proc/sys/net/bridge")

_NAMES: Final = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
SYSCTL: Final = {family: f"net.bridge.bridge-nf-call-{word}" for family, word in _NAMES.items()}
"""For each family, the sysctl that makes all bridges of a network namespace pass packets to the rules."""


class Bridge(NamedTuple):
    """A bridge, and the families in which bridged packets pass the rules."""

    name: str
    filtered: tuple[Family, ...]


def bridges(sys: Path = SYS, sysctls: Path = SYSCTLS) -> list[Bridge]:
    """Return all bridges. If the module br_netfilter is not loaded, bridged packets do not pass the rules in any
    family."""
    found = [entry.name for entry in sorted(sys.iterdir()) if (entry / "bridge").is_dir()] if sys.is_dir() else []
    if not sysctls.is_dir():
        return [Bridge(name, ()) for name in found]
    everywhere = {family for family, word in _NAMES.items() if _is_on(sysctls / f"bridge-nf-call-{word}")}
    return [
        Bridge(
            name,
            tuple(
                family
                for family, word in _NAMES.items()
                if family in everywhere or _is_on(sys / name / "bridge" / f"nf_call_{word}")
            ),
        )
        for name in found
    ]


def hairpin_ports(bridge: str, sys: Path = SYS) -> dict[str, bool]:
    """Return the hairpin mode of a bridge's ports: whether a frame may leave through the port that received it."""
    try:
        return {entry.name: _is_on(entry / "hairpin_mode") for entry in sorted((sys / bridge / "brif").iterdir())}
    except OSError:
        return {}


def _is_on(path: Path) -> bool:
    try:
        return path.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


SCOPE_UNIVERSE: Final = 0

_GET_ADDRESSES: Final = 22  # RTM_GETADDR
_GROUPS: Final = (5, 9)  # RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR

GET_ROUTE: Final = 26  # RTM_GETROUTE
TO, FROM, _OUT, _PREFERRED = 1, 2, 4, 7  # RTA_DST, RTA_SRC, RTA_OIF, RTA_PREFSRC
ROUTE_HEAD: Final = struct.Struct("=8BI")  # struct rtmsg, struct fib_rule_hdr
NO_ROUTE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL})


class Address(Struct, frozen=True, order=True):
    """A local address: packed, with its prefix length in bits, interface name and scope (RT_SCOPE_...)."""

    ip: bytes
    prefixlen: int
    interface: str
    scope: int

    @property
    def network(self) -> Range:
        """Return the first and last address of the interface's network."""
        size, bits = len(self.ip), 8 * len(self.ip) - self.prefixlen
        first = int.from_bytes(self.ip, "big") >> bits << bits
        return first.to_bytes(size, "big"), (first | (1 << bits) - 1).to_bytes(size, "big")


def local_addresses(family: int) -> list[Address]:
    """Return the addresses of a family (AF_INET or AF_INET6) on all interfaces, in the kernel's order. Raises
    NetlinkError. The address of a point-to-point interface is the address of its local end."""
    buffers = dumped(_GET_ADDRESSES, _ADDRESS_HEAD.pack(family, 0, 0, 0, 0), "the local addresses")
    return listed(family, buffers, dict(socket.if_nameindex()))


@nl.understood("addresses")
def listed(family: int, buffers: Iterable[bytes], names: Mapping[int, str]) -> list[Address]:
    """Return the addresses of a family in a dump; `names` are the interfaces by index. Raises ApplyError."""
    found = []
    for data, start, end in nl.answers(buffers, _ADDRESS_HEAD.size):
        own_family, prefixlen, _, scope, index = _ADDRESS_HEAD.unpack_from(data, start - _ADDRESS_HEAD.size)
        values = nl.parts(data, start, end)
        # If the message contains a local address, IFA_ADDRESS is the address of the peer (rtnetlink(7)).
        ip = values.get(_LOCAL, values.get(_ADDRESS))
        if own_family == family and ip is not None and index in names:
            found.append(Address(ip, prefixlen, names[index], scope))
    return found


class AddressMonitor(Announcements):
    """Reports changes of addresses of both families, for loop.add_reader(monitor.fileno(), ...). Changes on the
    interfaces named `ignored` are not reported."""

    ignored: AbstractSet[str] = frozenset()

    @classmethod
    def listen(cls, ignored: AbstractSet[str] = frozenset()) -> Self:
        """Receive changes from now on, in the caller's network namespace. Raises NetlinkError."""
        opened = cls.open("address changes", _GROUPS, _RECEIVE_BUFFER, nl.NETLINK_ROUTE)
        opened.ignored = ignored
        return opened

    @nl.understood("addresses")
    def drain(self) -> bool:
        """Read all messages without blocking; return whether addresses may have changed. A renewed lifetime, and a
        message that the kernel dropped, count as changes."""
        ignored = {_number(name) for name in self.ignored}
        return self.changed(
            lambda data: any(_ADDRESS_HEAD.unpack_from(data, at.start)[4] not in ignored for at in nl.messages(data))
        )


def _number(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def way_out(source: bytes, destination: bytes) -> str:
    """Return the outgoing interface for a packed source and destination; '' without a route. Raises NetlinkError."""
    index = nl.host_number(_route(destination, source).get(_OUT, b""))
    try:
        return socket.if_indextoname(index)
    except OSError:  # no route, or the interface no longer exists
        return ""


def source_for(destination: bytes) -> bytes | None:
    """Return the source address that the kernel selects for a destination; None without route. Raises NetlinkError."""
    return _route(destination).get(_PREFERRED)


@nl.understood("a route")
def _route(destination: bytes, source: bytes | None = None) -> dict[int, bytes]:
    """Return the attributes of the route from this node to a destination; {} without a route."""
    return next((nl.parts(*place) for place in _routes(destination, source)), {})


def _routes(destination: bytes, source: bytes | None = None, flags: int = 0) -> list[tuple[bytes, int, int]]:
    try:
        return ask_route(destination, source, flags=flags)
    except nl.NetlinkError as error:
        if error.code in NO_ROUTE:
            return []
        raise


_GET_NEIGHBOUR, _NEIGHBOUR, _GATEWAY = 30, 1, 5  # RTM_GETNEIGH, NDA_DST, RTA_GATEWAY
_NEIGHBOUR_HEAD: Final = struct.Struct("=B3xiHBB")  # struct ndmsg
_UNANSWERED: Final = {0x01: "INCOMPLETE", 0x20: "FAILED"}  # NUD_...


@nl.understood("a neighbour")
def silent_neighbour(destination: bytes) -> tuple[str, bool]:
    """Return an error text if the next hop to a destination does not answer ARP or IPv6 neighbour discovery, else ''.
    Also return whether this silent hop is the destination itself; False if the route does not use the interface of the
    destination's network. Raises NetlinkError."""
    route, family = _route(destination), family_of(destination)
    hop, index = route.get(_GATEWAY, destination), nl.host_number(route.get(_OUT, b""))
    size, places = _NEIGHBOUR_HEAD.size, _neighbours(hop, index)
    states = [_NEIGHBOUR_HEAD.unpack_from(data, start - size)[2] for data, start, _ in places]
    state = next((_UNANSWERED[one] for one in states if one in _UNANSWERED), "")
    protocol = "ARP" if family is Family.IPV4 else "neighbour discovery"
    text = f"nothing answers {protocol} for {unpack(hop)} ({state} in `ip neighbour`)" if state else ""
    if not text or hop != destination:
        return text, False
    out = way_out(bytes(len(destination)), destination)
    near = {one.interface for one in local_addresses(family) if within(destination, [one.network])}
    if not near or not out or out in near:
        return text, True
    return f"{text} on {out}, although it is in the network of {', '.join(sorted(near))}", False


def _neighbours(address: bytes, index: int) -> list[tuple[bytes, int, int]]:
    asked = _NEIGHBOUR_HEAD.pack(family_of(address), index, 0, 0, 0) + nl.attribute(_NEIGHBOUR, address)
    try:
        with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
            return netlink.ask(_GET_NEIGHBOUR, asked, "a neighbour", _NEIGHBOUR_HEAD.size)
    except nl.NetlinkError as error:
        if error.code in {errno.ENOENT, errno.EINVAL, errno.ENODEV}:  # no entry, or no interface
            return []
        raise


@nl.understood("a neighbour")
def bridge_port(bridge: str, address: bytes) -> str:
    """Return the bridge port that leads to the neighbour with an address; '' if unknown. Raises NetlinkError."""
    hardware = [nl.parts(*place).get(_HARDWARE, b"") for place in _neighbours(address, _number(bridge))]
    try:
        table = (SYS / bridge / "brforward").read_bytes()
        found = [
            table[at : at + _FORWARDED] for at in range(0, len(table), _FORWARDED) if table[at : at + 6] in hardware
        ]
        ports = {one[6] | one[12] << 8 for one in found}
        names = sorted((SYS / bridge / "brif").iterdir())
        return next((one.name for one in names if int((one / "port_no").read_text("ascii"), 16) in ports), "")
    except (OSError, ValueError, IndexError):
        return ""


_HARDWARE: Final = 2  # NDA_LLADDR
_FORWARDED: Final = 16
"""The size of struct __fdb_entry (linux/if_bridge.h): a MAC address, the low byte of the port's number in byte 6, and
its high byte in byte 12."""


@nl.understood("a route")
def default_gateway(destination: bytes) -> bytes | None:
    """Return the gateway of the default route if this node's packets to a destination leave by that route, else None.
    Raises NetlinkError."""
    places = _routes(destination, flags=_MATCHED)
    found = [place for place in places if not ROUTE_HEAD.unpack_from(place[0], place[1] - ROUTE_HEAD.size)[1]]
    return nl.parts(*found[0]).get(_GATEWAY) if found else None


_MATCHED: Final = 0x2000  # RTM_F_FIB_MATCH: the answer contains the route's network in place of the destination


def ask_route(
    destination: bytes, source: bytes | None, more: bytes = b"", flags: int = 0
) -> list[tuple[bytes, int, int]]:
    """Return (buffer, start, end) of the attributes of a route; `more` are packed attributes. Raises NetlinkError."""
    ends = nl.attribute(TO, destination) + (nl.attribute(FROM, source) if source is not None else b"")
    head = ROUTE_HEAD.pack(family_of(destination), 8 * len(destination), 8 * len(source or b""), *bytes(5), flags)
    with nl.Netlink.open(nl.NETLINK_ROUTE) as netlink:
        return netlink.ask(GET_ROUTE, head + ends + more, "a route", ROUTE_HEAD.size)
