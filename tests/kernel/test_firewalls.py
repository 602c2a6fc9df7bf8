"""Filter chains of a real kernel: whether new connections pass them, in nf_tables and both variants of iptables."""

from __future__ import annotations

import math
import subprocess

import pytest
from msgspec.structs import replace

from kubeproxy.ask.checks.checkup import _rules
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.backends import leftovers
from kubeproxy.backends.mode import Sight
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel import chains
from kubeproxy.kernel.nftables.tables import HOOKS
from kubeproxy.kernel.route import source_for, way_out
from kubeproxy.meaning.firewall import Drop, Filter, PassingPacket
from kubeproxy.meaning.found import firewalls
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import Family, place_text
from kubeproxy.setup import modes
from support.iptables_cases import go_rules
from support.own_network import own_network

FIREWALLD = """
table inet firewalld {
  chain filter_FORWARD {
    type filter hook forward priority 10; policy accept;
    ct state { established, related } accept
    ct status dnat accept
    iifname "lo" accept
    jump filter_FORWARD_POLICIES_pre
    ct state { invalid } drop
    reject with icmpx type admin-prohibited
  }
  chain filter_FORWARD_POLICIES_pre { }
}
"""
BASE = "table inet t {{\n{more}\nchain c {{ type filter hook {hook} priority 0; policy {policy}; {rules}; }}\n}}\n"


def filters(*without: str) -> list[Filter]:
    return [one for each in firewalls(chains.chains(), frozenset(without)) for one in each.filters()]


def drops(*packets: PassingPacket, without: tuple[str, ...] = ()) -> list[Drop]:
    found = [one for each in firewalls(chains.chains(), frozenset(without)) for one in each.drops(packets)]
    return [one._replace(verdict="drops") for one in found]


def nft(text: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)


def read(text: str) -> Filter:
    with own_network():
        nft(text)
        (one,) = filters()
    return one


@pytest.mark.parametrize(
    ("policy", "rules", "more", "closes", "accepts", "drops"),
    [
        ("accept", "", "", False, False, 0),
        ("drop", "", "", True, False, 0),
        ("drop", "ct state established,related accept;", "", True, False, 0),
        ("drop", "ct state vmap { established : accept, related : accept, invalid : drop };", "", True, False, 0),
        ("drop", "ct state { established, related } accept;", "", True, False, 0),
        ("drop", "ct state new accept;", "", True, True, 0),
        ("drop", "ct status dnat accept;", "", True, True, 0),
        ("drop", "ip saddr 10.0.0.0/8 counter accept;", "", True, True, 0),
        ("drop", "tcp dport vmap { 22 : accept };", "", True, True, 0),
        ("drop", "jump inner;", "chain inner { tcp dport 22 accept; }\n", True, True, 0),
        ("drop", "jump inner;", "chain deeper { }\nchain inner { tcp dport 22 drop; jump deeper; }\n", True, False, 1),
        ("drop", "jump KUBE-FORWARD;", "chain KUBE-FORWARD { accept; }", True, False, 0),
        ("drop", "jump KUBE-ROUTER-FORWARD;", "chain KUBE-ROUTER-FORWARD { meta mark 1 accept; }", True, True, 0),
        ("drop", "ct mark vmap { 0 : accept };", "", True, True, 0),
        ("accept", "tcp dport 22 drop;", "", False, False, 1),
        ("accept", "tcp dport { 22, 23 } reject;", "", False, False, 1),
        ("accept", "counter drop;", "", True, False, 1),
        ("accept", "ct state established accept; counter reject with icmpx type admin-prohibited;", "", True, False, 1),
        ("accept", "limit rate over 1000/second drop;", "", False, False, 1),
    ],
)
def test_chains_that_let_connections_pass(policy, rules, more, closes, accepts, drops):
    one = read(BASE.format(hook="forward", policy=policy, rules=rules, more=more))
    marked = "jump KUBE-FORWARD" in rules
    assert one == Filter("table inet t", "inet", "c", "forward", closes, accepts, drops, marked=marked)


