"""Warnings about addresses that do not fit the families of the Node, once the Node is known."""

from __future__ import annotations

import pytest

from kubeproxy.config.load import load_text
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from kubeproxy.setup import host

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nhostnameOverride: n\n"
V4, V6 = Family.IPV4, Family.IPV6
ONE, OTHER = "192.0.2.1", "fd00::1"
DUAL = "clusterCIDR: 10.0.0.0/8,fd00::/8\n"
BRIDGE = "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cbr0}\n"
EVERYWHERE = "NodePorts answer on all local addresses"


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Return the warnings about a configuration, on a Node with addresses and pod networks; it may have one family."""

    def of(config, addresses=(ONE, OTHER), networks=(), families=(V4, V6)):
        monkeypatch.setattr(host, "families", lambda primary: families)
        listed = [NodeAddress("InternalIP", address) for address in addresses]
        node = Node(ObjectMeta(name="n"), NodeSpec(pod_cidrs=list(networks)), NodeStatus(listed))
        loaded = load_text(HEAD + config)
        caplog.clear()
        host.warn_of_addresses(loaded, host.settings(loaded), node)
        return caplog.messages

    return of


def _assert_told(found, fragments):
    assert len(found) == len(fragments), found
    assert all(fragment in line for fragment, line in zip(fragments, found, strict=True)), found


@pytest.mark.parametrize(
    ("config", "addresses", "told"),
    [
        ("mode: nftables\n", [ONE, OTHER], []),
        ("mode: nftables\n", [ONE], ["no IPv6 network, but the cluster appears to be dual-stack"]),
        ("mode: nftables\n", [], [f"no address of this node is known: {EVERYWHERE}"]),
        ("mode: iptables\n", [ONE], [f"nodePortAddresses is unset: {EVERYWHERE}"]),
        ("mode: ipvs\n", [ONE], [f"nodePortAddresses is unset: {EVERYWHERE}"]),
        ("mode: iptables\nnodePortAddresses: [all]\n", [ONE], []),
        ("mode: iptables\nnodePortAddresses: [primary, localhost]\n", [ONE], []),
        ("nodePortAddresses: [primary]\n", [ONE, OTHER], []),
        ("nodePortAddresses: [primary]\n", [ONE], ["no IPv6 network, but the cluster appears to be dual-stack"]),
        ("nodePortAddresses: [192.0.2.0/24, 'fd00::/8']\n", [ONE], []),
        ("nodePortAddresses: [192.0.2.0/24]\n", [ONE], ["NodePorts answer on all local IPv6 addresses"]),
        ("nodePortAddresses: ['fd00::/8']\n", [ONE, OTHER], ["NodePorts answer on all local IPv4 addresses"]),
    ],
)
def test_nodeports_that_answer_more_widely_than_one_may_think(config, addresses, told, warnings):
    _assert_told(warnings(DUAL + config, addresses), told)


@pytest.mark.parametrize(
    ("config", "addresses", "networks", "told"),
    [
        ("", [ONE], [], []),
        ("", [ONE], ["10.0.0.0/24", "fd00::/64"], ["no IPv6 network, but the cluster appears to be dual-stack"]),
        ("ipvs: {excludeCIDRs: [10.0.0.0/8, 'fd00::/8']}\n", [ONE], [], ["no IPv6 network, but the cluster"]),
        ("", [OTHER, ONE], [], ["no IPv6 network, but the Node's first address is in this family"]),
    ],
)
def test_nodeports_of_a_family_that_is_in_use_are_looked_at(config, addresses, networks, told, warnings):
    _assert_told(warnings(f"{BRIDGE}nodePortAddresses: [192.0.2.0/24]\n{config}", addresses, networks), told)


@pytest.mark.parametrize(
    ("config", "networks", "families", "told"),
    [
        (BRIDGE + "clusterCIDR: fd00::/8\n", (), (V4, V6), ["clusterCIDR has IPv6 addresses only"]),
        (BRIDGE, ["fd00::/64"], (V4, V6), ["podCIDRs of the Node has IPv6 addresses only"]),
        (BRIDGE, ["no network", "10.0.0.0/24"], (V4,), []),
        (BRIDGE + "ipvs: {excludeCIDRs: ['fd00::/8']}\n", (), (V4,), ["ipvs.excludeCIDRs has IPv6 addresses only"]),
        (BRIDGE + "ipvs: {excludeCIDRs: ['fd00::/8']}\n", (), (V4, V6), []),
        (BRIDGE + "healthzBindAddress: '[fd00::1]:10256'\n", (), (V4,), ["healthzBindAddress has IPv6 addresses only"]),
        (BRIDGE + "metricsBindAddress: '[::1]:10249'\n", (), (V4,), ["metricsBindAddress has IPv6 addresses only"]),
        (BRIDGE + "metricsBindAddress: '[::1]:10249'\n", (), (V4, V6), []),
        (BRIDGE + "metricsBindAddress: '[::]:10249'\n", (), (V4,), []),
    ],
)
def test_fields_of_the_wrong_family_alone(config, networks, families, told, warnings):
    _assert_told(warnings("nodePortAddresses: [all]\n" + config, [ONE], networks, families), told)


@pytest.mark.parametrize(
    ("config", "addresses", "families", "told"),
    [
        ("clusterCIDR: 10.0.0.0/8", [ONE], (V4,), []),
        (DUAL, [ONE, OTHER], (V4, V6), []),
        ("clusterCIDR: 10.0.0.0/8", [ONE], (V4, V6), []),
        ("clusterCIDR: 10.0.0.0/8", [ONE, OTHER], (V4, V6), ["no network of family=IPv6"]),
        ("clusterCIDR: fd00::/8", [ONE, OTHER], (V4, V6), ["no network of family=IPv4"]),
        ("clusterCIDR: ''", [ONE], (V4,), ["no network of family=IPv4"]),
        ("clusterCIDR: '::ffff:10.0.0.0/104'", [ONE], (V4,), []),
    ],
)
def test_cluster_cidrs_without_a_network_of_a_family_that_the_node_has(config, addresses, families, told, warnings):
    _assert_told(warnings(f"nodePortAddresses: [all]\n{config}\n", addresses, (), families), told)
