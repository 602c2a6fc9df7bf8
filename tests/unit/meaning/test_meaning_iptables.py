"""Outcomes of packets in small rulesets of iptables, compared with hand-computed results."""

from __future__ import annotations

import ipaddress

import pytest

from kubeproxy.meaning import rules
from kubeproxy.meaning.compare import FirstPacket, outcomes
from support.rulesets import NODE, PLACE, iptables_rules

SERVICE = """*filter
:INPUT ACCEPT [0:0]
:FORWARD {policy} [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -m nfacct --nfacct-name  dropped -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -d 10.96.0.2/32 -p tcp -m comment --comment "no \\"endpoints\\"" -m tcp --dport 80 -j REJECT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-A - [0:0]
:KUBE-SEP-B - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-X - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-SVC-X
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SEP-A -s 10.244.0.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A -p tcp -m recent --set --name KUBE-SEP-A --rsource -m tcp -j DNAT --to-destination 10.244.0.1:8080
-A KUBE-SEP-B -s 10.244.0.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.244.0.2:8080
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-X
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-X ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-X -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A --mask 255.255.255.255 --rsource -j KUBE-SEP-A
-A KUBE-SVC-X -m statistic --mode random --probability 0.25000000000 -j KUBE-SEP-A
-A KUBE-SVC-X -j KUBE-SEP-B
COMMIT
"""
A, B = "10.244.0.1:8080", "10.244.0.2:8080"


def seen(policy: str, source: str, destination: str, port: int, interface: str = "eth0", protocol: int = 6) -> dict:
    rules = iptables_rules(SERVICE.replace("{policy}", policy))
    found = outcomes(rules, PLACE, FirstPacket(source, destination, protocol, port, interface, ""))
    return {
        (
            f"{ipaddress.ip_address(outcome.address)}:{outcome.port}{' masq' if outcome.masquerade else ''}"
            if outcome.kind == "translated"
            else outcome.kind + (" masq" if outcome.masquerade else "")
        ): round(share, 6)
        for outcome, share in found
    }


@pytest.mark.parametrize(
    ("source", "destination", "port", "interface", "wanted"),
    [
        ("10.244.0.9", "10.96.0.1", 80, "eth0", {A: 0.25, B: 0.75}),
        ("10.244.0.1", "10.96.0.1", 80, "eth0", {f"{A} masq": 0.25, B: 0.75}),
        ("192.0.2.1", "10.96.0.1", 80, "eth0", {f"{A} masq": 0.25, f"{B} masq": 0.75}),
        (NODE, "10.96.0.1", 80, "", {f"{A} masq": 0.25, f"{B} masq": 0.75}),
        ("192.0.2.1", NODE, 30080, "eth0", {A: 0.25, B: 0.75}),
        ("192.0.2.1", "10.244.0.1", 30080, "eth0", {"passed": 1.0}),
        ("192.0.2.1", "10.96.0.1", 81, "eth0", {"passed": 1.0}),
        ("192.0.2.1", "10.96.0.2", 80, "eth0", {"refused": 1.0}),
        (NODE, "10.96.0.2", 80, "", {"refused": 1.0}),
    ],
)
def test_outcomes(source: str, destination: str, port: int, interface: str, wanted: dict[str, float]) -> None:
    assert seen("ACCEPT", source, destination, port, interface) == wanted


def test_a_policy_drops_packets_that_no_rule_accepts() -> None:
    assert seen("DROP", "10.244.0.9", "10.96.0.1", 80) == {"dropped": 1.0}
    assert seen("DROP", "192.0.2.1", "10.96.0.1", 80) == {f"{A} masq": 0.25, f"{B} masq": 0.75}


def test_another_protocol_passes() -> None:
    assert seen("ACCEPT", "192.0.2.1", "10.96.0.1", 80, protocol=rules.UDP) == {"passed": 1.0}
    assert seen("ACCEPT", "192.0.2.1", "10.96.0.1", 0, protocol=1) == {"passed": 1.0}


def test_an_unknown_match_is_named_and_not_guessed() -> None:
    rules = iptables_rules(
        "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-X - [0:0]\n-A PREROUTING -j KUBE-X\n"
        "-A KUBE-X -d 10.96.0.1/32 -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n"
    )
    ((outcome, share),) = outcomes(rules, PLACE, FirstPacket("192.0.2.1", "10.96.0.1", 6, 80, "eth0", ""))
    assert (outcome.kind, share) == ("unknown", 1.0)
    assert outcome.text == "option --match-set in nat KUBE-X, rule 1"
    assert outcomes(rules, PLACE, FirstPacket("192.0.2.1", "10.96.0.2", 6, 80, "eth0", ""))[0][0].kind == "passed"
