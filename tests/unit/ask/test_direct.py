"""Findings for a connection to an endpoint's own address, which no rule of the proxy translates."""

from __future__ import annotations

import pytest

from kubeproxy.ask.checks import node as node_checks
from kubeproxy.ask.checks import strangers
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.nftables import MODE
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.route import Bridge
from kubeproxy.meaning.firewall import Filter, PassingPacket
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Packet

POD, NEAR, FRONT = b"\n\xf4\0\7", b"\n\xf4\0\x08", b"\n\x60\0\1"


@pytest.mark.parametrize(
    ("ways", "translated", "filtered", "family", "lost"),
    [
        (("cbr0", "cbr0"), False, (Family.IPV4,), Family.IPV4, False),
        (("cbr0", "cbr0"), False, (), Family.IPV4, False),
        (("cbr0", "cbr0"), False, (), Family.IPV6, False),
        (("cbr0", "cbr0"), True, (Family.IPV4,), Family.IPV4, True),
        (("cbr0", "cbr0"), True, (Family.IPV6,), Family.IPV6, False),
        (("cbr0", "cbr0"), True, (), Family.IPV6, True),
        (("cbr0", "eth0"), False, (Family.IPV4,), Family.IPV4, True),
        (("eth0", "eth0"), False, (Family.IPV4,), Family.IPV4, True),
    ],
)
def test_packets_between_two_ports_of_a_bridge_need_no_forwarding(
    ways, translated, filtered, family, lost, monkeypatch
):
    monkeypatch.setattr(node_checks, "number", lambda _: 0)
    monkeypatch.setattr(node_checks, "_entrances", lambda: {"cbr0", "eth0"})
    monkeypatch.setattr(node_checks, "bridges", lambda: [Bridge("cbr0", filtered)])
    packet = PassingPacket("forward", -1, 1, POD, NEAR, 6, 3000, (FRONT, 80), ways, translated)
    node = CheckedNode(
        None,
        0,
        MODE,
        KubeProxyConfiguration(),
        family=family,
        packet=Packet(POD, FRONT if translated else NEAR, 6, 80),
        passing=[packet],
    )
    assert bool(list(node_checks.unforwarded(node))) is lost


@pytest.mark.parametrize(
    ("direct", "rules"),
    [
        ("", ("`ct status dnat accept`", "`-m conntrack --ctstate DNAT -j ACCEPT`")),
        ("10.244.1.7", ("`ip daddr 10.244.1.7 accept` and `ct state established accept`", "`-d 10.244.1.7 -j ACCEPT`")),
        ("fd00::7", ("`ip6 daddr fd00::7 accept`", "`-d fd00::7 -j ACCEPT`")),
    ],
)
def test_the_fix_of_a_closed_chain_accepts_the_packets_of_the_connection(direct, rules):
    closed = [Filter("table ip filter", "ip", "FORWARD", "forward", True, False, 0)]
    (found,) = strangers.firewalls(closed, FlowsEnd.ENDPOINTS, False, direct=direct)
    assert all(rule in found.fix for rule in rules)
    assert ("dnat" in found.fix) is (direct == "")
