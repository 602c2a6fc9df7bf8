"""Texts of rules that several modes write."""

from __future__ import annotations

import pytest

from kubeproxy.backends.rules import Jump, pods_in_iptables, pods_in_nft
from kubeproxy.errors import ConfigError
from kubeproxy.model.plan import Detector


def test_jumps_are_as_iptables_save_prints_them():
    assert Jump("nat", "OUTPUT", "KUBE-SERVICES").rule == "OUTPUT -j KUBE-SERVICES"
    commented = Jump("filter", "INPUT", "KUBE-X", "what it is for", "-m conntrack --ctstate NEW ")
    assert commented.rule == 'INPUT -m conntrack --ctstate NEW -m comment --comment "what it is for" -j KUBE-X'


@pytest.mark.parametrize(
    ("detector", "nft", "iptables"),
    [
        (Detector("network", "10.244.0.0/16"), "ip saddr {}10.244.0.0/16", "-s 10.244.0.0/16"),
        (Detector("bridge", "cni0"), 'iifname {}"cni0"', "-i cni0"),
        (Detector("prefix", "veth"), 'iifname {}"veth*"', "-i veth+"),
    ],
)
def test_rules_that_recognise_pods(detector, nft, iptables):
    assert pods_in_nft(detector, "ip") == nft.format("")
    assert pods_in_nft(detector, "ip", "!= ") == nft.format("!= ")
    assert pods_in_iptables(detector) == iptables


def test_nothing_recognises_pods():
    assert pods_in_iptables(Detector()) == ""


@pytest.mark.parametrize("name", ["!cni0", "cni 0", "cni+", 'a"b', "a/b", "-j", "\x00"])
def test_an_interface_that_iptables_cannot_match_is_named(name):
    with pytest.raises(ConfigError, match="detectLocal"):
        pods_in_iptables(Detector("bridge", name))