ENDPOINT, CLIENT, FRONT = (bytes(address) for address in ([10, 244, 1, 10], [10, 0, 0, 1], [10, 0, 0, 2]))
REQUEST = PassingPacket(
    "forward", -math.inf, math.inf, CLIENT, ENDPOINT, 6, 3000, (FRONT, 30086), ("eth0", "cbr0"), True
)
ANSWER = REQUEST._replace(source=ENDPOINT, destination=CLIENT, interfaces=("cbr0", "eth0"), purpose=CompiledFor.ANSWER)
SEEN = "set seen { type ipv4_addr; flags dynamic; }"
EARLY = PassingPacket("prerouting", -math.inf, -100, CLIENT, FRONT, 6, 30086, (FRONT, 30086), ("eth0", ""))


@pytest.mark.parametrize(
    ("dropped", "rules", "more"),
    [
        (True, "ip daddr 10.244.1.10 drop;", ""),
        (True, "ip daddr 10.244.0.0/16 counter log drop;", ""),
        (True, "ip daddr 10.244.1.8/29 drop;", ""),
        (True, "ip saddr 10.0.0.0/8 tcp dport 3000 reject;", ""),
        (True, "ct state established,related accept; ip daddr 10.244.1.10 tcp dport != 80 drop;", ""),
        (True, "meta mark 7 drop; jump inner; accept;", "chain inner { udp dport 53 return; ip protocol tcp drop; }"),
        (True, "goto inner; accept;", "chain inner { meta nfproto ipv6 accept; tcp dport 3000 reject; }"),
        (True, "ip daddr { 10.244.1.10, 10.244.1.12 } drop;", ""),
        (True, "tcp dport vmap { 22 : accept, 3000 : drop };", ""),
        (True, "ip saddr @bad drop;", "set bad { type ipv4_addr; flags interval; elements = { 10.0.0.0/24 } }"),
        (True, "ip saddr @bad drop;", "set bad { type ipv4_addr; flags dynamic,timeout; elements = { 10.0.0.1 } }"),
        (True, "ip daddr . tcp dport @bad drop;", "set bad { type ipv4_addr . inet_service; elements = { BAD } }"),
        (True, "ct state vmap { established : accept, related : accept, new : drop };", ""),
        (
            True,
            "ct state { new } ct original ip daddr 10.0.0.2 meta l4proto 6 ct original proto-dst 30086 drop;",
            "",
        ),
        (True, "ct original protocol tcp meta l4proto tcp ct original proto-dst 30086 drop;", ""),
        (False, "ct original protocol udp drop;", ""),
        (True, "iifname eth1 accept; oifname { lo, docker0 } accept; iifname eth0 drop;", ""),
        (True, "iifname eth* oifname cbr0 drop;", ""),
        (True, "limit rate 1/second jump inner; drop;", "chain inner { return; }"),
        (True, "meta protocol ip ip daddr 10.244.1.10 drop;", ""),
        (True, "tcp flags syn drop;", ""),
        (True, "tcp flags & (fin|syn|rst|ack) == syn drop;", ""),
        (True, "tcp flags != syn / fin,syn,rst,ack accept; drop;", ""),
        (True, "tcp flags & (syn|ack) != (syn|ack) ct state new drop;", ""),
        (True, "tcp flags & (fin|syn|rst|ack) { syn, fin } drop;", ""),
        (True, "meta protocol { ip, arp } drop;", ""),
        (False, "tcp flags ack drop;", ""),
        (False, "tcp flags & (fin|syn|rst|ack) != syn ct state new drop;", ""),
        (False, "tcp flags & (fin|syn) == (fin|syn) drop;", ""),
        (False, "tcp flags & (fin|syn|rst|ack) != { syn, fin } drop;", ""),
        (False, "meta nfproto != { ipv4, ipv6 } drop;", ""),
        (False, "tcp flags == syn drop;", ""),  # a client may request ECN
        (False, "ip daddr 10.244.1.11 drop;", ""),
        (False, "ip daddr 10.244.1.10 udp dport 3000 drop;", ""),
        (False, "ip daddr 10.244.1.10 accept; drop;", ""),
        (False, "ip6 daddr fd00::1 drop;", ""),
        (False, "ct state established drop;", ""),
        (False, "ct direction reply drop;", ""),
        (False, "ct status dnat accept; drop;", ""),
        (False, "jump inner; accept;", "chain inner { return; drop; }"),
        (False, "ip daddr { 10.244.1.11, 10.244.1.12 } drop;", ""),
        (False, "iifname cbr0 drop;", ""),
        (False, "iif lo drop;", ""),
        # No verdict: other conditions, which decide, are unknown here.
        (False, "ip daddr 10.244.1.10 limit rate 1/second drop;", ""),
        (False, "meta mark 7 jump inner; drop;", "chain inner { accept; }"),
        (False, "ct mark 0 drop;", ""),
        (False, "ct mark vmap { 0 : accept, 1 : drop }; drop;", ""),
        (False, "add @seen { ip saddr }; ip saddr @seen accept; drop;", SEEN),
        (False, "tcp sport 1024-65535 drop;", ""),
        (False, "ip saddr vmap { 10.0.0.2 : accept, * : drop };", ""),
        (
            False,
            "update @seen { ip saddr limit rate over 9/second } drop;",
            "set seen { type ipv4_addr; flags dynamic; }",
        ),
    ],
)
def test_chains_that_certainly_drop_packets(dropped, rules, more):
    more = more.replace("BAD", "10.244.1.10 . 3000")
    with own_network():
        nft(BASE.format(hook="forward", policy="accept", rules=rules.removesuffix(";"), more=more))
        found = drops(REQUEST)
        assert drops(REQUEST, without=("t",)) == []
    assert found == [Drop("table inet t", "c", REQUEST)] * dropped


