"""Chains that filter, read from a real kernel: which let new connections pass, in nf_tables and both iptables."""

from __future__ import annotations

import subprocess

import pytest

from kubeproxy.backends import leftovers
from kubeproxy.backends.mode import Sight
from kubeproxy.kernel import firewalls
from kubeproxy.kernel.route.addresses import source_for, way_out
from kubeproxy.kernel.rule_walk import Aim
from kubeproxy.model.addresses import Family
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


def read(text: str) -> firewalls.Filter:
    with own_network():
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
        (one,) = firewalls.filters(firewalls.chains(), frozenset())
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
        ("accept", "tcp dport 22 drop;", "", False, False, 1),
        ("accept", "tcp dport { 22, 23 } reject;", "", False, False, 1),
        ("accept", "counter drop;", "", True, False, 1),
        ("accept", "ct state established accept; counter reject with icmpx type admin-prohibited;", "", True, False, 1),
        ("accept", "limit rate over 1000/second drop;", "", False, False, 1),
    ],
)
def test_what_a_chain_lets_pass(policy, rules, more, closes, accepts, drops):
    one = read(BASE.format(hook="forward", policy=policy, rules=rules, more=more))
    assert one == firewalls.Filter("table inet t", "inet", "c", "forward", closes, accepts, drops)


ENDPOINT = Aim(bytes([10, 0, 0, 1]), bytes([10, 244, 1, 10]), 6, 3000)
ENDPOINT6 = Aim(bytes(16), bytes([0xFD, *[0] * 14, 1]), 6, 3000)


@pytest.mark.parametrize(
    ("drops", "rules", "more"),
    [
        (True, "ip daddr 10.244.1.10 drop;", ""),
        (True, "ip daddr 10.244.0.0/16 counter log drop;", ""),
        (True, "ip daddr 10.244.1.8/29 drop;", ""),
        (True, "ip saddr 10.0.0.0/8 tcp dport 3000 reject;", ""),
        (True, "ct state established,related accept; ip daddr 10.244.1.10 tcp dport != 80 drop;", ""),
        (True, "meta mark 7 drop; jump inner; accept;", "chain inner { udp dport 53 return; ip protocol tcp drop; }"),
        (True, "goto inner; accept;", "chain inner { meta nfproto ipv6 accept; tcp dport 3000 reject; }"),
        (False, "ip daddr 10.244.1.11 drop;", ""),
        (False, "ip daddr 10.244.1.10 udp dport 3000 drop;", ""),
        (False, "ip daddr 10.244.1.10 accept; drop;", ""),
        (False, "ip6 daddr fd00::1 drop;", ""),
        (False, "ct state established drop;", ""),
        (False, "jump inner; accept;", "chain inner { return; drop; }"),
        # Nobody is sure: what else decides is not known here.
        (False, "ct status dnat accept; drop;", ""),
        (False, "iifname eth0 accept; ip daddr 10.244.1.10 drop;", ""),
        (False, "ip daddr 10.244.1.10 limit rate 1/second drop;", ""),
        (False, "ip daddr { 10.244.1.10, 10.244.1.12 } drop;", ""),
        (False, "tcp dport vmap { 3000 : drop };", ""),
        (False, "ip daddr 10.244.1.10 fib daddr type unicast accept; drop;", ""),
        (False, "meta mark 7 jump inner; drop;", "chain inner { accept; }"),
    ],
)
def test_what_a_chain_surely_drops(drops, rules, more):
    with own_network():
        text = BASE.format(hook="forward", policy="accept", rules=rules.removesuffix(";"), more=more)
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
        found = firewalls.dropped(firewalls.chains(), frozenset(), [ENDPOINT])
        assert firewalls.dropped(firewalls.chains(), frozenset({"t"}), [ENDPOINT]) == []
    assert found == [firewalls.Drop("table inet t", "c", "forward", *ENDPOINT[1:4:2])] * drops


@pytest.mark.parametrize(
    ("hook", "priority", "policy", "drops"),
    [
        ("forward", 0, "drop", True),
        ("output", 0, "drop", True),
        ("output", -150, "drop", False),  # there packets still go to the Service's address
        ("postrouting", -10, "drop", True),
        ("postrouting", 100, "drop", False),  # there they may have this node's address
        ("input", 0, "drop", False),
        ("forward", 0, "accept", False),
    ],
)
def test_where_a_policy_drops_what_was_translated(hook, priority, policy, drops):
    chain = f"chain c {{ type filter hook {hook} priority {priority}; policy {policy}; }}\n"
    with own_network():
        subprocess.run(["nft", "-f", "-"], input=f"table ip6 t {{\n{chain}}}\n", text=True, check=True)
        found = firewalls.dropped(firewalls.chains(), frozenset(), [ENDPOINT, ENDPOINT6])
    assert [(one.where, one.destination) for one in found] == [("table ip6 t", ENDPOINT6.destination)] * drops


