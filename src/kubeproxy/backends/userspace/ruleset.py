"""Our table: sets and maps, base chains and rules, and the elements of a plan. Pure.

Each origin of connections has one map with the listener's port of each frontend, and sets of dropped and rejected
frontends. NodePorts have separate maps and sets. Keys and values are packed as in the kernel: each field fills whole
registers.

nat-prerouting   redirects incoming packets to a listener, also packets of this node that come back from outside
nat-output       redirects packets of this node, except the proxy's own connections, which carry the masquerade mark
filter-*         checks source ranges, and drops or rejects, before the redirect; blocks direct access to a listener"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kubeproxy.backends import userspace
from kubeproxy.backends.rules import pods_in_nft
from kubeproxy.backends.state import Elements
from kubeproxy.backends.userspace.listeners import ListenerName, PoolKind
from kubeproxy.kernel.nftables import compiling, messages
from kubeproxy.kernel.nftables.elements import element_messages, interval_element, plain_element
from kubeproxy.kernel.nftables.nfnetlink import NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import INTERVAL, ChainContents, Definition, Hook, SetSpec
from kubeproxy.model.addresses import PORT_BYTES, Family, unpack
from kubeproxy.model.plan import Action, FamilyGlobals, Frontend, FrontendKind, Globals, ServicePlan

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
            found += SetSpec(f"{origin}-{what}-dropped", key), SetSpec(f"{origin}-{what}-rejected", key)
    found.append(SetSpec(LISTENERS, nodeport))
    found.append(SetSpec(FIREWALL_IPS, service))
    found.append(SetSpec(FIREWALL_ALLOW, (*service, f"{ip} saddr"), flags=INTERVAL))
    return {spec.name: spec for spec in found}


def elements(plan: ServicePlan, ports: Mapping[ListenerName, int | None]) -> Elements:
    """Return a plan's elements of the table, given the ports of its listeners. A frontend without a listener (no port
    was free, or the protocol is SCTP) is rejected. The data of a map is a listener's port (2 bytes), the data of a
    plain set is b''; the key of an interval is its first and last value."""
    found: Elements = {}
    for frontend in plan.frontends:
        key = element_key(frontend)
        for origin, action in zip(ORIGINS, plan.traffic(frontend), strict=True):
            name, value = carrying_map(origin, frontend), b""
            kind = PoolKind.LOCAL if action.picks_local else PoolKind.CLUSTER
            port = ports.get(ListenerName(plan.key, kind)) if action.forwards else None
            if port is not None:
                value = PORT_BYTES[port]
                found.setdefault(LISTENERS, {})[_registers(frontend.protocol, port)] = b""
            else:
                name += "-dropped" if action is Action.DROP else "-rejected"
            found.setdefault(name, {})[key] = value
        sources = plan.sources(frontend)
        if sources is not None:
            found.setdefault(FIREWALL_IPS, {})[key] = b""
            for first, last in sources:
                found.setdefault(FIREWALL_ALLOW, {})[key + first + key + last] = b""
    return found


def carrying_map(origin: str, frontend: Frontend) -> str:
    """Return the name of the map that contains the listener's port for a frontend and an origin."""
    return f"{origin}-{'nodeports' if frontend.kind is FrontendKind.NODEPORT else 'services'}"


def element_key(frontend: Frontend) -> bytes:
    """Return the key of a frontend."""
    return frontend.address + _registers(frontend.protocol, frontend.port)


def _registers(protocol: int, port: int) -> bytes:
    return bytes((protocol, 0, 0, 0)) + PORT_BYTES[port] + b"\0\0"


def merged(parts: Iterable[Elements]) -> Elements:
    """Return the union of the elements of several plans."""
    found: Elements = {}
    for part in parts:
        for name, entries in part.items():
            found.setdefault(name, {}).update(entries)
    return found


def packed(spec: SetSpec, key: bytes, value: bytes) -> bytes:
    """Return an element for a netlink message."""
    return interval_element(key) if spec.flags & INTERVAL else plain_element(key, value)


def unpack_port(value: bytes) -> int:
    """Return the port in the first two bytes of a packed value."""
    return int.from_bytes(value[:2], "big")


NODEPORT_IPS: Final = "nodeport-ips"
_CARRIED: Final = "meta l4proto { tcp, udp }"


