"""The requirements of the mode: the missing parts with a remedy, and the chains that belong to the mode."""

from __future__ import annotations

import pytest

from kubeproxy.backends.iptables import mode
from kubeproxy.config.fields import DetectLocal, IPTables
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible
from kubeproxy.kernel.xtables.xtables_lock import LockHeldError
from kubeproxy.model.addresses import Family

V4 = (Family.IPV4,)


class Node:
    """The commands of a node that lacks a requirement."""

    def __init__(self, version=(1, 8, 9), rules=()) -> None:
        self.version, self.name, self.uses_nft, self._rules = version, "iptables", False, rules

    def rules(self, table, chain):
        if isinstance(self._rules, ApplyError):
            raise self._rules
        return self._rules


@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({}, True),
        ({"node_port_addresses": ("127.0.0.0/8", "fd00::/8")}, True),
        ({"node_port_addresses": ("primary", "localhost")}, True),
        ({"node_port_addresses": ("fd00::/8",)}, True),
        ({"node_port_addresses": ("primary",)}, False),
        ({"node_port_addresses": ("192.0.2.0/24",)}, False),
        ({"iptables": IPTables(localhost_node_ports=False)}, False),
    ],
)
def test_nodeports_on_loopback_need_a_sysctl(config, written):
    sysctls = mode.OPERATIONS.sysctls(KubeProxyConfiguration(mode="iptables", **config))
    assert sysctls == ([("net/ipv4/conf/all/route_localnet", 1)] if written else [])


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (ApplyError("iptables: no such file"), "apt-get install iptables"),
        (Node(version=(1, 4, 21)), r"1\.6\.2 or later, and this is 1\.4\.21"),
        (Node(rules=None), "modprobe iptable_nat"),
        (Node(rules=ApplyError("iptables: Permission denied")), "CAP_NET_ADMIN"),
    ],
)
def test_missing_requirements_are_named(monkeypatch, node, said):
    def commands(family, variant):
        if isinstance(node, ApplyError):
            raise node
        return node

    mode._commands.cache_clear()
    monkeypatch.setattr(xtables, "chosen", lambda: "legacy")
    monkeypatch.setattr(mode, "_is_there", lambda *_: False)
    monkeypatch.setattr(xtables, "variant_commands", commands)
    with pytest.raises(Unsupported, match=said):
        mode.OPERATIONS.check(KubeProxyConfiguration(), V4)
    mode._commands.cache_clear()


def test_a_lock_that_is_held_is_nothing_that_is_missing(monkeypatch):
    """Otherwise a node would have no IPv6 because another program was busy at the start."""
    mode._commands.cache_clear()
    monkeypatch.setattr(xtables, "chosen", lambda: "legacy")
    monkeypatch.setattr(mode, "_is_there", lambda *_: False)
    monkeypatch.setattr(xtables, "variant_commands", lambda *_: Node(rules=LockHeldError("holding the xtables lock")))
    with pytest.raises(ApplyError, match="xtables lock") as caught:
        mode.OPERATIONS.check(KubeProxyConfiguration(), V4)
    assert not isinstance(caught.value, Unsupported)
    mode._commands.cache_clear()


def test_rules_of_nft_itself_are_no_obstacle(monkeypatch):
    mode._commands.cache_clear()
    monkeypatch.setattr(xtables, "chosen", lambda: "nft")
    monkeypatch.setattr(xtables, "variant_commands", lambda *_: Node(rules=Incompatible("use 'nft' tool.")))
    mode.OPERATIONS.check(KubeProxyConfiguration(), V4)
    mode._commands.cache_clear()


@pytest.mark.parametrize("name", ["", "x" * 16, "a b", 'a"', "a\n-A INPUT"])
def test_an_interface_that_no_rule_can_name_is_refused(name):
    config = KubeProxyConfiguration(
        detect_local_mode="BridgeInterface", detect_local=DetectLocal(bridge_interface=name)
    )
    with pytest.raises(Unsupported, match="detectLocal"):
        mode.OPERATIONS.check(config, ())


@pytest.mark.parametrize(
    ("variant", "chain", "kept"),
    [("nft", "KUBE-SVC-A", True), ("nft", "KUBE-NODE-PORT", False), ("legacy", "KUBE-SVC-A", False)],
)
def test_chains_of_the_same_variant_belong_to_the_mode(variant, chain, kept):
    operations = mode.OPERATIONS._replace(commands=lambda family: Commands("iptables-nft", family, True, (1, 8, 9)))
    asked = Commands(f"iptables-{variant}", Family.IPV4, variant == "nft", (1, 8, 9))
    assert operations.keeps(asked, "nat", chain) is kept
