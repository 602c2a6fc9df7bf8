"""Sentences from the kernel's trace: the owner of a rule that dropped a packet, or the packet's other outcome."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kubeproxy.ask.kernel.journeys import DecidedFlow, Decision, Journey, KnownRules, journeys
from kubeproxy.ask.kernel.verdicts import FollowedFlow, Serving, TracedReply, Verdict
from kubeproxy.kernel.nftables.tables import Hook
from kubeproxy.kernel.nftables.trace import FORWARD, INPUT, OUTPUT, POSTROUTING, PREROUTING, Headers, Step
from kubeproxy.model.addresses import PROTOCOLS, pack, place_text

OWN = "kube-proxy-trace-1"
INET, IP = 1, 2
TCP, UDP = PROTOCOLS["TCP"], PROTOCOLS["UDP"]
CLIENT, VIP, POD = ("10.0.0.1", 40000), ("10.96.0.1", 80), ("10.244.0.1", 8080)
BASE = {
    (IP, OWN, "requests-prerouting"): Hook("filter", PREROUTING, -350),
    (IP, OWN, "answers-prerouting"): Hook("filter", PREROUTING, -190),
    (IP, "ours", "nat"): Hook("filter", PREROUTING, -100),
    (INET, "firewall", "forward"): Hook("filter", FORWARD, 0),
    (INET, "firewall", "input"): Hook("filter", INPUT, 0),
    (INET, "firewall", "raw"): Hook("filter", PREROUTING, -300),
    (INET, "firewall", "post"): Hook("nat", POSTROUTING, 90),
    (INET, "firewall", "pre"): Hook("nat", PREROUTING, -110),
    (IP, "ours", "out"): Hook("filter", POSTROUTING, 100),
    (IP, "ours", "output"): Hook("filter", OUTPUT, 0),
    (IP, "left", "nat"): Hook("filter", OUTPUT, -100),
}
RULES = KnownRules(
    {
        (INET, "firewall", "forward", 4): "tcp dport 8080 drop",
        (INET, "firewall", "raw", 7): "ip daddr 10.96.0.0/16 notrack",
        (INET, "firewall", "raw", 10): "[ ct key 17, sreg 1 ]",
        (INET, "firewall", "pre", 9): "dnat to 10.244.0.99:3000",
        (INET, "firewall", "post", 8): "snat to 192.0.2.9",
        (IP, "left", "sep", 4): "meta l4proto tcp dnat to 10.244.0.99:3000",
        (IP, "ours", "refuse", 9): "reject with tcp reset",
    },
    BASE,
    lambda table, chain: Decision(f"about {chain}", table == "left") if table in {"ours", "left"} else None,
)


def headers(source: tuple[str, int], to: tuple[str, int], came_by: int = 2, leaves_by: int = 0) -> Headers:
    return Headers(pack(source[0]) or b"", source[1], pack(to[0]) or b"", to[1], TCP, 2, came_by, leaves_by)


def marked(packet: int, chain: str = "requests-prerouting", source=CLIENT, to=VIP) -> list[Step]:
    return [
        Step(packet, IP, OWN, chain, 3, "rule", -1, "", headers(source, to)),
        Step(packet, IP, OWN, chain, 0, "policy", 1),
    ]


def picked(packet: int) -> list[Step]:
    return [
        Step(packet, IP, "ours", "nat", 1, "rule", -3, "pick", headers(CLIENT, VIP)),
        Step(packet, IP, "ours", "pick", 2, "rule", 1),
    ]


WEB = Serving("default/web", frozenset({"10.244.0.1:8080"}))
ENTRY = "-p tcp -s 10.0.0.1 --sport 40000 -d 10.96.0.1 --dport 80"


def told(
    *steps: list[Step],
    served=(),
    protocol: int = TCP,
    proxied=False,
    serving: Serving | None = None,
    silent="",
    rules=RULES,
):
    found = journeys([step for part in steps for step in part], rules, OWN)
    replies = [replace(TracedReply(*one), source=place_text(pack(CLIENT[0]) or b"", CLIENT[1])) for one in served]
    return found, FollowedFlow(found, replies, rules, protocol, proxied, serving, silent).verdict()


def dropped(packet: int) -> list[Step]:
    return [Step(packet, INET, "firewall", "forward", 4, "rule", 0, "", headers(CLIENT, POD))]


def test_nothing_came():
    assert told() == ([], FollowedFlow([], [], RULES, TCP).verdict())
    assert told()[1].passed is None


def test_another_programs_rule_is_named_and_the_way_to_it():
    # The kernel gives the packet another trace id after the translation of its destination.
    (journey,), made = told(marked(1), picked(1), dropped(2))
    assert (journey.direction, journey.source, journey.destination) == ("request", "10.0.0.1:40000", "10.96.0.1:80")
    assert [(met.hook, met.table, met.chain, met.destination, met.words, met.verdict) for met in journey.met] == [
        ("prerouting", "ip ours", "nat", "10.96.0.1:80", ("about nat", "about pick"), "accepted"),
        ("forward", "inet firewall", "forward", "10.244.0.1:8080", ('rule "tcp dport 8080 drop"',), "dropped"),
    ]
    assert made.passed is False
    assert made.text == (
        'the request was dropped by rule "tcp dport 8080 drop" of table inet firewall, chain forward, which is not ours'
    )


@pytest.mark.parametrize(("cause", "said"), [("", "there is no route to its destination, "), ("x is 0", "x is 0")])
def test_a_packet_that_is_not_routed_gets_the_cause_that_why_finds(cause, said):
    rules = RULES._replace(decided=DecidedFlow(lambda: cause))
    _, made = told(marked(1), picked(1), served=[("10.244.0.1:8080", False)], rules=rules)
    assert made.passed is False
    assert made.text.startswith(
        f"no rule dropped it, but it (for 10.244.0.1:8080) went no further than prerouting: {said}"
    )


BENT = [Step(1, INET, "firewall", "pre", 9, "rule", 1, "", headers(CLIENT, VIP))]


@pytest.mark.parametrize(
    ("steps", "more", "ends"),
    [
        ([], {}, " (for 10.244.0.1:8080 or 10.244.0.2:8080)"),
        (BENT, {}, ""),  # another program chose
        ([], {"legacy": 3}, ""),  # rules without a trace may have chosen
    ],
)
def test_a_packet_that_is_not_routed_was_for_one_of_the_endpoints(steps, more, ends):
    decided = DecidedFlow(lambda: "x is 0", ends="10.244.0.1:8080 or 10.244.0.2:8080")
    made = told(marked(1), steps or picked(1), rules=RULES._replace(decided=decided, **more))[1]
    assert f" dropped it, but it{ends} went no further than prerouting: x is 0" in made.text
    assert " for " not in told(marked(1), picked(1), proxied=True, rules=RULES._replace(decided=decided))[1].text


def test_this_nodes_own_icmp_error_gets_the_cause_that_why_finds():
    decided = DecidedFlow(lambda: "no table has a route. Fix: add it", ends="10.244.0.1:8080 or 10.244.0.2:8080")
    made = told(marked(1), picked(1), unreachable(), rules=RULES._replace(decided=decided))[1]
    said = (
        "this node could not reach 10.244.0.1:8080 or 10.244.0.2:8080 (host unreachable): no table has a route. Fix: "
    )
    assert (made.passed, said in made.text) == (False, True), made.text


OUT = [Step(1, IP, "ours", "out", 0, "policy", 1, "", headers(CLIENT, POD))]
UNTRACKED = [Step(1, INET, "firewall", "raw", 7, "rule", 1, "", headers(CLIENT, VIP))]


@pytest.mark.parametrize(
    ("steps", "passed", "more"),
    [
        ([], False, "; no rule dropped it, but it went no further than prerouting: "),
        (OUT, False, ""),
        ([Step(1, INET, "firewall", "input", 0, "policy", 1, "", headers(CLIENT, VIP))], None, "; it was delivered"),
    ],
)
def test_a_rule_that_takes_requests_out_of_connection_tracking_is_named(steps, passed, more):
    made = told(marked(1), UNTRACKED, steps, serving=WEB)[1]
    rule = (
        'rule "ip daddr 10.96.0.0/16 notrack" of table inet firewall, chain raw, which is not ours, takes the request'
    )
    assert made.passed is passed
    assert made.text.startswith(f"{rule} out of connection tracking")
    assert more in made.text
    assert ("no rule translates it to an endpoint of default/web" in made.text) is (passed is False)
    assert told(marked(1), UNTRACKED, steps)[1].passed is None
    assert told(marked(1), UNTRACKED, steps, dropped(1))[1].passed is False


def test_a_rule_that_gives_requests_another_source_is_named():
    rewritten = [Step(1, INET, "firewall", "post", 8, "rule", 1, "", headers(CLIENT, POD))]
    rules = RULES._replace(addresses=lambda: {"192.0.2.1"})
    silent = ("10.244.0.1:8080", False, False, "", False, "192.0.2.9")
    rule = '; rule "snat to 192.0.2.9" of table inet firewall, chain post, which is not ours,'
    named = f"{rule} gives it the source 192.0.2.9"
    made = told(marked(1), rewritten, served=[silent], rules=rules)[1]
    assert (made.passed, named in made.text, "kube-proxy why" in made.text) == (False, True, False)
    made = told(marked(1), rewritten, served=[("10.244.0.2:8080", True), silent], rules=rules)[1]
    assert (made.passed, f"10.244.0.1:8080 did not (1 connection){named}" in made.text) == (False, True)
    for client in (CLIENT[0], "192.0.2.1"):
        made = told(marked(1), rewritten, served=[(*silent[:-1], client)], rules=rules)[1]
        assert "gives it the source" not in made.text


def test_a_rule_that_puts_requests_into_a_zone_of_connection_tracking_is_named():
    zoned = [Step(1, INET, "firewall", "raw", 10, "rule", 1, "", headers(CLIENT, VIP))]
    named = (
        '; rule "[ ct key 17, sreg 1 ]" of table inet firewall, chain raw, which is not ours, puts it into a zone of '
    )
    for answered in ([], [("10.244.0.2:8080", True)]):
        made = told(marked(1), zoned, OUT, served=[*answered, ("10.244.0.1:8080", False)])[1]
        assert (made.passed, named in made.text, "kube-proxy why" in made.text) == (False, True, False)


def test_a_full_connection_table_is_the_cause_of_a_request_without_an_entry():
    rules = RULES._replace(without_room=lambda: "connection tracking is 100% full. Fix: x")
    for steps in (marked(1), [*marked(1), *OUT]):
        made = told(steps, rules=rules, silent="nothing answers ARP")[1]
        assert (made.passed, made.text) == (
            False,
            "no rule dropped it, but connection tracking is 100% full. Fix: x",
        )
    made = told(marked(1), OUT, served=[("10.244.0.1:8080", False)], rules=rules)[1]
    assert "full" not in made.text
    made = told(marked(1), OUT, marked(2, source=("10.0.0.1", 40001)), served=[("10.244.0.1:8080", True)], rules=rules)
    assert (
        "; 1 connection went no further than prerouting, as connection tracking is 100% full. Fix: x (" in made[1].text
    )


@pytest.mark.parametrize(("cause", "said"), [("", "there is no route to its destination, "), ("x is 0", "x is 0")])
def test_answers_that_are_not_routed_do_not_count_as_answers(cause, said):
    rules = RULES._replace(decided=DecidedFlow(lambda: cause))
    passing = Step(2, INET, "firewall", "forward", 0, "policy", 1, "", headers(CLIENT, POD))
    answer = marked(3, "answers-prerouting", POD, CLIENT)
    served = [("10.244.0.1:8080", True)]
    found, made = told(marked(1), picked(1), [passing], answer, served=served, rules=rules)
    assert made.passed is False
    assert made.text.startswith(
        f"no rule dropped it, but the answers of 10.244.0.1:8080 went no further than prerouting: {said}"
    )
    assert not FollowedFlow(found, [TracedReply(*served[0])], rules, TCP).departed(made)
    back = Step(4, INET, "firewall", "forward", 0, "policy", 1, "", headers(POD, CLIENT))
    assert told(marked(1), picked(1), [passing], answer, [back], served=served, rules=rules)[1].passed
    assert told(marked(1), picked(1), answer, served=served, rules=rules)[1].passed  # nothing shows forwarded packets


def test_a_refused_flow_that_the_proxy_does_not_translate_gets_the_reason_of_why():
    rules = RULES._replace(decided=DecidedFlow(unserved="a field is false"))
    refused = Step(2, IP, OWN, "answers-prerouting", 3, "rule", -1, "", headers(VIP, CLIENT)._replace(flags=0x14))
    _, made = told(marked(1), [refused], rules=rules)
    assert made.text.endswith(" rejects this client; no rule of the proxy translates it: a field is false")


def test_a_policy_is_named():
    policy = Step(1, INET, "firewall", "input", 0, "policy", 0, "", headers(CLIENT, VIP))
    assert told(marked(1), [policy])[1].text == (
        "the request was dropped by the policy of table inet firewall, chain input, which is not ours"
    )


def test_our_chains_are_reported_as_decisions():
    refused = [
        Step(1, IP, "ours", "output", 7, "rule", -3, "refuse", headers(CLIENT, VIP)),
        Step(1, IP, "ours", "refuse", 9, "rule", 0),
    ]
    assert told(marked(1), refused)[1].text == (
        'the request was refused by rule "reject with tcp reset" of table ip ours, chain refuse, which is ours: '
        "about refuse"
    )


GONE = ("10.244.0.99", 3000)


def chosen_by_others(to=POD) -> list[Step]:
    return [
        Step(1, IP, "left", "nat", 1, "rule", -3, "svc", headers(CLIENT, VIP)),
        Step(1, IP, "left", "svc", 2, "rule", -3, "sep"),
        Step(1, IP, "left", "sep", 3, "rule", 1),
        Step(1, IP, "ours", "out", 0, "policy", 1, "", headers(CLIENT, to)),
    ]


def test_a_destination_chosen_by_leftover_rules_is_reported():
    served = [("10.244.0.1:8080", True)]
    (journey,), made = told(marked(1), chosen_by_others(), served=served, proxied=True)
    assert journey.met[0].words == ("left by another kube-proxy: about nat", "about svc", "about sep")
    assert made.passed is True
    assert made.text == (
        "nothing here dropped it, and 10.244.0.1:8080 answered; rules that another kube-proxy left in table ip left "
        "chose 10.244.0.1:8080, not the running proxy: see that no other kube-proxy runs, then restart this one, "
        "which removes them"
    )
    assert told(marked(1), chosen_by_others()[:-1], served=served, proxied=True)[1] == made
    assert told(marked(1), chosen_by_others(), served=served, serving=WEB)[1] == made
    stray = told(marked(1), chosen_by_others(GONE), served=[("10.244.0.99:3000", True)], serving=WEB)[1]
    assert (stray.passed, "and it is no endpoint of default/web" in stray.text) == (False, True)
    unchanged = [("10.96.0.1:80", True)]
    assert "another kube-proxy" not in told(marked(1), chosen_by_others(VIP), served=unchanged)[1].text


def test_a_drop_by_leftover_rules_is_not_called_ours():
    refused = [Step(1, IP, "left", "nat", 7, "rule", 0, "", headers(CLIENT, VIP))]
    assert told(marked(1), refused)[1].text == (
        'the request was dropped by rule "handle 7" of table ip left, chain nat, left by another kube-proxy: about nat'
    )


def test_a_rule_without_text_is_named_by_its_handle():
    gone = Step(1, INET, "firewall", "input", 77, "rule", 0, "", headers(CLIENT, VIP))
    assert 'rule "handle 77"' in told(marked(1), [gone])[1].text


def test_the_reply_is_distinguished_from_the_request():
    back = marked(5, "answers-prerouting", POD, CLIENT)
    lost = [Step(5, INET, "firewall", "forward", 4, "rule", 0, "", headers(POD, CLIENT))]
    found, made = told(marked(1), picked(1), back, lost)
    assert [one.direction for one in found] == ["request", "answer"]
    assert made.text.startswith("the answer was dropped by rule")


def test_others_traces_are_left_out():
    other = [Step(9, INET, "firewall", "input", 4, "rule", 0, "", headers(("10.9.9.9", 1), VIP, came_by=7))]
    found, made = told(other, marked(1))
    assert len(found) == 1
    assert made.passed is not None


def test_the_answering_endpoint_is_reported():
    made = told(marked(1), picked(1), served=[("10.244.0.1:8080", True)])[1]
    assert (made.text, made.passed) == ("nothing here dropped it, and 10.244.0.1:8080 answered", True)
    several = [("10.244.0.1:8080", True), ("10.244.0.2:8080", True), ("10.244.0.1:8080", True)]
    text = told(marked(1), picked(1), served=several)[1].text
    assert text == "nothing here dropped it, and 10.244.0.1:8080, 10.244.0.2:8080 answered"
    made = told(marked(1), served=[("192.168.0.1:33000", True)], proxied=True)[1]
    assert (made.text.startswith("nothing here dropped it, and the proxy answered"), made.passed) == (True, True)


SHOWS = "(`kube-proxy why` tests whether this node stops the answers; if not, the endpoint or the network does)"


def test_a_flow_with_connections_without_an_answer_did_not_pass():
    good, silent = ("10.244.0.1:8080", True), ("10.244.0.2:8080", False)
    established = ("10.244.0.3:8080", False, True)  # the client may have sent packets that need no answer
    made = told(marked(1), OUT, served=[established, good, good, silent, silent])[1]
    answered = "nothing here dropped it, and 10.244.0.1:8080 answered"
    assert (made.text, made.passed) == (f"{answered}; 10.244.0.2:8080 did not (2 connections) {SHOWS}", False)
    assert told(marked(1), OUT, served=[silent, good], protocol=UDP)[1].passed is None
    made = told(marked(1), OUT, served=[good, silent], silent="nothing answers ARP for 10.244.0.2")[1]
    assert made.text == f"{answered}; 10.244.0.2:8080 did not (1 connection): nothing answers ARP for 10.244.0.2"
    assert told(marked(1), OUT, served=[established, good])[1] == Verdict(answered, passed=True)


def test_a_refused_connection_among_answered_ones_did_not_pass():
    other = ("10.244.0.2", 8080)
    reset = [Step(5, IP, OWN, "answers-prerouting", 3, "rule", -1, "", headers(other, CLIENT)._replace(flags=0x14))]
    back = marked(6, "answers-prerouting", POD, CLIENT)
    made = told(marked(1), OUT, back, reset, served=[("10.244.0.1:8080", True)])[1]  # a refusal deletes its entry
    assert made.passed is False
    assert made.text.endswith("10.244.0.1:8080 answered; 10.244.0.2:8080 refused it with a reset (1 connection)")


def test_a_connection_without_an_entry_that_ends_before_the_routing_did_not_pass():
    later = marked(2, source=("10.0.0.1", 40001))
    made = told(marked(1), OUT, later, served=[("10.244.0.1:8080", True)])[1]
    assert (made.passed, "answered; 1 connection went no further than prerouting" in made.text) == (False, True)


def test_packets_that_come_too_late_for_an_answer_are_left_out():
    steps = [*marked(1), *picked(1), *marked(2, source=("10.0.0.1", 40001))]
    assert [one.source for one in journeys(steps, RULES, OWN, {2})] == ["10.0.0.1:40000"]


def test_refusals_beyond_this_node():
    reset = [Step(5, IP, OWN, "answers-prerouting", 3, "rule", -1, "", headers(POD, CLIENT)._replace(flags=0x14))]
    found, made = told(marked(1), picked(1), reset, served=[("10.244.0.1:8080", True)])
    assert (found[1].refusal, made.passed) == ("reset", False)
    assert made.text.endswith(
        "10.244.0.1:8080 refused it with a reset: nothing listens there, or a firewall on its way or in its pod "
        "rejects this client"
    )
    own = [reset[0]._replace(chain="answers-output", headers=headers(POD, CLIENT, came_by=0)._replace(flags=0x14))]
    assert told(marked(1), own)[1].text.endswith("10.244.0.1:8080 refused it with a reset: nothing listens there")
    icmp = headers(("10.9.9.9", 0), (CLIENT[0], 0))._replace(protocol=1)
    icmp = icmp._replace(flags=0x0301)
    back = [Step(5, IP, OWN, "answers-prerouting", 3, "rule", -1, "", icmp)]
    (_, answer), made = told(marked(1), back, served=[("10.244.0.1:80", False)])
    assert (answer.reason, answer.local) == ("host unreachable", False)
    assert made.text == (
        "nothing here dropped it, and 10.9.9.9 answered for 10.244.0.1:80 with an ICMP error (host unreachable)"
    )


def unreachable() -> list[Step]:
    """The node itself sent this ICMP error: no interface received it."""
    icmp = headers(("10.244.0.1", 0), (CLIENT[0], 0), came_by=0, leaves_by=2)._replace(protocol=1, flags=0x0301)
    return [Step(5, IP, OWN, "answers-output", 3, "rule", -1, "", icmp)]


def test_this_nodes_own_icmp_error_means_that_it_could_not_reach_the_endpoint():
    made = told(marked(1), unreachable(), served=[("10.244.0.1:80", False)])[1]
    assert (made.text, made.passed) == (
        "nothing here dropped it, but this node could not reach 10.244.0.1:80 (host unreachable)",
        False,
    )


@pytest.mark.parametrize(("protocol", "flags"), [(1, 0x0501), (58, 0x8900)])
def test_a_redirect_is_no_answer(protocol, flags):
    redirect = [unreachable()[0]._replace(headers=unreachable()[0].headers._replace(protocol=protocol, flags=flags))]
    found, made = told(marked(1), redirect, served=[("10.244.0.1:80", True)])
    assert ([one.direction for one in found], made.passed) == (["request"], True)


def test_an_unreachable_destination_of_leftover_rules_is_reported_as_their_choice():
    served = [("10.244.0.99:3000", False)]
    made = told(marked(1), chosen_by_others(GONE), unreachable(), served=served, serving=WEB)[1]
    assert (made.text, made.passed) == (
        (
            "rules that another kube-proxy left in table ip left chose 10.244.0.99:3000, not the running proxy, and it "
            "is no endpoint of default/web; nothing here dropped it, but this node could not reach 10.244.0.99:3000 "
            "(host unreachable): see that no other kube-proxy runs, then restart this one, which removes them"
        ),
        False,
    )


def test_a_destination_without_a_route_is_that_of_the_leftover_rule():
    steps = [*chosen_by_others()[:2], Step(1, IP, "left", "sep", 4, "rule", 1)]
    (journey, _), made = told(marked(1), steps, unreachable(), serving=WEB)
    assert journey.met[0].words[-1] == 'rule "meta l4proto tcp dnat to 10.244.0.99:3000"'
    assert made.text.startswith(
        "rules that another kube-proxy left in table ip left chose 10.244.0.99:3000, not the running proxy, and it is "
        "no endpoint of default/web; nothing here dropped it, but this node could not reach 10.244.0.99:3000 "
        "(host unreachable): "
    )


def test_an_answer_before_the_trace_is_not_one_during_it():
    for protocol in (TCP, UDP):
        made = told(marked(1), OUT, served=[("10.244.0.1:8080", False, True)], protocol=protocol, serving=WEB)[1]
        assert (made.text, made.passed) == (
            (
                "nothing here dropped it: it left this node, and no answer of 10.244.0.1:8080 came during the trace; "
                "the connection was answered earlier"
            ),
            False,
        )


def test_a_connection_to_an_address_that_is_no_endpoint_is_reported_with_its_removal():
    stale = ("10.244.0.99:3000", False, True, ENTRY, True)
    made = told(marked(1), OUT, served=[stale], serving=WEB, protocol=UDP)[1]
    assert made.passed is False
    assert made.text.endswith(
        "answered earlier; 10.244.0.99:3000 is no endpoint of default/web, and its entry in connection tracking, older "
        "than the trace, keeps the flow there: this removes the entry, so that the next packet gets an endpoint: "
        f"`conntrack -D {ENTRY}`"
    )
    assert "conntrack" not in told(marked(1), OUT, served=[stale])[1].text  # without a proxy no Service is known
    unanswered = (stale[0], False, False, ENTRY, True)
    assert "conntrack -D" in told(marked(1), unreachable(), served=[unanswered], serving=WEB)[1].text


@pytest.mark.parametrize("reply", [(True, True), (False, True), (True, False)])
def test_an_entry_of_an_established_connection_is_not_to_be_removed(reply):
    stale = ("10.244.0.99:3000", *reply, ENTRY, True)
    made = told(marked(1), OUT, served=[stale], serving=WEB)[1]
    assert made.passed is reply[0]
    assert "conntrack -D" not in made.text
    assert made.text.endswith(
        "keeps the flow there: an established connection continues as long as this address answers, and new "
        "connections get an endpoint: the client chooses again if it closes this one"
    )


@pytest.mark.parametrize("answered", [True, False])
def test_no_older_entry_is_the_reason_for_the_choice_of_a_new_connection(answered):
    new = ("10.244.0.99:3000", answered, False, ENTRY, False)
    made = told(marked(1), OUT, served=[new], serving=WEB)[1]
    assert (made.passed, "its entry" in made.text, "conntrack" in made.text) == (False, False, False)
    assert made.text.endswith(
        "; 10.244.0.99:3000 is no endpoint of default/web, and rules of this node chose it for this new connection"
    )
    made = told(marked(1), OUT, served=[new], serving=WEB, rules=RULES._replace(untraced=lambda: "left: restart"))[1]
    assert made.text.endswith("for this new connection; the kernel does not trace iptables-legacy: left: restart")
    chosen = [Step(1, INET, "firewall", "pre", 9, "rule", 1, "", headers(CLIENT, VIP))]
    made = told(marked(1), chosen, OUT, served=[new, ("10.244.0.1:8080", True)], serving=WEB)[1]
    rule = 'rule "dnat to 10.244.0.99:3000" of table inet firewall, chain pre, which is not ours,'
    assert (made.passed, f"and {rule} chose it for this new connection" in made.text) == (False, True)


@pytest.mark.parametrize(("cause", "named"), [("", "`kube-proxy verify`"), ("the kernel refuses it", "the kernel ref")])
def test_a_connection_that_no_rule_translates_is_not_ascribed_to_a_rule(cause, named):
    rules = RULES._replace(decided=DecidedFlow(untranslated=lambda: cause))
    made = told(marked(1), OUT, served=[("10.96.0.1:80", False)], serving=WEB, rules=rules)[1]
    assert made.passed is False
    assert f"; no rule translated it to an endpoint of default/web: {named}" in made.text
    assert "chose it" not in made.text


def test_a_next_hop_without_an_answer_keeps_the_packet_on_this_node():
    silent = "nothing answers ARP for 10.244.0.77 (FAILED in `ip neighbour`)"
    for served in ([("10.244.0.77:3000", False)], []):
        made = told(marked(1), OUT, served=served, silent=silent)[1]
        assert (made.passed, made.text) == (
            False,
            f"nothing here dropped it, but it did not leave this node: {silent}",
        )
    made = told(marked(1), unreachable(), served=[("10.244.0.77:3000", False)], silent=silent)[1]
    assert made.text.endswith(f"could not reach 10.244.0.77:3000 (host unreachable); {silent}")
    made = told(marked(1), OUT, served=[("10.244.0.77:3000", True)], silent=silent)[1]
    assert (made.passed, "ARP" in made.text) == (True, False)


def test_a_packet_that_ends_after_prerouting_has_no_route():
    made = told(marked(1), picked(1), served=[("10.244.0.1:8080", False)])[1]
    assert (made.passed, "no route" in made.text, "bridge" in made.text) == (False, True, True)


def test_a_rule_of_iptables_legacy_may_have_dropped_an_unanswered_packet():
    rules = RULES._replace(legacy=1)
    listed = " (`iptables-legacy-save`, "
    out = [Step(1, IP, "ours", "out", 0, "policy", 1, "", headers(CLIENT, POD))]
    for steps, guess in ((picked(1), "a rule of iptables-legacy dropped it"), (out, "legacy may have dropped it")):
        made = told(marked(1), steps, served=[("10.244.0.1:8080", False)], rules=rules)[1]
        assert made.passed is False
        assert made.text.startswith("no rule that the kernel traces dropped it")
        assert f"{guess}{listed}" in made.text
    stray = told(marked(1), out, served=[("10.244.0.99:3000", False)], serving=WEB, rules=rules)[1]
    assert "chose it for this new connection" in stray.text
    assert "may have dropped it" not in stray.text


def test_the_text_of_a_rule_that_drops_a_packet_causes_no_guess():
    texts = {**RULES.texts, (INET, "firewall", "forward", 4): 'drop comment "connection tracking saw no answer"'}
    made = told(marked(1), picked(1), dropped(2), rules=RULES._replace(texts=texts, legacy=1))[1]
    assert (made.passed, "may have dropped it" in made.text) == (False, False)


def test_leftover_rules_that_a_packet_passed_last_may_have_chosen_its_destination():
    by_map = [*chosen_by_others()[:2], Step(1, IP, "left", "sep", 3, "rule", 1)]  # the rule's text has no destination
    made = told(marked(1), by_map, unreachable(), serving=WEB)[1]
    assert made.passed is False
    assert "; its last rules are those that another kube-proxy left in table ip left: see that no other" in made.text


def test_rules_that_the_kernel_does_not_trace_may_have_refused_or_redirected_it():
    legacy = RULES._replace(legacy=5, untraced=lambda: "left by another kube-proxy: 3 chains")
    made = told(marked(1), unreachable(), rules=legacy)[1]
    assert made.passed is False
    assert made.text.startswith("no rule that the kernel traces dropped it, but this node could not reach")
    assert ", or a rule of iptables-legacy rejected it" in made.text
    assert made.text.endswith("; the kernel does not trace iptables-legacy: left by another kube-proxy: 3 chains")


def test_a_packet_that_left_without_an_answer():
    out = [Step(1, IP, "ours", "out", 0, "policy", 1, "", headers(CLIENT, POD))]
    made = told(marked(1), picked(1), out, served=[("10.244.0.1:8080", False)])[1]
    assert (made.passed, made.text) == (
        False,
        (
            "nothing here dropped it: it left this node, and connection tracking saw no answer of 10.244.0.1:8080 "
            f"{SHOWS}"
        ),
    )
    assert told(marked(1), out, served=[("10.244.0.1:8080", False)], protocol=UDP)[1].passed is None
    request = Journey("request", "", "10.0.0.1:1", "10.96.0.1:80", (), "", "postrouting")
    ways = [replace(request, leaves=one) for one in ("eth0", "cbr0")]
    made = FollowedFlow(ways, [TracedReply("10.244.0.1:8080", answered=False)], RULES, TCP).verdict()
    assert made.text.startswith("nothing here dropped it: it left by eth0 or cbr0, and connection tracking saw no ")
    assert told(marked(1), out)[1].passed is None


@pytest.mark.parametrize(
    ("last", "refusal", "local", "lost", "silent", "left"),
    [
        ("postrouting", "", False, "", "", True),
        ("forward", "", False, "", "", True),
        ("postrouting", "reset", False, "", "", True),  # the endpoint's node may have refused it
        ("input", "", False, "", "", False),
        ("prerouting", "", False, "", "", False),
        ("postrouting", "ICMP error", True, "", "", False),
        ("postrouting", "", False, "dropped", "", False),
        ("postrouting", "", False, "", "nothing answers ARP", False),
    ],
)
def test_a_request_without_an_answer_left_unless_it_ended_here(last, refusal, local, lost, silent, left):
    request = Journey("request", "", "10.0.0.1:1", "10.96.0.1:80", (), lost, last)
    answer = Journey("answer", refusal, "10.244.0.1:8080", "10.0.0.1:1", (), "", "prerouting", local=local)
    found = [request, answer] if refusal else [request]
    reply = TracedReply("10.244.0.1:8080", answered=False)
    flow = FollowedFlow(found, [reply], RULES, TCP, silent=silent)
    assert flow.departed(Verdict("", passed=False)) is left
    assert not flow.departed(Verdict("", passed=True))
    assert not flow._replace(served=[]).departed(Verdict("", None))
