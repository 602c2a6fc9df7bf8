"""A table with the structure of the Go kube-proxy v1.36's in nftables mode, for comparisons with ours. Text only.

It has a chain for each Service and for each endpoint, and verdict maps to them. Names are short, and other Services
have only their elements, because no packet reaches their chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bench import objects
from bench.pods import PORT

TABLE: Final = "ip upstream"

_KEY: Final = "ip daddr . meta l4proto . th dport"
_NEW: Final = "ct state new jump"
_DECLARED: Final = (
    "map service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
    "map service-nodeports { type inet_proto . inet_service : verdict ; }",
    "map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict ; }",
    "map no-endpoint-nodeports { type inet_proto . inet_service : verdict ; }",
    "map firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
    "set cluster-ips { type ipv4_addr ; }",
    f"set nodeport-ips {{ type ipv4_addr ; elements = {{ {objects.NODE_IP} }} ; }}",
)
_CHAINS: Final[Mapping[str, tuple[str, ...]]] = {
    "mark-for-masquerade": ("meta mark set meta mark or 0x4000",),
    "masquerading": (
        "meta mark and 0x4000 == 0 return",
        "meta mark set meta mark xor 0x4000",
        "masquerade fully-random",
    ),
    "services": (
        f"{_KEY} vmap @service-ips",
        "ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports",
    ),
    "firewall-check": (f"{_KEY} vmap @firewall-ips",),
    "service-endpoints-check": (f"{_KEY} vmap @no-endpoint-services",),
    "nodeport-endpoints-check": ("ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports",),
    "cluster-ips-check": ("ip daddr @cluster-ips reject", f"ip daddr {{ {objects.SERVICE_CIDR} }} drop"),
}
_HOOKS: Final[Mapping[str, tuple[str, ...]]] = {
    "filter hook prerouting priority -110": (f"{_NEW} firewall-check",),
    "filter hook output priority -110": (f"{_NEW} firewall-check",),
    "filter hook input priority 0": (f"{_NEW} nodeport-endpoints-check", f"{_NEW} service-endpoints-check"),
    "filter hook forward priority 0": (f"{_NEW} service-endpoints-check", f"{_NEW} cluster-ips-check"),
    "filter hook output priority 0": (f"{_NEW} service-endpoints-check", f"{_NEW} cluster-ips-check"),
    "nat hook prerouting priority -100": ("jump services",),
    "nat hook output priority -100": ("jump services",),
    "nat hook postrouting priority 100": ("jump masquerading",),
}


def text(services: Mapping[str, Sequence[str]], others: Sequence[str]) -> str:
    """Return nft's text for Services by their cluster IPs, with their endpoints, and for other cluster IPs."""
    lines = [f"add table {TABLE}", *(f"add {words.replace(' ', f' {TABLE} ', 1)}" for words in _DECLARED)]
    lines += (f"add chain {TABLE} {name}" for name in _CHAINS)
    for chain, rules in _CHAINS.items():
        lines += (f"add rule {TABLE} {chain} {rule}" for rule in rules)
    for number, (hook, rules) in enumerate(_HOOKS.items()):
        lines.append(f"add chain {TABLE} base-{number} {{ type {hook} ; }}")
        lines += (f"add rule {TABLE} base-{number} {rule}" for rule in rules)
    for number, (cluster_ip, endpoints) in enumerate(services.items()):
        lines += _service(f"service-{number}", cluster_ip, endpoints)
    lines.append(f"add chain {TABLE} other")
    entries = [f"{cluster_ip} . tcp . 80 : goto service-{number}" for number, cluster_ip in enumerate(services)]
    entries += [f"{cluster_ip} . tcp . 80 : goto other" for cluster_ip in others]
    lines.append(f"add element {TABLE} service-ips {{ {', '.join(entries)} }}")
    lines.append(f"add element {TABLE} cluster-ips {{ {', '.join((*services, *others))} }}")
    return "\n".join(lines) + "\n"


def _service(chain: str, cluster_ip: str, endpoints: Sequence[str]) -> Iterator[str]:
    yield f"add chain {TABLE} {chain}"
    for number, endpoint in enumerate(endpoints):
        yield f"add chain {TABLE} {chain}-{number}"
        yield f"add rule {TABLE} {chain}-{number} ip saddr {endpoint} jump mark-for-masquerade"
        yield f"add rule {TABLE} {chain}-{number} meta l4proto tcp dnat to {endpoint}:{PORT}"
    outside = f"ip saddr != {objects.CLUSTER_CIDR} jump mark-for-masquerade"
    yield f"add rule {TABLE} {chain} ip daddr {cluster_ip} tcp dport 80 {outside}"
    verdicts = ", ".join(f"{number} : goto {chain}-{number}" for number in range(len(endpoints)))
    yield f"add rule {TABLE} {chain} numgen random mod {len(endpoints)} vmap {{ {verdicts} }}"
