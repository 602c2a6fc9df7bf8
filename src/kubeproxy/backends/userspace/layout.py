"""The sets and maps of our table, and the elements of a plan. Pure.

For each origin of a connection there is a map from frontends to the ports of their listeners, and sets of frontends
that are dropped or rejected; NodePorts have their own ones. Keys and values are packed as in the kernel: each field
fills whole registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kubeproxy.backends import userspace
from kubeproxy.backends.userspace.listeners import ListenerName, PoolKind
from kubeproxy.kernel.nftables.elements import interval_element, plain_element
from kubeproxy.kernel.nftables.tables import INTERVAL, SetSpec
from kubeproxy.model.addresses import PORT_BYTES, Family
from kubeproxy.model.plan import Action, Frontend, FrontendKind, ServicePlan

TABLE: Final = userspace.TABLE
ORIGINS: Final = ("pod", "node", "outside")
"""The origins of connections, in the order of model.plan.Traffic."""

LISTENERS: Final = "listeners"
FIREWALL_IPS: Final = "firewall-ips"
FIREWALL_ALLOW: Final = "firewall-allow"


def shapes(family: Family) -> dict[str, SetSpec]:
    """Return all sets and maps of a family's table, by name."""
    ip = "ip" if family is Family.IPV4 else "ip6"
    nodeport = "meta l4proto", "th dport"
    service = f"{ip} daddr", *nodeport
    found = []
    for origin in ORIGINS:
        for what, key in (("services", service), ("nodeports", nodeport)):
            found.append(SetSpec(f"{origin}-{what}", key, ("th dport",)))
            found.append(SetSpec(f"{origin}-{what}-dropped", key))
            found.append(SetSpec(f"{origin}-{what}-rejected", key))
    found.append(SetSpec(LISTENERS, nodeport))
    found.append(SetSpec(FIREWALL_IPS, service))
    found.append(SetSpec(FIREWALL_ALLOW, (*service, f"{ip} saddr"), flags=INTERVAL))
    return {spec.name: spec for spec in found}


Elements = dict[str, dict[bytes, bytes]]
"""Set to key to value: the port of a listener (2 bytes), b'' in plain sets. An interval's key is its first and last."""


def elements(plan: ServicePlan, ports: Mapping[ListenerName, int | None]) -> Elements:
    """Return the elements of a plan, given the ports of its listeners.

    Frontends without a listener (no free port, or SCTP) are rejected.
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
    """Return the map for a frontend's connections of an origin."""
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


def packed(spec: SetSpec, key: bytes, value: bytes) -> bytes:
    """Return an element for a netlink message."""
    return interval_element(key) if spec.flags & INTERVAL else plain_element(key, value)


def unpack_port(value: bytes) -> int:
    """Return the port at the beginning of a packed value."""
    return int.from_bytes(value[:2], "big")
