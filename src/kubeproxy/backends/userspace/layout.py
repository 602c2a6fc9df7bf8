"""The sets and maps of our table, and what a plan puts into them. Pure.

Services and NodePorts have, for each origin of a connection, a map to the port of the listener that it may use, and
sets of what is dropped or rejected. Keys and values are packed as in the kernel: each field fills whole registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from kubeproxy.backends import userspace
from kubeproxy.backends.userspace.listeners import ListenerName, PoolKind
from kubeproxy.kernel.nftables.elements import interval_element, plain_element
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES, Family, unpack
from kubeproxy.model.plan import Action, Frontend, FrontendKind, ServicePlan

TABLE: Final = userspace.TABLE
ORIGINS: Final = ("pod", "node", "outside")
"""Where a connection comes from, in the order of model.plan.Traffic."""

LISTENERS: Final = "listeners"
FIREWALL_IPS: Final = "firewall-ips"
FIREWALL_ALLOW: Final = "firewall-allow"

_SERVICE: Final = "{ip} daddr . meta l4proto . th dport"
_NODEPORT: Final = "meta l4proto . th dport"


class Kind(Enum):
    """What the elements of a set are."""

    KEY = "set"
    PORT = "map"  # key : port
    INTERVAL = "interval set"


class Shape(NamedTuple):
    """A set or map: `addresses` is how many addresses are in its key, which has a protocol and a port besides."""

    name: str
    typeof: str
    addresses: int
    kind: Kind


def shapes(family: Family) -> dict[str, Shape]:
    """Return all sets and maps of a family's table, by name."""
    ip = "ip" if family is Family.IPV4 else "ip6"
    service = _SERVICE.format(ip=ip)
    found = []
    for origin in ORIGINS:
        for what, typeof, addresses in (("services", service, 1), ("nodeports", _NODEPORT, 0)):
            found.append(Shape(f"{origin}-{what}", f"{typeof} : th dport", addresses, Kind.PORT))
            found.append(Shape(f"{origin}-{what}-dropped", typeof, addresses, Kind.KEY))
            found.append(Shape(f"{origin}-{what}-rejected", typeof, addresses, Kind.KEY))
    found.append(Shape(LISTENERS, _NODEPORT, 0, Kind.KEY))
    found.append(Shape(FIREWALL_IPS, service, 1, Kind.KEY))
    found.append(Shape(FIREWALL_ALLOW, f"{service} . {ip} saddr", 2, Kind.INTERVAL))
    return {shape.name: shape for shape in found}


Elements = dict[str, dict[bytes, bytes]]
"""Set to key to value: the port of a listener (2 bytes), b'' in plain sets. An interval's key is its first and last."""


def elements(plan: ServicePlan, ports: Mapping[ListenerName, int | None]) -> Elements:
    """Return what a plan puts into the table, given the ports of its listeners.

    What could get no listener (no port left, SCTP) is rejected.
    """
    found: Elements = {}
    for frontend in plan.frontends:
        key = element_key(frontend)
        for origin, action in zip(ORIGINS, plan.traffic(frontend), strict=True):
            name, value = carrying_map(origin, frontend), b""
            if action.forwards:
                kind = PoolKind.LOCAL if action.picks_local else PoolKind.CLUSTER
                port = ports.get(ListenerName(plan.key, kind))
                if port is None:
                    name = f"{name}-rejected"
                else:
                    value = PORT_BYTES[port]
                    found.setdefault(LISTENERS, {})[_registers(frontend.protocol, port)] = b""
            else:
                name = f"{name}-rejected" if action is Action.REJECT else f"{name}-dropped"
            found.setdefault(name, {})[key] = value
        sources = plan.sources(frontend)
        if sources is not None:
            found.setdefault(FIREWALL_IPS, {})[key] = b""
            for first, last in sources:
                found.setdefault(FIREWALL_ALLOW, {})[key + first + key + last] = b""
    return found


def carrying_map(origin: str, frontend: Frontend) -> str:
    """Return the map that leads a frontend's connections of an origin to a listener."""
    return f"{origin}-{'nodeports' if frontend.kind is FrontendKind.NODEPORT else 'services'}"


def element_key(frontend: Frontend) -> bytes:
    """Return the key of a frontend."""
    return frontend.address + _registers(frontend.protocol, frontend.port)


def _registers(protocol: int, port: int) -> bytes:
    return bytes((protocol, 0, 0, 0)) + PORT_BYTES[port] + b"\0\0"


def merged(parts: Iterable[Elements]) -> Elements:
    """Return the elements of several plans together."""
    found: Elements = {}
    for part in parts:
        for name, entries in part.items():
            found.setdefault(name, {}).update(entries)
    return found


def packed(shape: Shape, key: bytes, value: bytes) -> bytes:
    """Return an element for a netlink message."""
    return interval_element(key) if shape.kind is Kind.INTERVAL else plain_element(key, value)


def line(shape: Shape, table: str, key: bytes, value: bytes) -> str:
    """Return the nft line that adds an element."""
    if shape.kind is Kind.INTERVAL:
        half = len(key) // 2
        first, last = _words(shape, key[:half]), _words(shape, key[half:])
        text = " . ".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))
    else:
        text = " . ".join(_words(shape, key))
    return f"add element {table} {shape.name} {{ {text}{f' : {unpack_port(value)}' if value else ''} }}"


def _words(shape: Shape, key: bytes) -> list[str]:
    size = (len(key) - 8) // shape.addresses if shape.addresses else 0
    protocol = PROTOCOL_NAMES[key[size]].lower()
    words = [protocol, str(unpack_port(key[size + 4 : size + 6]))]
    if shape.addresses > 0:
        words.insert(0, unpack(key[:size]))
    if shape.addresses > 1:
        words.append(unpack(key[size + 8 :]))
    return words


def unpack_port(value: bytes) -> int:
    """Return the port that a packed value begins with."""
    return int.from_bytes(value[:2], "big")