@pytest.mark.parametrize(
    ("dropped", "rules"),
    [
        (True, "ip saddr 10.244.0.0/16 drop"),
        (True, "ct state established tcp sport 3000 drop"),
        (True, "ct state new accept; ct direction original accept; ct status dnat drop"),
        (True, "iifname cbr0 ip daddr { 10.0.0.1, 10.0.0.3 } tcp sport { 80, 3000 } drop"),
        (True, "ct original ip daddr 10.0.0.2 drop"),
        (True, "ct original protocol tcp meta l4proto tcp ct original proto-dst 30086 drop"),
        (True, "tcp flags & (syn|ack) == (syn|ack) drop"),
        (False, "tcp flags & (fin|syn|rst|ack) == syn drop"),
        (False, "ct state established,related accept; drop"),
        (False, "ct state vmap { established : accept, related : accept, invalid : drop }; drop"),
        (False, "tcp dport 3000 drop"),
        (False, "ct original ip saddr 10.244.1.10 drop"),
        (False, "meta l4proto tcp ct original proto-dst 30087 drop"),
        (False, "ip daddr 10.244.0.0/16 drop"),
    ],
)
def test_chains_that_certainly_drop_answers(dropped, rules):
    with own_network():
        nft(BASE.format(hook="forward", policy="accept", rules=rules, more=""))
        found = drops(ANSWER)
    assert found == [Drop("table inet t", "c", ANSWER)] * dropped


@pytest.mark.parametrize(
    ("rules", "harmless"),
    [
        ("ip daddr 10.244.1.11 tcp dport 80 drop", True),
        ("ip daddr 10.244.1.11 notrack", True),
        ("tcp dport 3000 accept; tcp sport 3000 accept; drop", True),
        ("ip daddr 10.244.1.10 notrack", True),  # it is already tracked
        ("ip daddr 10.244.1.10 meta mark 7 drop", False),
        ("ip daddr 10.244.1.10 ct state established drop", False),
        ("ip saddr 10.244.1.10 tcp sport 3000 drop", False),
        ("limit rate over 1000/second drop", False),
    ],
)
def test_which_chains_surely_let_a_connection_pass(rules, harmless):
    with own_network():
        nft(BASE.format(hook="forward", policy="accept", rules=rules, more=""))
        (one,) = firewalls(chains.chains(), frozenset())
        assert one.harmless([REQUEST, ANSWER]) == frozenset(["c"] if harmless else ())
        assert one.harmless([EARLY]) == frozenset()


@pytest.mark.parametrize(
    ("rules", "policy", "silent", "verdict"),
    [
        ("drop", "accept", True, "drops"),
        ("ip daddr 10.9.9.9 accept", "drop", True, "drops by its policy"),
        ("tcp dport 3000 reject; drop", "accept", False, "rejects"),
        ("ip saddr 10.0.0.0/8 log drop; reject", "accept", True, "drops"),
        ("meta mark 7 reject; drop", "accept", False, "drops or rejects"),
        ("tcp dport 3000 reject with tcp reset", "drop", False, "resets"),
        ("meta mark 7 reject; tcp dport 3000 reject with tcp reset", "drop", False, "rejects or resets"),
        ("meta mark 7 reject", "drop", False, "drops or rejects"),
    ],
)
def test_which_chains_drop_without_an_answer(rules, policy, silent, verdict):
    with own_network():
        nft(BASE.format(hook="forward", policy=policy, rules=rules, more=""))
        (one,) = firewalls(chains.chains(), frozenset())
        (found,) = one.drops([REQUEST])
        assert (found.verdict, bool(list(one.drops([REQUEST], silently=True)))) == (verdict, silent)


