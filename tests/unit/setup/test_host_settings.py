"""What the configuration says of NodePort addresses, by mode. Source: docs/reference.md "Start" 6."""

from __future__ import annotations

import pytest

from kubeproxy.config.fields import IPTables
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
