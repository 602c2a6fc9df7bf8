"""The settings of NodePort addresses by mode, and the conntrack sysctls. Source: docs/reference.md "Start" 6."""

from __future__ import annotations

import pytest

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConntrackSettings, IPTables
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.model.world import Surroundings, build
from kubeproxy.setup import host

ALL = ("0.0.0.0/0", "::/0")
LOOPBACK = ("127.0.0.0/8", "::1/128")


@pytest.mark.parametrize(
    ("config", "addresses", "loopback"),
    [
        ({"mode": "nftables"}, ("primary",), "never"),
        ({"mode": "iptables"}, ALL, "ipv4"),
        ({"mode": "iptables", "iptables": IPTables(localhost_node_ports=False)}, ALL, "never"),
        ({"mode": "iptables", "node_port_addresses": ("primary",)}, ("primary",), "ipv4"),
        ({"mode": "ipvs"}, ALL, "never"),
        ({"mode": "ipvs", "node_port_addresses": ("primary", "all")}, ("primary", *ALL), "never"),
        ({"mode": "nftables", "node_port_addresses": ("primary", "localhost")}, ("primary", *LOOPBACK), "never"),
        ({"mode": "nftables", "feature_gates": {"KubeProxyNFTablesLocalhostNodePorts": True}}, ("primary",), "relayed"),
    ],
)
def test_nodeport_addresses(config, addresses, loopback):
    made = KubeProxyConfiguration(hostname_override="node-a", **config)
    found = host.settings(made)
    assert (found.nodeport_addresses, found.loopback_nodeports) == (addresses, loopback)


@pytest.mark.parametrize(("gates", "expected"), [({}, "served"), ({"AllowServiceExternalIPs": False}, "ignored")])
def test_the_gate_of_external_ips_is_read(gates, expected):
    config = KubeProxyConfiguration(hostname_override="node-a", feature_gates=gates)
    settings = host.settings(config)
    assert settings.external_ips == expected
    assert build(settings, Surroundings()).external_ips == expected


def conntrack(per_core: int, least: int = 0, established: int = 0, close_wait: int = 0, **others) -> ConntrackSettings:
    timeouts = {"tcp_established_timeout": Duration(established), "tcp_close_wait_timeout": Duration(close_wait)}
    return ConntrackSettings(max_per_core=per_core, min=least, **timeouts, **others)


@pytest.mark.parametrize(
    ("config", "cpus", "expected"),
    [
        (conntrack(0), 8, {}),
        (ConntrackSettings(), 2, {"max": 131072, "tcp_timeout_established": 86400, "tcp_timeout_close_wait": 3600}),
        (ConntrackSettings(), 64, {"max": 1048576, "tcp_timeout_established": 86400, "tcp_timeout_close_wait": 3600}),
        (conntrack(10, 2097152), 64, {"max": 2097152}),
        (conntrack(32768, 2097152), 32, {"max": 2097152}),
        (conntrack(32768, 2097152), 33, {"max": 1048576}),  # above the limit, min has no effect
        (conntrack(0, 131072), 64, {}),
        (conntrack(10), 3, {"max": 30}),
        (
            conntrack(0, tcp_be_liberal=True, udp_timeout=Duration(30), udp_stream_timeout=Duration(180)),
            1,
            {"udp_timeout": 30, "udp_timeout_stream": 180, "tcp_be_liberal": 1},
        ),
    ],
)
def test_conntrack_sysctls(config: ConntrackSettings, cpus: int, expected: dict[str, int]) -> None:
    found = host.conntrack_sysctls(config, cpus)
    assert {key.removeprefix("net/netfilter/nf_conntrack_"): value for key, value in found} == expected