@pytest.mark.parametrize("command", ["iptables-nft", "iptables-legacy"])
@pytest.mark.parametrize(
    ("masqueraded", "rules", "dropped"),
    [
        (False, ("-m mark --mark 0x4000/0x4000 -j ACCEPT", "-j DROP"), True),
        (True, ("-m mark --mark 0x4000/0x4000 -j ACCEPT", "-j DROP"), False),
        (True, ("-m mark ! --mark 0x4000/0x4000 -j ACCEPT", "-j DROP"), True),
        (False, ("-m mark --mark 0x8000/0x8000 -j ACCEPT", "-j DROP"), False),
        (False, ("-j MARK --set-xmark 0x4000/0x4000", "-m mark --mark 0x4000/0x4000 -j DROP"), True),
        (False, ("-m mark --mark 1/1 -j MARK --or-mark 0x4000", "-m mark --mark 0x4000/0x4000 -j DROP"), False),
    ],
)
def test_the_bit_of_masquerading_decides(command, masqueraded, rules, dropped):
    with own_network():
        for rule in rules:
            subprocess.run([command, "-A", "FORWARD", *rule.split()], check=True)
        found = drops(REQUEST._replace(marks=(0x4000, 0x4000 * masqueraded)))
    assert [one.chain for one in found] == ["FORWARD"] * dropped


@pytest.mark.parametrize(
    ("priority", "dropped", "unordered"), [(-150, True, False), (-100, True, True), (0, False, False)]
)
def test_a_chain_sees_a_packet_between_two_priorities(priority, dropped, unordered):
    chain = f"chain c {{ type filter hook prerouting priority {priority}; ip daddr 10.0.0.2 tcp dport 30086 drop; }}"
    with own_network():
        nft(f"table ip t {{\n{chain}\n}}\n")
        assert drops(REQUEST, EARLY) == [Drop("table ip t", "c", EARLY, unordered=unordered)] * dropped


@pytest.mark.parametrize(
    ("priority", "rule", "untracked", "unordered"),
    [
        (-300, "ip daddr 10.0.0.2 notrack", True, False),
        (-300, "ip daddr 10.0.0.2 tcp dport { 22, 30086 } notrack accept", True, False),
        (-200, "ip daddr 10.0.0.2 notrack", True, True),
        (-150, "ip daddr 10.0.0.2 notrack", False, False),  # it is already tracked
        (-300, "ip daddr 10.0.0.3 notrack", False, False),
        (-300, "meta mark 7 notrack", False, False),
        (-300, "notrack drop", False, False),
    ],
)
def test_a_rule_that_takes_a_packet_out_of_connection_tracking(priority, rule, untracked, unordered):
    needed = EARLY._replace(tracked=True)
    with own_network():
        nft(f"table ip t {{\nchain c {{ type filter hook prerouting priority {priority}; {rule}; }}\n}}\n")
        assert [one for one in drops(REQUEST, EARLY) if one.untracks] == []
        found = [one for one in drops(REQUEST, needed) if one.untracks]
    assert found == [Drop("table ip t", "c", needed, unordered, untracks=True)] * untracked


@pytest.mark.parametrize(("priority", "dropped"), [(-300, False), (-150, True)])
def test_a_packet_is_new_once_it_is_tracked(priority, dropped):
    rules = f"chain c {{ type filter hook prerouting priority {priority}; ct state new tcp dport 30086 drop; }}\n"
    with own_network():
        nft(f"table inet t {{\n{rules}}}\n")
        assert bool(drops(EARLY)) is dropped


def test_a_table_of_the_other_family_is_left_out():
    six = REQUEST._replace(source=bytes(16), destination=bytes([0xFD, *[0] * 14, 1]))
    with own_network():
        nft("table ip6 t { chain c { type filter hook forward priority 0; policy drop; }\n}\n")
        assert drops(REQUEST, six) == [Drop("table ip6 t", "c", six)]


