"""The text of our table: base chains and rules, none of which depends on a Service. Pure.

nat-prerouting   what comes in goes to a listener: from pods, from this node (by way of outside), from elsewhere
nat-output       what this node sends; but for the proxy's own connections, which carry the masquerade mark
filter-*         source ranges, drops and rejects, before the redirect; and nobody reaches a listener directly
"""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.rules import pods_in_nft
from kubeproxy.backends.userspace.layout import (
    FIREWALL_ALLOW,
    FIREWALL_IPS,
    LISTENERS,
    ORIGINS,
    TABLE,
    Elements,
    Kind,
    line,
    shapes,
)
from kubeproxy.model.addresses import Family, unpack
from kubeproxy.model.plan import FamilyGlobals, Globals

_CARRIED: Final = "meta l4proto { tcp, udp }"


class Ruleset:
    """The text of one family's table.

    `landing` is the node's address that what comes from outside is sent to: the interface that it came in by may have
    none, as those of pods often do. Without one it is that interface's own.
    """

    def __init__(self, family: Family, world: Globals, landing: bytes | None) -> None:
        self._ip = "ip" if family is Family.IPV4 else "ip6"
        self._family = family
        self._ours = world.of(family) or FamilyGlobals()
        self._mark = f"{world.masquerade_mark:#x}"
        self._landing = landing
        self.shapes = shapes(family)

    @property
    def name(self) -> str:
        """Return the table as nft names it."""
        return f"{self._ip} {TABLE}"

    def replacement(self, elements: Elements) -> str:
        """Return the text that puts the whole table in place of what is there, in one transaction."""
        name = self.name
        lines = [f"add table {name}", f"delete table {name}", f"add table {name}", *self.skeleton()]
        for set_name, entries in elements.items():
            lines += (line(self.shapes[set_name], name, key, value) for key, value in entries.items())
        return "\n".join(lines) + "\n"

    def skeleton(self) -> list[str]:
        """Return the lines that make sets, chains and rules."""
        name = self.name
        lines = []
        for shape in self.shapes.values():
            keyword = "map" if shape.kind is Kind.PORT else "set"
            flags = "flags interval ; " if shape.kind is Kind.INTERVAL else ""
            lines.append(f"add {keyword} {name} {shape.name} {{ typeof {shape.typeof} ; {flags}}}")
        if self._ours.nodeport_ips is not None:
            inside = ", ".join(unpack(address) for address in self._ours.nodeport_ips)
            filled = f"elements = {{ {inside} }} ; " if inside else ""
            lines.append(f"add set {name} nodeport-ips {{ typeof {self._ip} daddr ; {filled}}}")
        chains = self._chains()
        lines += (f"add chain {name} {chain} {{ {hook} }}" for chain, (hook, _) in chains.items() if hook)
        lines += (f"add chain {name} {chain}" for chain, (hook, _) in chains.items() if not hook)
        lines += (f"add rule {name} {chain} {rule}" for chain, (_, rules) in chains.items() for rule in rules)
        return lines

    def _chains(self) -> dict[str, tuple[str, list[str]]]:
        """Return the chains by name: the hook of a base chain, and the rules."""
        ours = f"meta mark and {self._mark} == {self._mark} return"
        listeners = f"@{LISTENERS}"
        found: dict[str, tuple[str, list[str]]] = {
            "nat-prerouting": ("type nat hook prerouting priority -100 ;", self._by_origin("carry")),
            "nat-output": ("type nat hook output priority -100 ;", [ours, *self._carry("node", "redirect to :")]),
            "filter-prerouting": (
                "type filter hook prerouting priority -110 ;",
                ["ct state new jump firewall", *(f"ct state new {rule}" for rule in self._by_origin("refuse"))],
            ),
            "filter-output": (
                "type filter hook output priority -110 ;",
                [
                    ours,
                    # An answer that no connection is known of would leave with the listener's own address.
                    f"ct state new meta l4proto . th sport {listeners} meta l4proto udp drop",
                    "ct state new jump firewall",
                    "ct state new goto refuse-node",
                ],
            ),
            "filter-input": (
                "type filter hook input priority 0 ;",
                [f"ct state new meta l4proto . th dport {listeners} ct status and dnat != dnat reject"],
            ),
            "firewall": ("", [self._firewall()]),
        }
        landing = f"dnat to {self._bracketed()} :" if self._landing else "redirect to :"
        for origin in ORIGINS:
            found[f"carry-{origin}"] = "", self._carry(origin, landing)
            found[f"refuse-{origin}"] = "", self._refuse(origin)
        return found

    def _by_origin(self, chain: str) -> list[str]:
        """Return the rules that tell origins apart in prerouting, with the same detector as every other mode."""
        detector = self._ours.detector
        pods = [f"{pods_in_nft(detector, self._ip)} goto {chain}-pod"] if detector.implemented else []
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

    def _firewall(self) -> str:
        key = f"{self._service} . {self._ip} saddr"
        return f"{self._service} @{FIREWALL_IPS} {key} != @{FIREWALL_ALLOW} drop"

    def _bracketed(self) -> str:
        text = unpack(self._landing or b"")
        return f"[{text}]" if self._family is Family.IPV6 else text

    @property
    def _service(self) -> str:
        return f"{self._ip} daddr . meta l4proto . th dport"

    @property
    def _nodeport(self) -> str:
        if self._ours.nodeport_ips is None:
            return "fib daddr type local"
        return f"{self._ip} daddr @nodeport-ips"
