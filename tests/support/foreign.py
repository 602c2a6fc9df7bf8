"""Rules in the form of the Go kube-proxy v1.36 for one Service on TCP and UDP port 80, in nftables and iptables mode.

The recordings in the same folder contain placeholders for the values that depend on the cluster.
"""

from __future__ import annotations

from pathlib import Path

from kubeproxy.backends.iptables.skeleton import chain_hashes
from support.live import Live

# The beginning of the Go kube-proxy v1.36's first transaction: it creates base chains, and flushes other chains and
# maps.
AFRESH = [
    *("filter-prerouting-pre-dnat", "filter-output-pre-dnat", "filter-input", "filter-forward", "filter-output"),
    *("nat-prerouting", "nat-output", "nat-postrouting"),
]
FLUSHED = [
    *("services", "masquerading", "mark-for-masquerade", "reject-chain", "cluster-ips-check", "firewall-check"),
    *("service-endpoints-check", "nodeport-endpoints-check"),
]
MAPS = {
    "no-endpoint-services": "@ADDRESS_TYPE@ . inet_proto . inet_service : verdict",
    "no-endpoint-nodeports": "inet_proto . inet_service : verdict",
    "firewall-ips": "@ADDRESS_TYPE@ . inet_proto . inet_service : verdict",
}


def go_start() -> str:
    """Return the beginning of a first transaction, in the words of the recording."""
    lines = ["add table @FAMILY@ kube-proxy"]
    for chain in AFRESH:
        lines += [f"add chain @FAMILY@ kube-proxy {chain}", f"delete chain @FAMILY@ kube-proxy {chain}"]
    for chain in FLUSHED:
        lines += [f"add chain @FAMILY@ kube-proxy {chain}", f"flush chain @FAMILY@ kube-proxy {chain}"]
    for name, kind in MAPS.items():
        lines.append(f"add map @FAMILY@ kube-proxy {name} {{ type {kind} ; }}")
    return "\n".join(lines) + "\n"


async def load_nft(live: Live, name: str, before: str = "") -> None:
    """Load the table of nftables mode for a Service, each family in one transaction that begins with `before`."""
    for family in ("IPv4", "IPv6"):
        number = {"IPv4": "", "IPv6": "6"}[family]
        values = {
            "FAMILY": f"ip{number}",
            "ADDRESS_TYPE": f"ipv{number or 4}_addr",
            "CLUSTER_IP": live.front(name, "cluster", family).address,
            "NODE_IP": live.ips["node"][family],
            "NODE_PORTS": str(live.front(name, "nodeport", family).port),
            "POD_NETWORK": {"IPv4": "10.244.0.0/16", "IPv6": "fd00:244::/32"}[family],
            "FIRST": live.ips["a1"][family] if family == "IPv4" else f"[{live.ips['a1'][family]}]",
            "SECOND": live.ips["b1"][family] if family == "IPv4" else f"[{live.ips['b1'][family]}]",
        }
        file = live.cluster.folder / f"foreign-{family}.nft"
        file.write_text(_filled(before + _recorded("foreign.nft"), values))
        await live.nft("-f", str(file))


async def load_iptables(live: Live, name: str, variant: str) -> None:
    """Load the chains of iptables mode for one endpoint of a Service, and for one removed endpoint."""
    for family, command in (("IPv4", "iptables"), ("IPv6", "ip6tables")):
        ip = live.ips["a1"][family]
        values = {
            "CLUSTER_IP": live.front(name, "cluster", family).address,
            "POD": ip,
            "DESTINATION": f"[{ip}]:3000" if family == "IPv6" else f"{ip}:3000",
            "POD_NETWORK": {"IPv4": "10.244.0.0/16", "IPv6": "fd00:244::/32"}[family],
        }
        for number, protocol in enumerate(("tcp", "udp")):
            port = f"default/{name}:{protocol}{protocol}"
            values[f"{protocol}_HASH"] = chain_hashes([port])[0]
            values[f"{protocol}_ENDPOINT"] = chain_hashes([f"{port}{values['DESTINATION']}"])[0]
            values[f"{protocol}_NODEPORT"] = str(live.front(name, "nodeport", family, number).port)
        file = live.cluster.folder / f"foreign-{family}.rules"
        file.write_text(_filled(_recorded("foreign.rules"), values))
        await live.run(f"{command}-{variant}-restore", "--noflush", str(file))


def _recorded(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _filled(text: str, values: dict[str, str]) -> str:
    for word, value in values.items():
        text = text.replace(f"@{word}@", value)
    return text