@pytest.mark.parametrize("flags", ["", "flags interval;"])
@pytest.mark.parametrize(("count", "dropped"), [(2000, True), (2001, False), (9000, False)])
def test_of_a_set_of_too_many_elements_nothing_is_claimed(flags, count, dropped):
    others = ", ".join(f"10.{number // 250}.{number % 250}.1" for number in range(count))
    more = f"set bad {{ type ipv4_addr; {flags} elements = {{ {others} }} }}"
    with own_network():
        nft(BASE.format(hook="forward", policy="accept", rules="ip saddr @bad drop", more=more))
        assert bool(drops(REQUEST)) is dropped


@pytest.mark.parametrize(("count", "dropped"), [(1999, True), (2000, False)])
@pytest.mark.parametrize("legacy", [False, True])
def test_of_a_table_of_too_many_rules_nothing_is_claimed(legacy, count, dropped):
    with own_network():
        if legacy:
            text = "*filter\n:FORWARD DROP\n" + "-A FORWARD -s 10.9.0.1 -j ACCEPT\n" * (count + 1) + "COMMIT\n"
            subprocess.run(["iptables-legacy-restore"], input=text, text=True, check=True)
        else:
            rules = "ip saddr 10.9.0.1 accept\n" * (count + 1)
            nft(BASE.format(hook="forward", policy="drop", rules=rules, more=""))
        assert bool(drops(REQUEST)) is dropped
        (one,) = [one for one in filters() if one.hook == "forward"]
        assert (one.closes, one.accepts) == (True, True)


CASES = [
    (True, ["-A FORWARD -d 10.244.1.0/24 -j DROP"]),
    (True, ["-A FORWARD -m comment --comment x -d 10.244.1.10 -j REJECT"]),
    (True, ["-N INNER", "-A FORWARD -j INNER", "-A INNER -s 10.0.0.1 -p tcp -j DROP"]),
    (True, ["-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -j DROP"]),
    (True, ["-A FORWARD -i eth0 -o cbr+ -p tcp --dport 3000 -m conntrack ! --ctstate ESTABLISHED -j DROP"]),
    (True, ["-A FORWARD -i docker0 -j ACCEPT", "-A FORWARD -j LOG", "-A FORWARD -j DROP"]),
    (True, ["-A FORWARD -m limit --limit 1/sec -j DROP", "-A FORWARD -p tcp -j DROP"]),
    (True, ["-A FORWARD -p tcp --syn -j DROP"]),
    (True, ["-A FORWARD -m conntrack --ctorigdst 10.0.0.2 -j DROP"]),
    (True, ["-A FORWARD -p tcp -m conntrack --ctorigdst 10.0.0.0/24 --ctorigdstport 30086 -j REJECT"]),
    (True, ["-A FORWARD -m conntrack --ctproto tcp --ctorigdstport 30000:32767 -j DROP"]),
    (True, ["-A FORWARD -m conntrack ! --ctorigdst 10.0.0.3 --ctstate NEW -j DROP"]),
    (False, ["-A FORWARD -m conntrack ! --ctorigdst 10.0.0.2 -j DROP"]),
    (False, ["-A FORWARD -p tcp -m conntrack ! --ctorigdstport 30086 -j DROP"]),
    (False, ["-A FORWARD -m conntrack --ctproto udp -j DROP"]),
    (False, ["-A FORWARD -m conntrack --ctorigdst 10.244.1.10 -j DROP"]),
    (True, ["-A FORWARD -p tcp ! --tcp-flags ALL ACK -m conntrack --ctstate NEW -j DROP"]),
    (False, ["-A FORWARD -p tcp ! --syn -m conntrack --ctstate NEW -j DROP"]),
    (
        False,
        ["-A FORWARD -p tcp --tcp-flags ALL NONE -j DROP", "-A FORWARD -p tcp --tcp-flags SYN,FIN SYN,FIN -j DROP"],
    ),
    (False, ["-A FORWARD -d 10.244.2.0/24 -j DROP"]),
    (False, ["-A FORWARD -m conntrack --ctstate NEW -j ACCEPT", "-A FORWARD -j DROP"]),
    (False, ["-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT", "-A FORWARD -j DROP"]),
    (False, ["-A FORWARD -m mark --mark 0x1 -j ACCEPT", "-A FORWARD -j DROP"]),
    (False, ["-A FORWARD -m limit --limit 1/sec -j DROP"]),
    (False, ["-A FORWARD -p tcp -j NFQUEUE", "-A FORWARD -j DROP"]),
]


