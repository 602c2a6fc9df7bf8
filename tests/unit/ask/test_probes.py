"""Findings about probes that prove nothing about a connection, and about routes that drop its first packets."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace

import pytest

from kubeproxy.ask.checks import routes
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.connection import _retried
from kubeproxy.ask.explanation import Explanation
from kubeproxy.ask.finding import PICKED_AGAIN, Effect, Harm, Probe
from kubeproxy.ask.kernel import present
from kubeproxy.ask.kernel.present import OwnCause, ProbedFor
from kubeproxy.ask.why import Target, Why
from kubeproxy.backends.nftables import MODE
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.routing_policy import RoutedPacket
from kubeproxy.meaning.firewall import Marking, PassingPacket, SourceTranslation
from kubeproxy.model.answer import Packet

FRONT, CLIENT, END = b"\n\x60\0\1", b"\n\xf4\0\7", b"\n\xf4\1\7"
HOLE = "10.244.1.7:3000"


def explanation(probes: tuple[Probe, ...], connection: ProbedFor) -> Explanation:
    ends = tuple(Target(one.address, 1 / len(probes), masqueraded=False) for one in probes)
    why = Why(source="a", destination="b", outcome="forwarded", client_sees="", endpoints=ends)
    return Explanation(why, tuple(present.findings(probes, connection)), probes)


@pytest.mark.parametrize(("again", "effect"), [(True, Effect.DELAYS), (False, Effect.LOSES)])
def test_a_route_that_drops_first_packets_has_the_effect_of_a_chain_that_drops_them(again, effect, monkeypatch):
    monkeypatch.setattr(routes, "refusal", lambda packet: errno.EINVAL * (packet.destination == END))
    monkeypatch.setattr(routes, "routing_tables", lambda _: SimpleNamespace(refusing=lambda _: "a blackhole"))
    monkeypatch.setattr(routes, "marks", set)
    ends = frozenset({(END, 3000), (CLIENT, 3000)})
    node = CheckedNode(
        None,
        0,
        MODE,
        KubeProxyConfiguration(),
        packet=Packet(CLIENT, FRONT, 6, 80),
        targets=ends,
        picked_again=ends if again else frozenset(),
        routed=[RoutedPacket(CLIENT, END, "cbr0", 0, 6, 3000)],
    )
    (found,) = routes.refused(node)
    assert found.harm == Harm(effect, frozenset({(END, 3000)}))
    assert (found.why == PICKED_AGAIN) is again


def test_equal_findings_on_sources_and_marks_are_one_line(monkeypatch):
    monkeypatch.setattr(routes, "local_addresses", lambda _: [])
    ends = [(bytes((10, 244, 1, end)), 3000) for end in range(1, 5)]
    leaving = [
        PassingPacket("postrouting", 0, 1, CLIENT, *(end[0], 6, end[1]), (FRONT, 80), ("", ""), translated=True)
        for end in ends
    ]
    node = CheckedNode(
        *(None, 0, MODE, KubeProxyConfiguration()),
        packet=Packet(CLIENT, FRONT, 6, 80),
        targets=frozenset(ends),
        ends=[CLIENT],
        passing=leaving,
        rules=SimpleNamespace(others=lambda _: [firewall]),
    )
    alone = frozenset({b"\xc0\0\2\1"})
    firewall = SimpleNamespace(
        sources=lambda found: [SourceTranslation("table ip x", "c", one, alone, sure=True) for one in found],
        marking=lambda found: [Marking("table ip x", "c", one, frozenset({0x4000}), sure=True) for one in found],
    )
    (moved,), (marked,) = routes.moved_sources(node), routes.remarked(node)
    shown = "packets to 10.244.1.1:3000, 10.244.1.2:3000 and 2 more"
    assert moved.what.startswith(f"table ip x, chain c: gives {shown} the source 192.0.2.1")
    assert marked.what == f"table ip x, chain c: sets the proxy's mark 0x4000 in {shown} at the hook postrouting"


@pytest.mark.parametrize(("routed", "answer"), [(True, "yes"), (False, "no")])
def test_a_blackhole_of_this_nodes_probes_is_a_note_where_the_routes_are_checked(routed, answer):
    told = explanation((Probe(HOLE, "TCP", 0.0, "its route is a blackhole"),), ProbedFor(routed=routed))
    assert (told.answer, told.findings[-1].severity.mark) == (answer, "-" if routed else "x")


ANSWERS, SILENT, REFUSES = (
    [Probe(f"10.244.{third}.{end}:80", "TCP", 0.1, problem, refused=problem == "refused") for end in range(1, 5)]
    for third, problem in enumerate(("", "no answer within 1 s", "refused"))
)


@pytest.mark.parametrize(
    ("probes", "answer", "heading"),
    [
        ([*ANSWERS[:1], *SILENT[:3], *REFUSES], "yes", ""),
        ([*ANSWERS, *SILENT], "no", ", but 50.0% of the connections do not get through: TCP from this node to 10"),
        ([*SILENT[:1], *REFUSES[:1]], "no", ""),
    ],
)
def test_a_proxy_that_connects_itself_tries_four_endpoints_that_do_not_answer(probes, answer, heading):
    told = _retried(explanation(tuple(probes), ProbedFor()))
    assert told.answer == answer
    assert heading in told.heading
    lines = [one.text for one in told.findings if one.severity.mark == "-"]
    assert all(line.endswith("another endpoint, after 0.25 s if this one does not answer") for line in lines)
    assert len(lines) == (sum(one.failed for one in probes) if answer == "yes" else 0)


def test_the_fix_of_endpoints_that_refuse_this_node_names_policies_too():
    refused = Probe(HOLE, "TCP", 0.0, "refused", refused=True)
    told = explanation((refused,), ProbedFor(is_node=False, own_address=[HOLE]))
    (fix,) = told.fixes
    assert fix.startswith(f"perhaps nothing listens on {HOLE}: is targetPort right")
    assert f"If it listens, connect from the client to {HOLE}: if that fails too, look at the NetworkPolicies" in fix


def test_refusals_that_prove_something_and_others_have_one_fix_with_each_endpoint_once():
    probes = tuple(Probe(f"10.244.1.{end}:80", "TCP", 0.0, "refused", refused=True) for end in (1, 2, 3))
    own = OwnCause("a rule may stop it", "trace it", sure=False)
    for stopped in ({}, {"10.244.1.3:80": own}):
        told = explanation(probes, ProbedFor(is_node=False, own_address=["10.244.1.2:80"], stopped=stopped))
        sure = "10.244.1.1:80" if stopped else "10.244.1.1:80, 10.244.1.3:80"
        fix, *rest = told.fixes
        assert fix.startswith(f"nothing listens on {sure} and perhaps nothing listens on 10.244.1.2:80: is targetPort")
        assert "let it pass. If it listens, connect from the client to 10.244.1.2:80: if that fails too" in fix
        assert [one.partition(": ")[0] for one in rest] == (
            ["trace it; if none does, nothing listens on 10.244.1.3:80"] if stopped else []
        )


def test_an_endpoint_that_drops_may_drop_packets_of_all_clients_and_has_a_fix():
    answered, silent = Probe("10.244.1.8:3000", "TCP", 0.001), Probe(HOLE, "TCP", 1.0, "no answer within 1 s")
    told = explanation((answered, silent), ProbedFor(is_node=False, own_address=[HOLE]))
    assert "drops packets of this node, and perhaps of the client: the endpoint sees the" in told.findings[-1].why
    assert "alone" not in told.findings[-1].text
    (fix,) = told.fixes
    assert fix.startswith(f"connect from the client to {HOLE}: if that fails too, look at the route to it (`ip route")
    assert "at the NetworkPolicies that select the pod" in fix
    assert "at the rules in its network namespace (`nft list ruleset`, `iptables-save`)" in fix


def test_a_datagram_without_a_reply_proves_nothing():
    quiet, answered = Probe(HOLE, "UDP", 0.2, unanswered=True), Probe("10.244.1.8:3000", "UDP", 0.001)
    told = explanation((quiet, answered), ProbedFor())
    assert [f"{one.severity.mark} {one.what}" for one in told.findings] == [
        "ok UDP from this node: 10.244.1.8:3000 1.0 ms",
        f"- UDP from this node: no reply, nothing refused it: {HOLE}",
    ]
    assert (told.answer, told.fixes) == ("yes", [])


def test_a_socket_that_does_not_reply_is_unanswered():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        (probe,) = present.all_of([Target(f"127.0.0.1:{silent.getsockname()[1]}", 1.0, masqueraded=False)], 17)
    assert (probe.unanswered, probe.failed) == (True, False)