@pytest.mark.parametrize(
    ("hook", "priority", "port", "drops"),
    [
        ("prerouting", -150, 30086, True),
        ("prerouting", -150, 3000, False),
        ("prerouting", -100, 30086, False),  # beside the translation nobody is sure which is first
        ("prerouting", 0, 30086, False),
        ("output", -150, 30086, False),  # this one comes in
        ("forward", -150, 30086, False),
        ("forward", -150, 3000, True),
    ],
)
def test_what_is_dropped_before_it_is_translated(hook, priority, port, drops):
    rules = f"chain c {{ type filter hook {hook} priority {priority}; tcp dport {port} drop; }}\n"
    front = Aim(ENDPOINT.source, bytes([10, 0, 0, 2]), 6, 30086)
    with own_network():
        subprocess.run(["nft", "-f", "-"], input=f"table inet t {{\n{rules}}}\n", text=True, check=True)
        found = firewalls.dropped(firewalls.chains(), frozenset(), [ENDPOINT], {"prerouting": front})
    aim = front if hook == "prerouting" else ENDPOINT
    assert found == [firewalls.Drop("table inet t", "c", hook, aim.destination, aim.port)] * drops


@pytest.mark.parametrize(("priority", "drops"), [(-300, False), (-150, True)])
def test_before_a_packet_is_tracked_its_state_is_not_known(priority, drops):
    rules = f"chain c {{ type filter hook prerouting priority {priority}; ct state new tcp dport 30086 drop; }}\n"
    front = Aim(ENDPOINT.source, bytes([10, 0, 0, 2]), 6, 30086)
    with own_network():
        subprocess.run(["nft", "-f", "-"], input=f"table inet t {{\n{rules}}}\n", text=True, check=True)
        found = firewalls.dropped(firewalls.chains(), frozenset(), [ENDPOINT], {"prerouting": front})
    assert bool(found) is drops


@pytest.mark.parametrize(
    ("drops", "rules"),
    [
        (True, ["-A FORWARD -d 10.244.1.0/24 -j DROP"]),
        (True, ["-A FORWARD -m comment --comment x -d 10.244.1.10 -j REJECT"]),
        (True, ["-N INNER", "-A FORWARD -j INNER", "-A INNER -s 10.0.0.1 -p tcp -j DROP"]),
        (True, ["-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A FORWARD -j DROP"]),
        (False, ["-A FORWARD -d 10.244.2.0/24 -j DROP"]),
        (False, ["-A FORWARD -m conntrack --ctstate NEW -j ACCEPT", "-A FORWARD -j DROP"]),
    ],
)
def test_what_rules_of_iptables_surely_drop(drops, rules):
    with own_network():
        for rule in rules:
            subprocess.run(["iptables-nft", *rule.split()], check=True)
        found = firewalls.dropped(firewalls.chains(), frozenset(), [ENDPOINT])
    assert found == [firewalls.Drop("table ip filter", "FORWARD", "forward", *ENDPOINT[1:4:2])] * drops


@pytest.mark.parametrize("hook", firewalls.HOOKS)
def test_hooks(hook):
    assert read(BASE.format(hook=hook, policy="drop", rules="", more="")).hook == hook


def test_firewalld_lets_translated_connections_pass():
    one = read(FIREWALLD)
    assert (one.where, one.closes, one.accepts) == ("table inet firewalld", True, True)


def test_chains_of_nat_filter_nothing_and_own_tables_are_left_out():
    with own_network():
        text = "table ip t {\nchain c { type nat hook prerouting priority -100; }\nchain d { }\n}\n"
        subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
        known = firewalls.chains()
        assert [(one.family, one.table, one.name, one.hook) for one in known] == [
            ("ip", "t", "c", ""),
            ("ip", "t", "d", ""),
        ]
        assert firewalls.filters(known, frozenset()) == []
        subprocess.run(["nft", "-f", "-"], input=FIREWALLD, text=True, check=True)
        assert firewalls.filters(firewalls.chains(), frozenset({"firewalld"})) == []


@pytest.mark.parametrize("variant", ["iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"])
def test_iptables_of_either_variant(variant):
    family = "ip6" if variant.startswith("ip6") else "ip"
    established = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]

    def forward() -> tuple[bool, bool, int]:
        every = [*firewalls.filters(firewalls.chains(), frozenset()), *firewalls.legacy_filters()]
        (one,) = [one for one in every if one.hook == "forward"]
        assert (one.family, one.chain) == (family, "FORWARD")
        return one.closes, one.accepts, one.drops

    def run(*words: str) -> None:
        subprocess.run([variant, *words], check=True, capture_output=True)

    with own_network():
        assert firewalls.legacy_filters() == []
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
        assert firewalls.iptables_chains(firewalls.chains()) == []
        assert firewalls.legacy_tables("ip") == []  # looking makes no table
        command = [f"iptables-{variant}-restore", "--noflush"]
        subprocess.run(command, input=go_rules(Family.IPV4), text=True, check=True, capture_output=True)
        known = firewalls.chains()
        chains = firewalls.iptables_chains(known)
        assert {(one.variant, one.family) for one in chains} == {(variant, Family.IPV4)}
        (trace,) = leftovers.chain_traces(one for one in chains if leftovers.is_ours(one.name))
        assert trace.what.endswith(f"chains KUBE-... of iptables-{variant}")
        assert leftovers.table_traces(Sight(known, chains), "kube-proxy") == []


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