@pytest.mark.parametrize(("dropped", "rules"), CASES)
@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_iptables_rules_that_certainly_drop_packets(variant, dropped, rules):
    where = "table ip filter" if variant == "nft" else "iptables-legacy -t filter"
    with own_network():
        for rule in rules:
            subprocess.run([f"iptables-{variant}", *rule.split()], check=True)
        assert drops(REQUEST) == [Drop(where, "FORWARD", REQUEST)] * dropped


@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize(
    ("dropped", "rule"),
    [
        (True, "-s 10.244.1.10 -p tcp --sport 3000 -m conntrack --ctstate ESTABLISHED -j DROP"),
        (True, "-p tcp --tcp-flags SYN,ACK SYN,ACK -j DROP"),
        (True, "-p tcp -m conntrack --ctorigdst 10.0.0.2 --ctorigdstport 30086 -j DROP"),
        (False, "-p tcp -m conntrack --ctorigdst 10.0.0.2 --ctorigdstport 30087 -j DROP"),
        (False, "-p tcp --syn -j DROP"),
        (False, "-p tcp --dport 3000 -j DROP"),
        (False, "-m conntrack --ctstate NEW -j DROP"),
    ],
)
def test_iptables_rules_that_certainly_drop_answers(variant, dropped, rule):
    with own_network():
        subprocess.run([f"iptables-{variant}", "-t", "mangle", "-A", "FORWARD", *rule.split()], check=True)
        assert [one.packet for one in drops(ANSWER)] == [ANSWER] * dropped


@pytest.mark.parametrize("masqueraded", [False, True])
def test_kube_proxy_accepts_masqueraded_packets_although_the_policy_drops(masqueraded):
    rules = ("-P FORWARD DROP", "-N KUBE-FORWARD", "-A FORWARD -j KUBE-FORWARD")
    accepted = ("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT",)
    node = CheckedNode(None, 0, modes.named("iptables"), KubeProxyConfiguration())
    node = replace(node, masqueraded=frozenset({(b"\n\xf4\1\7", 3000)} if masqueraded else ()))
    with own_network():
        for rule in rules + accepted:
            subprocess.run(["iptables-nft", *rule.split()], check=True)
        found = [one for one in _rules(node) if one.about == "firewall"]
    assert [one.is_wrong for one in found] == [not masqueraded]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook):
    assert read(BASE.format(hook=hook, policy="drop", rules="", more="")).hook == hook


def test_firewalld_lets_translated_connections_pass():
    one = read(FIREWALLD)
    assert (one.where, one.closes, one.accepts) == ("table inet firewalld", True, True)


def test_chains_of_nat_filter_nothing_and_own_tables_are_left_out():
    with own_network():
        text = "table ip t {\nchain c { type nat hook prerouting priority -100; }\nchain d { }\n}\n"
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
        known = chains.chains()
        assert [(one.family, one.table, one.name, one.hook) for one in known] == [
            ("ip", "t", "c", "prerouting"),
            ("ip", "t", "d", ""),
        ]
        assert filters() == []
        subprocess.run(["nft", "-f", "-"], input=FIREWALLD, text=True, check=True)
        assert filters("firewalld") == []