class UserspaceRuleset:
    """One family's table. Connections from outside are redirected to `landing`, an address of the node, because the
    incoming interface may have no address, which is common for pods' interfaces. Without `landing`, the address of the
    incoming interface is used."""

    def __init__(self, family: Family, world: Globals, landing: bytes | None) -> None:
        self._ip = "ip" if family is Family.IPV4 else "ip6"
        self._family = family
        ours = world.of(family) or FamilyGlobals()
        self.nodeport_ips = ours.nodeport_ips
        self._detector = ours.detector
        self._mark = f"{world.masquerade_mark:#x}"
        self.landing = landing
        self.shapes = shapes(family)

    @property
    def name(self) -> str:
        """Return the name of the table in nft."""
        return f"{self._ip} {TABLE}"

    def creation(self) -> list[bytes]:
        """Return the messages that create the table, without elements of Services, if the table does not exist."""
        place, made = (self._family, TABLE), self.definition()
        found = [messages.table_message(*place), *messages.objects(*place, made)]
        inside = [plain_element(address) for address in self.nodeport_ips or ()]
        found += element_messages(NEW_ELEMENT, *place, NODEPORT_IPS, inside)
        return [*found, *messages.rules(*place, made.chains)]

    def definition(self) -> Definition:
        """Return the table without the elements of its sets."""
        sets = [*self.shapes.values()]
        if self.nodeport_ips is not None:
            sets.append(SetSpec(NODEPORT_IPS, (f"{self._ip} daddr",)))
        chains = {
            name: ChainContents(hook, tuple([compiling.rule(rule, self._ip) for rule in rules]))
            for name, (hook, rules) in self.chains().items()
        }
        return Definition(tuple(sets), chains)

    def is_like(self, other: UserspaceRuleset) -> bool:
        """Return whether another table has the same rules and the same addresses on which NodePorts answer."""
        return self.chains() == other.chains() and self.nodeport_ips == other.nodeport_ips

    def chains(self) -> dict[str, tuple[Hook | None, list[str]]]:
        """Return the hooks of the chains, and the text of their rules."""
        ours = f"meta mark and {self._mark} == {self._mark} return"
        listeners = f"@{LISTENERS}"
        unlisted = f"{self._service} . {self._ip} saddr != @{FIREWALL_ALLOW}"
        found: dict[str, tuple[Hook | None, list[str]]] = {
            "nat-prerouting": (Hook("nat", 0, -100), self._by_origin("carry")),
            "nat-output": (Hook("nat", 3, -100), [ours, *self._carry("node", "redirect to :")]),
            "filter-prerouting": (
                Hook("filter", 0, -110),
                ["ct state new jump firewall", *(f"ct state new {rule}" for rule in self._by_origin("refuse"))],
            ),
            "filter-output": (
                Hook("filter", 3, -110),
                [
                    ours,
                    # An answer without a conntrack entry would have the listener's own address as its source.
                    f"ct state new meta l4proto . th sport {listeners} meta l4proto udp drop",
                    "ct state new jump firewall",
                    "ct state new goto refuse-node",
                ],
            ),
            "filter-input": (
                Hook("filter", 1, 0),
                [f"ct state new meta l4proto . th dport {listeners} ct status and dnat != dnat reject"],
            ),
            "firewall": (None, [f"{self._service} @{FIREWALL_IPS} {unlisted} drop"]),
        }
        landing = f"dnat to {self._bracketed()} :" if self.landing else "redirect to :"
        for origin in ORIGINS:
            found[f"carry-{origin}"] = None, self._carry(origin, landing)
            found[f"refuse-{origin}"] = None, self._refuse(origin)
        return found

    def _by_origin(self, chain: str) -> list[str]:
        implemented = self._detector.implemented
        pods = [f"{pods_in_nft(self._detector, self._ip)} goto {chain}-pod"] if implemented else []
        return [*pods, f"fib saddr type local goto {chain}-node", f"goto {chain}-outside"]

    def _carry(self, origin: str, to: str) -> list[str]:
        return [
            f"{_CARRIED} {to} {self._service} map @{origin}-services",
            f"{self._nodeport} {_CARRIED} {to} meta l4proto . th dport map @{origin}-nodeports",
        ]

    def _refuse(self, origin: str) -> list[str]:
        nodeport = f"{self._nodeport} meta l4proto . th dport"
        return [
            f"{self._service} @{origin}-services-dropped drop",
            f"{self._service} @{origin}-services-rejected reject",
            f"{nodeport} @{origin}-nodeports-dropped drop",
            f"{nodeport} @{origin}-nodeports-rejected reject",
        ]

    def _bracketed(self) -> str:
        text = unpack(self.landing or b"")
        return f"[{text}]" if self._family is Family.IPV6 else text

    @property
    def _service(self) -> str:
        return f"{self._ip} daddr . meta l4proto . th dport"

    @property
    def _nodeport(self) -> str:
        if self.nodeport_ips is None:
            return "fib daddr type local"
        return f"{self._ip} daddr @{NODEPORT_IPS}"