@pytest.mark.parametrize("variant", ["iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"])
def test_iptables_of_either_variant(variant):
    family = "ip6" if variant.startswith("ip6") else "ip"
    established = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]

    def forward() -> tuple[bool, bool, int]:
        (one,) = [one for one in filters() if one.hook == "forward"]
        assert (one.family, one.chain) == (family, "FORWARD")
        return one.closes, one.accepts, one.drops

    def run(*words: str) -> None:
        subprocess.run([variant, *words], check=True, capture_output=True)

    with own_network():
        assert filters() == []
        run("-P", "FORWARD", "DROP")
        run("-A", "FORWARD", *established)
        assert forward() == (True, False, 0)
        run("-A", "FORWARD", "-p", "tcp", "-j", "REJECT")
        assert forward() == (True, False, 1)
        run("-N", "DOCKER-USER")
        run("-A", "FORWARD", "-j", "DOCKER-USER")
        assert forward() == (True, False, 1)
        run("-A", "DOCKER-USER", "-m", "conntrack", "--ctstate", "NEW", "-i", "docker0", "-j", "ACCEPT")
        assert forward() == (True, True, 1)


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_a_kube_proxys_chains_are_seen_and_a_node_without_gets_none(variant):
    with own_network():
        assert chains.iptables_chains(chains.chains()) == []
        assert chains.legacy_tables("ip") == []  # reading creates no table
        command = [f"iptables-{variant}-restore", "--noflush"]
        subprocess.run(command, input=go_rules(Family.IPV4), text=True, check=True, capture_output=True)
        known = chains.chains()
        found = chains.iptables_chains(known)
        assert {(one.variant, one.family) for one in found} == {(variant, Family.IPV4)}
        (trace,) = leftovers.chain_traces(one for one in found if leftovers.is_ours(one.name))
        assert trace.what.endswith(f"chains KUBE-... of iptables-{variant}")
        assert leftovers.table_traces(Sight(known, found), "kube-proxy") == []


def test_which_way_answers_leave():
    with own_network():
        for line in (
            "link add here type bridge",
            "link add there type bridge",
            "addr add 10.9.0.1/24 dev here",
            "link set here up",
            "link set there up",
            "route add 192.0.2.0/24 dev there",
            "-6 addr add fd09::1/64 dev here nodad",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        source = bytes((10, 9, 0, 1))
        assert way_out(source, bytes((192, 0, 2, 1))) == "there"
        assert way_out(source, bytes((10, 9, 0, 7))) == "here"
        assert way_out(source, bytes((198, 51, 100, 1))) == ""
        assert way_out(b"\xfd\x09" + bytes(13) + b"\1", b"\xfd\x09" + bytes(13) + b"\7") == "here"
        assert source_for(bytes((10, 9, 0, 7))) == source
        assert source_for(bytes((198, 51, 100, 1))) is None
        assert source_for(b"\xfd\x09" + bytes(13) + b"\7") == b"\xfd\x09" + bytes(13) + b"\1"


FIRST = PassingPacket(
    "prerouting", -math.inf, -100, bytes((10, 244, 0, 2)), bytes((10, 96, 1, 0)), 6, 80, (bytes((10, 96, 1, 0)), 80),
    ("eth0", ""),
)  # fmt: skip
FIRST6 = FIRST._replace(source=b"\xfd" + bytes(14) + b"\2", destination=b"\xfd\1" + bytes(13) + b"\1")


def translated(packet: PassingPacket = FIRST, *without: str, owns=lambda _: False) -> list[tuple[str, str, str]]:
    """Return the name, certainty and destination of each chain that may translate a packet."""
    found = [one for each in firewalls(chains.chains(), frozenset(without), owns) for one in each.translations(packet)]
    return [
        (
            one.chain,
            "unordered" if one.unordered else "sure" if one.sure else "may",
            " ".join(place_text(*end) for end in one.ends),
        )
        for one in found
    ]


@pytest.mark.parametrize(
    ("priority", "rules", "wanted"),
    [
        (-110, "ip daddr 10.96.1.0 tcp dport 80 dnat to 10.244.0.11:3000", ("sure", "10.244.0.11:3000")),
        (-110, "ip daddr 10.96.1.0 tcp dport 80 dnat to 10.244.0.11", ("sure", "10.244.0.11:80")),
        (-110, "ip daddr 10.96.1.0 tcp dport 81 dnat to 10.244.0.11:3000", None),
        (-110, "ip daddr 10.96.1.0 udp dport 80 dnat to 10.244.0.11:3000", None),
        (-110, 'iifname "eth1" dnat to 10.244.0.11', None),
        (-110, "jump more", ("sure", "10.244.0.12:3000")),
        (-110, "meta mark 7 dnat to 10.244.0.11", ("may", "10.244.0.11:80")),
        (-110, "meta mark 7 dnat to 10.244.0.11; accept", ("may", "10.244.0.11:80")),
        (-110, "ip daddr 10.96.1.0 accept; dnat to 10.244.0.11", None),
        (-110, "fib daddr type local tcp dport 80 dnat to 10.244.0.11", None),
        (-110, "dnat to ip daddr map { 10.96.1.0 : 10.244.0.13 }", ("sure", "10.244.0.13:80")),
        (-110, "dnat to ip daddr map { 10.96.1.1 : 10.244.0.13 }", None),
        (-110, "dnat to numgen inc mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }", ("sure", "10.0.0.1:80 10.0.0.2:80")),
        (-110, "dnat to meta mark map { 7 : 10.244.0.1 }", ("may", "10.96.1.0:80")),
        (-110, "dnat to ip saddr & 255.255.255.0 map { 10.244.0.0 : 10.244.0.1 }", ("may", "10.96.1.0:80")),
        (-110, "tcp dport 80 redirect to :15001", ("sure", "0.0.0.0:15001")),
        (-110, "tcp dport 80 redirect", ("sure", "0.0.0.0:80")),
        (-110, "udp dport 80 redirect", None),
        (-100, "ip daddr 10.96.1.0 tcp dport 80 dnat to 10.244.0.11:3000", ("unordered", "10.244.0.11:3000")),
        (-90, "ip daddr 10.96.1.0 tcp dport 80 dnat to 10.244.0.11:3000", None),
    ],
)  # fmt: skip
def test_which_chains_translate_a_packet_first(priority, rules, wanted):
    with own_network():
        nft(
            "table ip mine { chain more { ip daddr 10.96.0.0/12 tcp dport 80 dnat to 10.244.0.12:3000; }\n"
            f"chain pre {{ type nat hook prerouting priority {priority}; {rules}; }}\n"
            "chain out { type nat hook output priority -120; dnat to 10.9.9.9; }; }"
        )
        assert translated() == ([("pre", *wanted)] if wanted else [])
        assert translated(FIRST6) == translated(FIRST, "mine") == []
        assert translated(FIRST._replace(hook="output")) == [("out", "sure", "10.9.9.9:80")]


def test_only_the_first_chain_of_a_table_translates():
    with own_network():
        for number in (11, 12):
            nft(
                f"table inet m {{ chain c{number} {{ type nat hook prerouting priority -1{number}; "
                f"meta nfproto ipv6 tcp dport 80 dnat ip6 to [fd00::{number}]:3000; }}; }}"
            )
        assert translated(FIRST6) == [("c12", "sure", "[fd00::12]:3000")]
        assert translated() == []


HOST_PORTS = """*nat
:KUBE-SERVICES - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-1 - [0:0]
:DOCKER - [0:0]
{first}
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A KUBE-SERVICES -d 10.96.1.0/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.0.1:3000
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: cni" -m multiport --dports 8080 -j CNI-DN-1
-A CNI-DN-1 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.244.0.11:80
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 30086 -j DNAT --to-destination 172.17.0.2:80
COMMIT
"""


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_host_ports_of_other_programs_are_for_addresses_of_the_node(variant):
    def loaded(first: str, owns=lambda name: name == "KUBE-SERVICES") -> list[list[tuple[str, str, str]]]:
        text = HOST_PORTS.format(first=first)
        subprocess.run([f"iptables-{variant}-restore"], input=text, text=True, check=True)
        places = [((127, 0, 0, 1), 8080), ((127, 0, 0, 1), 30086)]
        own = [FIRST._replace(destination=bytes(ip), original=(bytes(ip), port)) for ip, port in places]
        return [translated(one, owns=owns) for one in (FIRST, *own)]

    with own_network():
        assert loaded("") == [[], [], []]  # after KUBE-SERVICES
        moved = [("PREROUTING", "sure", "10.244.0.11:80")], [("PREROUTING", "sure", "172.17.0.2:80")]
        assert loaded("-A PREROUTING -j CNI-HOSTPORT-DNAT\n-A PREROUTING -j DOCKER") == [[], *moved]
        moved = [[(name, "unordered", end)] for ((name, _, end),) in moved]
        assert loaded("", lambda _: False) == [[("PREROUTING", "unordered", "10.244.0.1:3000")], *moved]
        redirected = "-A PREROUTING -d 10.96.1.0/32 -p tcp -j REDIRECT --to-ports 15001"
        assert loaded(redirected)[0] == [("PREROUTING", "sure", "0.0.0.0:15001")]
        ranged = "-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1-10.0.0.4"
        assert loaded(ranged)[0] == [("PREROUTING", "may", "10.96.1.0:80")]
