"""The whole answer of `why`: its findings, its fixes, and the verdict yes, no or unknown."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask import connection
from kubeproxy.ask.checks import contact, greeting, routes, settings, strangers, whereabouts
from kubeproxy.ask.checks import node as node_checks
from kubeproxy.ask.checks.checkup import Checkup
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.connection import _around as around
from kubeproxy.ask.connection import tell
from kubeproxy.ask.explanation import Explanation
from kubeproxy.ask.finding import MISLEADS, NOTHING, PICKED_AGAIN, STOPS, Diagnosis, Effect, Harm, Probe, Severity
from kubeproxy.ask.kernel import present
from kubeproxy.ask.kernel.present import OwnCause, ProbedFor
from kubeproxy.ask.question import Elsewhere
from kubeproxy.ask.why import Explained, Target, Why
from kubeproxy.backends.mode import FlowsEnd, Trace
from kubeproxy.backends.nftables import MODE
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import SourceError
from kubeproxy.kernel.conntrack.tracked import Tracked, target_of
from kubeproxy.kernel.route import Address, Bridge, hairpin_ports
from kubeproxy.kernel.routing_policy import RoutedPacket
from kubeproxy.meaning.firewall import Drop, Filter, ForeignTranslation, PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from kubeproxy.model.addresses import PROTOCOLS, Family
from kubeproxy.model.answer import AnswerStep, Packet
from kubeproxy.model.plan import Detector, FamilyGlobals, Globals, Loopback
from support.cluster_objects import service, world
from support.snapshots import planner_of


def why(outcome="forwarded", elsewhere=None):
    return Why(source="10.0.0.1", destination="10.96.0.1:80/tcp", outcome=outcome, client_sees="", elsewhere=elsewhere)


def gone(seconds):
    watched = WatchStanding(resource="services", synced=True, connected=False, stale=seconds)
    return contact.outdated(Reach(server="https://h", trouble="h: refused", watched=(watched,), certificates={}))


def firewall(*, drops_all):
    return strangers.firewalls(
        [Filter("table inet fw", "inet", "guard", "forward", drops_all, False, 1)], FlowsEnd.ENDPOINTS, False
    )


ANSWERS = ("yes", "no", "unknown")
PROBED = (Probe("10.0.0.2:80", "TCP", 0.1), Probe("10.0.0.3:80", "TCP", 0.1, "refused", True))
PACKETS = [
    PassingPacket("forward", -1, 1, b"\n\0\0\1", bytes([10, 244, 1, end]), 6, 3000, (b"\n\x60\0\1", 80), ("", ""), True)
    for end in (10, 11)
]
DROPS = [Drop("table inet fw", "guard", packet) for packet in PACKETS]
REFUSED = PROBED[1].address
KEEPS_ADDRESS = ProbedFor(is_node=False, own_address=[REFUSED])
OUTPUT = OwnCause(
    "table inet fw, chain out drops packets of this node's own at the hook output",
    "let table inet fw out accept them",
)
ANSWERED = [
    one._replace(packet=one.packet._replace(source=one.packet.destination, purpose=CompiledFor.ANSWER)) for one in DROPS
]
FORWARDING = [settings.forwarding(Family.IPV4, STOPS)]
STALE = list(strangers.left_over([Trace("40 chains KUBE-... of iptables-nft", Family.IPV4)], "nftables"))


@pytest.mark.parametrize(
    ("findings", "status", "line"),
    [
        ((), 0, None),
        (FORWARDING, 1, "net.ipv4.ip_forward is 0: the packets of this"),
        (STALE, 1, "left by another kube-proxy: 40 chains KUBE-... of iptables-nft: connections may still be sent"),
        (firewall(drops_all=True), 1, "table inet fw, chain guard: drops all new connections at the hook forward"),
        (firewall(drops_all=False), 0, "table inet fw may drop packets too: guard at forward: "),
        (
            strangers.dropping(DROPS),
            1,
            "table inet fw, chain guard: drops what goes to 10.244.1.10:3000, 10.244.1.11:3000 at the hook forward",
        ),
        (
            strangers.dropping(ANSWERED),
            1,
            "table inet fw, chain guard: drops the answers of 10.244.1.10:3000, 10.244.1.11:3000 at the hook forward",
        ),
        (
            settings.filled(settings.tracked(99, 100), "conntrack"),
            1,
            "connection tracking is 99% full: 99 of 100: when the table is full",
        ),
        (
            settings.filled(settings.tracked(100, 100), "conntrack"),
            1,
            "connection tracking is 100% full: 100 of 100: when the table is full",
        ),
        (settings.filled(settings.tracked(85, 100), "conntrack"), 0, "connection tracking is 85% full"),
        (gone(480), 1, "the API server cannot be reached at h: refused: traffic uses the state known 8 minutes ago"),
        (gone(15), 0, None),
    ],
)
def test_other_causes_on_the_node_are_reported_and_change_the_exit_code(findings, status, line):
    told = Explanation(why(), tuple(around(Checkup(list(findings), []))))
    lines = [one.text for one in told.findings]
    assert [one.startswith(line or "") for one in lines] == [True] * (line is not None)
    assert told.answer == ANSWERS[status]
    assert bool(told.fixes) == bool(status)
    cause = next((one.what for one in told.findings if one.is_wrong), "")
    wrong = ", unless another kube-proxy's rules take it first (x)"
    wrong = wrong if findings is STALE else f", but not all is well: {cause} (x)"
    may = "; table inet fw may drop packets too: guard at forward (-)"
    whole = "kube-proxy forwards it" + wrong * bool(status) + may * (line is not None and "may drop" in line)
    stop = next((one.what for one in told.findings if one.harm == STOPS), "")
    stops = "ip_forward is 0", "drops all new", "drops what goes", "drops the answers", "100% full"
    assert bool(stop) is any(one in str(line) for one in stops)
    assert told.heading.endswith(f": it does not get through: {stop} (x)" if stop else whole)
    assert told.fields()["answer"] == told.answer


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (Explanation(why("dropped")), 1),
        (Explanation(why("answered by the proxy")), 0),
        (Explanation(why(), findings=(Diagnosis(Severity.BROKEN, "kernel", "missing", harm=MISLEADS),)), 1),
        (Explanation(why(), tuple(present.findings(PROBED, ProbedFor())), PROBED), 1),
        (Explanation(why(), tuple(present.findings(PROBED, KEEPS_ADDRESS)), PROBED), 2),
        (Explanation(why("dropped"), tuple(present.findings(PROBED, KEEPS_ADDRESS)), PROBED), 1),
        (Explanation(why(), tuple(around(Checkup([], ["rules: no right"])))), 0),
        (Explanation(why(elsewhere=Elsewhere("node-b", "it is", "nodeName"))), 2),
        (Explanation(why("dropped", Elsewhere("", "it is", "spec.podCIDRs"))), 2),
    ],
)
def test_the_answer(told, status):
    assert told.answer == ANSWERS[status]


@pytest.mark.parametrize(
    ("connection", "answer", "mark", "cause", "fixes"),
    [
        (
            KEEPS_ADDRESS,
            "unknown",
            "?",
            "nothing listens, or a NetworkPolicy or a firewall rejects packets of this node, and perhaps of the client",
            ("perhaps nothing listens on 10.0.0.3:80:", "connect from the client to 10.0.0.3:80: if that fails too"),
        ),
        (
            ProbedFor(is_node=False, own_address=[REFUSED], stopped={REFUSED: OUTPUT}),
            "yes",
            "-",
            "chain out drops packets of this node's own at the hook output; other checks cover the connection",
            (),
        ),
        (
            ProbedFor(stopped={REFUSED: OUTPUT}),
            "no",
            "x",
            "table inet fw, chain out drops packets of this node's own at the hook output",
            ("let table inet fw out accept them",),
        ),
        (
            ProbedFor(is_node=False),
            "no",
            "x",
            "",
            ("nothing listens on 10.0.0.3:80:", "Or a NetworkPolicy or a firewall rejects this node"),
        ),
    ],
)
def test_a_failed_probe_is_a_fault_only_of_this_nodes_connections(connection, answer, mark, cause, fixes):
    told = Explanation(why(), tuple(present.findings(PROBED, connection)), PROBED)
    failed = told.findings[-1]
    assert (told.answer, failed.severity.mark, cause in failed.why) == (answer, mark, True)
    assert len(told.fixes) == bool(fixes)
    assert all(fix in told.fixes[0] for fix in fixes)
    unsure = told.heading.endswith(", but 10.0.0.3:80 refused this node (?)")
    assert unsure is (answer == "unknown")


def test_an_endpoint_without_an_arp_answer_fails_for_every_client():
    silent = "no answer within 1 s, as nothing answers ARP for 10.0.0.3 (FAILED in `ip neighbour`)"
    probes = PROBED[0], Probe(REFUSED, "TCP", 1.0, silent, absent=True)
    ends = tuple(Target(one.address, 0.5, masqueraded=False) for one in PROBED)
    for asked, several, share in ((KEEPS_ADDRESS, probes, "50.0% of the connections"), (ProbedFor(), probes[1:], "")):
        told = Explanation(
            replace(why(), endpoints=ends[-len(several) :]), tuple(present.findings(several, asked)), several
        )
        assert (told.answer, told.findings[-1].severity.mark) == ("no", "x")
        assert (share or "it does not get through: TCP from this node to 10.0.0.3:80: no answer") in told.heading
        assert told.fixes == [told.findings[-1].fix]
        assert "does the pod run, and is its interface up?" in told.fixes[0]


@pytest.mark.parametrize(
    ("found", "is_all", "heading"),
    [
        ([], True, ": it does not get through: the rules do not lead there (x)"),
        ([], False, ": kube-proxy forwards it, but not all is well: the rules do not lead there (x)"),
        (["a chain"], True, ": kube-proxy forwards it, but not all is well: the rules do not lead there (x)"),
    ],
)
def test_a_difference_of_the_kernel_stops_a_connection_that_no_rule_translates(found, is_all, heading):
    lines = tuple(
        Diagnosis(Severity.BROKEN, "kernel", what, harm=MISLEADS) for what in ("the rules do not lead there", "x")
    )
    told = Explanation(why(), connection._untranslated(lines, found, is_all))
    assert told.heading.endswith(heading)
    assert [one.what for one in told.findings] == [one.what for one in lines]


@pytest.mark.parametrize(
    ("old", "said"),
    [((2, 3), ""), ((2, 9), "; its rules also lead to 10.0.0.9:80"), ((8, 9), "; its rules lead to 10.0.0.8:80 or 10")],
)
def test_a_difference_of_the_kernel_names_where_its_rules_lead(old, said):
    there = tuple((bytes((10, 0, 0, end)), 80) for end in old)
    found = ForeignTranslation("table ip kube-proxy", "c", PACKETS[0], there, sure=True, unordered=False)
    ends = {(bytes((10, 0, 0, end)), 80) for end in (2, 3)}
    (told,) = connection._untranslated((Diagnosis(Severity.BROKEN, "kernel", "different"),), [found], True, ends)
    assert told.what.startswith(f"different{said}")
    assert (told.what == "different") is not bool(said)


def test_endpoints_that_all_refuse_this_node_have_a_fix():
    connection = ProbedFor(is_node=False, own_address=[REFUSED])
    told = Explanation(why(), tuple(present.findings(PROBED[1:], connection)), PROBED[1:])
    assert told.heading.endswith(", but 10.0.0.3:80 refused this node (?)")
    assert (told.answer, "is targetPort right, and does the process listen on" in told.fixes[0]) == ("unknown", True)


def test_the_first_line_names_the_cause_of_lost_first_packets_and_outdated_objects():
    stale, delays = list(gone(480)), Harm(Effect.DELAYS, frozenset({(b"\n\0\0\3", 80)}))
    forwarding = settings.forwarding(Family.IPV6, delays)
    assert forwarding.why == PICKED_AGAIN
    assert (
        settings.forwarding(Family.IPV6, STOPS).why == "the packets of this connection are not forwarded: it times out"
    )
    (some,) = settings.entrances(Family.IPV4, ["eth0"], Severity.BROKEN, delays._replace(effect=Effect.LOSES))
    assert some.why == "packets of connections to 10.0.0.3:80 are not forwarded: they time out"
    ends = tuple(Target(f"10.0.0.{end}:80", 0.5, masqueraded=False) for end in (2, 3))
    told = Explanation(replace(why(), endpoints=ends), (*around(Checkup([*stale, forwarding], [])),))
    assert told.heading.endswith("kube-proxy forwards it, but not all is well: net.ipv6.conf.all.forwarding is 0 (x)")
    loses = Diagnosis(Severity.BROKEN, "firewall", "it drops", harm=delays._replace(effect=Effect.LOSES))
    told = Explanation(replace(why(), endpoints=ends), (forwarding, loses))
    assert told.heading.endswith(", but 50.0% of the connections do not get through: it drops (x)")
    doubt = Diagnosis(Severity.UNKNOWN, "endpoints", "no answer")
    told = Explanation(replace(why(), endpoints=ends), (loses, doubt))
    assert told.heading.endswith(", but at least 50.0% of the connections do not get through: it drops (x)")
    told = Explanation(why(), (*around(Checkup([*gone(30)], [])),))
    aged = "; the objects may be old: the API server cannot be reached at h: refused (-)"
    assert (told.answer, told.fixes, told.heading.endswith(f"kube-proxy forwards it{aged}")) == ("yes", [], True)
    outdated = "the API server cannot be reached at h: refused"
    told = Explanation(replace(why(), endpoints=ends), (*around(Checkup(stale, [])), loses))
    half = ", but 50.0% of the connections do not get through: it drops (x)"
    assert told.heading.endswith(f"{half}, but the objects may be outdated: {outdated} (x)")
    every = replace(loses, harm=Harm(Effect.LOSES, frozenset({(b"\n\0\0\2", 80), (b"\n\0\0\3", 80)})))
    told = Explanation(replace(why(), endpoints=ends), (*around(Checkup(stale, [])), every))
    lost = f"it does not get through: it drops (x), and the objects may be outdated: {outdated} (x)"
    assert told.heading.endswith(lost)
    told = Explanation(why("refused"), tuple(around(Checkup(stale, []))))
    assert told.heading.endswith(f"the client sees , but the objects may be outdated: {outdated} (x)")


@pytest.mark.parametrize(
    ("outcome", "decision", "planned"),
    [
        ("refused", "refused", "with a kube-proxy it would be refused"),
        ("not ours", "kube-proxy does not handle it", "kube-proxy does not handle it"),
    ],
)
def test_the_first_line_of_a_refused_connection_has_the_reason(outcome, decision, planned):
    steps = AnswerStep(True, "it is the cluster IP"), AnswerStep(False, "no endpoint takes new connections")
    told = Explanation(replace(why(outcome), steps=steps, client_sees="a reset"))
    cause = ", the client sees a reset: no endpoint takes new connections (x)"
    assert told.heading.endswith(f": {decision}{cause}")
    stopped = replace(told, findings=(Diagnosis(Severity.UNKNOWN, "proxy", "no kube-proxy runs here"),))
    assert f": {planned}{cause}" in stopped.heading


@pytest.mark.parametrize("outcome", ["dropped", "refused", "not ours"])
def test_the_first_line_has_the_rules_of_a_proxy_that_hangs_if_the_service_is_gone(outcome):
    now = "while the proxy hangs, table ip kube-proxy, chain c: translates 10.96.0.1:80 to 10.244.0.9:80 at the hook x"
    hangs = Diagnosis(Severity.NOTE, "proxy", "a kube-proxy runs here (pid 7), and hangs: the decision follows")
    told = Explanation(why(outcome), (hangs, Diagnosis(Severity.UNKNOWN, strangers.PRESENT, now)))
    assert (told.answer, told.heading.endswith(f"/tcp: {now} (?)")) == ("unknown", True), told.heading


def test_rules_of_the_other_iptables_may_come_first():
    twice = Diagnosis(Severity.UNKNOWN, "leftovers", "both variants", harm=MISLEADS, leads=((b"\n\xf4\0\x09", 80),))
    told = Explanation(why(), (twice,))
    first = ": kube-proxy forwards it, unless another kube-proxy's rules take it first, to 10.244.0.9:80 (?)"
    assert (told.answer, told.heading.endswith(first)) == ("unknown", True), told.heading


def test_the_first_line_names_the_table_of_rules_that_may_come_first():
    drops = strangers.dropping(one._replace(unordered=True) for one in DROPS)
    told = Explanation(why(), tuple(around(Checkup(list(drops), []))))
    assert told.heading.endswith(": kube-proxy forwards it, unless rules of table inet fw come first (?)")


def test_rules_of_another_proxy_may_take_connections_without_a_service():
    told = Explanation(why("dropped"), tuple(around(Checkup(list(STALE), []))))
    assert (told.answer, told.heading.endswith(", unless another kube-proxy's rules take it first (x)")) == ("no", True)


@pytest.mark.parametrize("outcome", ["refused", "dropped", "answered by the proxy"])
def test_a_firewall_may_drop_connections_that_this_node_refuses_or_answers(outcome):
    unhealthy = replace(why(outcome), steps=(AnswerStep(False, "no endpoint on this node"),))  # the proxy answers 503
    told = Explanation(unhealthy, tuple(around(Checkup(list(strangers.dropping(DROPS)), []))))
    assert told.answer == "no"
    assert told.heading.endswith(", unless a firewall of this node drops it first (x)") is (outcome == "refused")
    assert ("it does not get through: table inet fw" in told.heading) is (outcome == "answered by the proxy")


FRONT, CLIENT, END = b"\n\x60\0\1", b"\n\xf4\0\7", b"\n\xf4\1\7"


@pytest.mark.parametrize(
    ("packet", "code", "by", "forwards", "words"),
    [
        (RoutedPacket(None, FRONT), errno.ENETUNREACH, "", 1, "this node has no route to 10.96.0.1"),
        (RoutedPacket(None, FRONT), 0, "", 1, ""),
        (
            RoutedPacket(CLIENT, END, "cni0"),
            errno.EACCES,
            "ip rule 7 (prohibit)",
            1,
            "10.244.1.7: ip rule 7 (prohibit)",
        ),
        (RoutedPacket(CLIENT, END, "cni0"), errno.ENETUNREACH, "", 1, "10.244.1.7: no table has a route"),
        (RoutedPacket(CLIENT, END, "cni0"), errno.EHOSTUNREACH, "", 0, ""),  # another check reports it
        (RoutedPacket(CLIENT, END, "cni0"), errno.EXDEV, "", 1, "the kernel drops packets of 10.244.0.7"),
        (RoutedPacket(CLIENT, END, "cni0"), errno.EINVAL, "ip rule 7 (blackhole)", 1, "ip rule 7 (blackhole)"),
    ],
)
def test_a_connection_needs_routes(packet, code, by, forwards, words, monkeypatch):
    monkeypatch.setattr(routes, "refusal", lambda _: code)
    monkeypatch.setattr(routes, "routing_tables", lambda _: SimpleNamespace(refusing=lambda _: by))
    monkeypatch.setattr(routes, "marks", set)
    monkeypatch.setattr(routes, "number", lambda _: forwards)
    asked = Packet(None, FRONT, 6, 80)
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), packet=asked, routed=[packet])
    found = list(routes.refused(node))
    assert [one.severity.mark for one in found] == ["x"] * bool(words)
    assert all(words in one.what and one.why and one.fix for one in found)


@pytest.mark.parametrize(("value", "words"), [(0, "net.ipv4.conf.all.route_localnet is 0"), (1, "the kernel does not")])
def test_a_sysctl_that_keeps_packets_on_loopback_is_the_only_cause(value, words, monkeypatch):
    monkeypatch.setattr(routes, "refusal", lambda _: errno.EINVAL)
    monkeypatch.setattr(routes, "routing_tables", lambda _: SimpleNamespace(refusing=lambda _: ""))
    monkeypatch.setattr(routes, "marks", set)
    monkeypatch.setattr(routes, "number", lambda _: value)
    asked, local = Packet(None, LOOPBACK, 6, 30080), b"\x7f\0\0\2"
    routed = [RoutedPacket(local, END), RoutedPacket(END, local, "cni0")]
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), packet=asked, routed=routed)
    found = list(routes.refused(node))
    assert (len(found) == 1) is not value
    assert found[0].what.startswith(words)
    assert (found[0].severity.mark, found[0].harm) == ("x", STOPS)
    assert "rp_filter" not in found[0].fix


class Asked:
    """A proxy whose API server is unreachable."""

    running = True
    control = ""

    def facts(self):
        watched = (WatchStanding(resource="services", synced=True, connected=False, stale=480.0),)
        reach = Reach(server="https://h", trouble="h: refused", watched=watched, certificates={})
        facts = SimpleNamespace(
            node_deleted=False,
            standings=(),
            began={},
            reach=reach,
            mode="nftables",
            configuration=KubeProxyConfiguration,
        )
        facts.world = Globals("node-a")
        return facts


def test_the_fix_names_the_command_that_lists_rules_which_the_kernel_does_not_trace():
    legacy = [Drop("iptables-legacy -t filter", "FORWARD", one) for one in PACKETS]
    fixes = {one.fix for one in strangers.dropping(legacy)}
    listed = "`iptables-legacy -t filter -S FORWARD` lists its rules"
    assert fixes == {f"let iptables-legacy -t filter FORWARD accept it; {listed}"}
    closed = Filter("iptables-legacy -t filter", "ip", "FORWARD", "forward", True, False, 0)
    assert next(strangers.firewalls([closed], FlowsEnd.ENDPOINTS, False)).fix.endswith(listed)


def test_an_answer_from_old_objects_has_their_age(monkeypatch):
    packet = Packet(b"\n\0\0\1", FRONT, 6, 80)
    asked = Asked()
    told = tell(asked, asked.facts(), Explained(why("not ours"), None, Globals("node-a"), packet))
    (found,) = told.findings
    assert (told.answer, found.severity.mark, "the state known 8 minutes ago" in found.text) == ("no", "x", True)
    outdated = "the API server cannot be reached at h: refused"
    assert told.heading.endswith(
        f"does not handle it, the client sees , but the objects may be outdated: {outdated} (x)"
    )


@pytest.mark.parametrize(
    ("text", "is_itself", "marks"),
    [
        ("nothing answers ARP for 10.0.0.9 (INCOMPLETE in `ip neighbour`)", False, ["x"]),
        ("nothing answers ARP for 10.0.0.9 (FAILED in `ip neighbour`)", False, ["?"]),
        ("nothing answers ARP for 10.0.0.1 (FAILED in `ip neighbour`)", True, []),
        ("", False, []),
    ],
)
def test_a_next_hop_that_is_silent_is_named(text, is_itself, marks, monkeypatch):
    monkeypatch.setattr(routes, "silent_neighbour", lambda _: (text, is_itself))
    config = KubeProxyConfiguration()
    node = CheckedNode(None, 0, MODE, config, routed=[RoutedPacket(None, b"\n\0\0\1")])
    found = list(routes.unanswered(node))
    assert [one.severity.mark for one in found] == marks
    assert all(one.what.endswith(text) and "ip route get 10.0.0.1" in one.fix for one in found)
    told = Explanation(why(), tuple(around(Checkup(found, []))))
    assert told.answer == {"": "yes", "x": "no", "?": "unknown"}["".join(marks)]


def test_a_client_that_is_a_silent_next_hop_is_named(monkeypatch):
    monkeypatch.setattr(routes, "silent_neighbour", lambda _: ("nothing answers ARP for 10.0.0.1 (FAILED)", True))
    packet, way = Packet(b"\n\0\0\1", FRONT, 6, 80), RoutedPacket(FRONT, b"\n\0\0\1")
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), packet=packet, routed=[way])
    (found,) = routes.unanswered(node)
    assert (found.severity.mark, "nothing answers ARP for 10.0.0.1" in found.what) == ("?", True)


@pytest.mark.parametrize(("wrong", "blocked", "count"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_proxy_with_another_nodes_name_explains_policy_local(wrong, blocked, count, monkeypatch):
    named = Diagnosis(Severity.BROKEN, "node", "Node worker-9 is another machine", "", "set hostnameOverride")
    monkeypatch.setattr(whereabouts, "registered", lambda *_: [named] * wrong)
    local = AnswerStep(not blocked, "policy Local", "spec.internalTrafficPolicy")
    asked, advice = Asked(), "set spec.internalTrafficPolicy to Cluster"
    dropped = replace(why("dropped"), steps=(local,), fixes=(advice,))
    packet = Packet(b"\n\0\0\1", FRONT, 6, 80)
    told = tell(asked, asked.facts(), Explained(dropped, None, Globals("node-a"), packet))
    assert [one.about for one in told.findings].count("node") == count
    assert told.answer == "no"
    assert (advice in told.fixes, named.fix in told.fixes) == (not count, bool(count))
    name = "but the proxy may have another node's name: Node worker-9 is another machine (x)"
    assert (name in told.heading) is bool(count)


@pytest.mark.parametrize(
    ("silent", "answers", "mark", "age"),
    [
        ((90.0, 15.0), False, "", ""),
        ((90.0, 30.0), True, "", ""),
        ((90.0, 30.0), False, "-", "30 seconds"),
        ((500.0, 480.0), False, "x", "8 minutes"),
    ],
)
def test_a_server_with_silent_watches_gets_a_request(silent, answers, mark, age, monkeypatch):
    def greet(*_):
        if not answers:
            raise SourceError("h: sent nothing for 3 s")

    monkeypatch.setattr(greeting, "greet", greet)
    monkeypatch.setattr(greeting, "load_cluster", lambda *_: SimpleNamespace(proxy=None, credentials=UNAUTHENTICATED))
    watched = tuple(
        WatchStanding(resource=name, synced=True, connected=True, stale=0.0, silent=one)
        for name, one in zip(("services", "endpointslices"), silent, strict=True)
    )
    reach = Reach(server="https://h", trouble="", watched=watched, certificates={})
    facts = SimpleNamespace(master="", began={})
    found = list(greeting.outdated(CheckedNode(facts, 0, MODE, KubeProxyConfiguration(), running=True), reach))
    assert [one.severity.mark for one in found] == [mark] * bool(mark)
    assert all(f"traffic uses the state known {age} ago" in one.text for one in found)


def test_open_watches_without_a_bookmark_are_a_note():
    watched = tuple(
        WatchStanding(resource=name, synced=True, connected=True, stale=90.0, silent=90.0)
        for name in ("services", "endpointslices")
    )
    reach = Reach(server="https://h", trouble="", watched=watched, certificates={})
    (one,) = contact.reached(reach)
    assert (one.severity, one.what, one.harm) == (
        Severity.NOTE,
        "no message of the open watches of services, endpointslices for 90 seconds",
        NOTHING,
    )
    assert list(contact.outdated(reach)) == [one]


UNAUTHENTICATED = SimpleNamespace(program=None)
LOOPBACK, ENDPOINT = b"\x7f\0\0\1", b"\n\xf4\1\7"


@pytest.mark.parametrize("relayed", [True, False])
def test_a_relayed_connection_ends_at_the_proxy_and_another_one_leads_to_the_endpoint(relayed, monkeypatch):
    care = Loopback.RELAYED if relayed else Loopback.SERVED
    for name in ("source_for", "way_out"):
        made = {"source_for": lambda address: address[:3] + b"\x01", "way_out": lambda *_: "eth0"}[name]
        monkeypatch.setattr(f"kubeproxy.ask.checks.packets.{name}", made)
    monkeypatch.setattr(connection.host, "packed_local_addresses", lambda *_: {Family.IPV4: [LOOPBACK]})
    monkeypatch.setattr(connection, "arrival", lambda *_: "")
    told = replace(why(), service="default/web", endpoints=(Target("10.244.1.7:3000", 1.0, masqueraded=True),))
    (plan,) = planner_of(world(), service("web", "10.96.0.1")).compiled["default", "web"].plans
    ours = Globals("node-a", ipv4=FamilyGlobals(loopback=care))
    explained = Explained(told, plan, ours, Packet(None, LOOPBACK, 6, 30080))
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), running=True)
    way = connection._way(node, told, explained)
    inputs = {
        (one.destination, one.port) for one in way.passing if (one.hook, one.purpose.name) == ("input", "REQUEST")
    }
    assert explained.relayed is relayed
    assert inputs == ({(LOOPBACK, 30080)} if relayed else set())
    assert {one.destination for one in way.routed} == ({LOOPBACK} if relayed else {LOOPBACK, ENDPOINT})
    outputs = [one.interfaces for one in way.passing if one.hook == "output" and one.destination == ENDPOINT]
    assert outputs == [("", "eth0") if relayed else ("", "lo")]
    # Masquerading may select another address than the source address of the route.
    answers = {
        one.destination for one in (*way.passing, *way.possible) if one.hook == "prerouting" and one.source == ENDPOINT
    }
    assert (way.covered, LOOPBACK in answers) == (True, not relayed)


def test_a_blackhole_is_called_so():
    made, error = present.Probe("10.0.0.1:80", "TCP", 0.0), OSError(errno.EINVAL, "Invalid argument")
    assert present._failed(made, error, is_udp=False).problem == "its route is a blackhole"


POD, NEAR, FAR, HOST = (bytes((10, 244, third, 7)) for third in range(4))


@pytest.mark.parametrize(
    ("packet", "ways", "masqueraded", "count"),
    [
        (None, (), False, 1),
        (Packet(POD, FRONT, 6, 80), ("cni0", "cni0"), False, 1),
        (Packet(POD, FRONT, 6, 80), ("cni0", "cni0"), True, 0),
        (Packet(POD, FRONT, 6, 80), ("cni0", "eth0"), False, 0),
        (Packet(FAR, FRONT, 6, 80), ("eth0", "cni0"), False, 0),
        (Packet(FAR, FRONT, 6, 80), ("eth0", "eth0"), False, 0),
        (Packet(None, FRONT, 6, 80), (), False, 0),
    ],
)
def test_only_connections_within_a_bridge_need_its_rules(packet, ways, masqueraded, count, monkeypatch):
    monkeypatch.setattr(node_checks, "bridges", lambda: [Bridge("cni0", ())])
    monkeypatch.setattr(node_checks, "local_addresses", lambda _: [Address(HOST, 24, "cni0", 0)])
    part, end = FamilyGlobals(detector=Detector("network", "10.244.0.0/16")), (NEAR, 3000)
    facts = SimpleNamespace(world=Globals("node-a", ipv4=part))
    node = CheckedNode(facts, 0, MODE, KubeProxyConfiguration(), family=Family.IPV4, packet=packet)
    passing = [PassingPacket("forward", -1, 1, POD, *end[:1], 6, 3000, (FRONT, 80), ways, True)] if ways else []
    hidden = frozenset({end} if masqueraded else ())
    node = replace(node, passing=passing, targets=frozenset({end}), masqueraded=hidden)
    found = list(node_checks.unfiltered_bridges(node))
    assert len(found) == count
    assert packet is None or all(one.harm == STOPS for one in found)


@pytest.mark.parametrize(
    ("ports", "filtered", "ends", "marks"),
    [
        ({"veth1": 0}, (Family.IPV4,), ["10.244.0.7:80"], ["x"]),
        ({"veth1": 0, "veth2": 1}, (Family.IPV4,), ["10.244.0.7:80"], ["-"]),
        ({"veth1": 1}, (Family.IPV4,), ["10.244.0.7:80"], []),
        ({"veth1": 0}, (), ["10.244.0.7:80"], []),  # routed, not bridged
        ({"veth1": 0}, (Family.IPV4,), ["10.244.1.7:80"], []),
    ],
)
def test_a_pod_that_reaches_itself_needs_hairpin_mode(ports, filtered, ends, marks, tmp_path, monkeypatch):
    for name, value in ports.items():
        (tmp_path / "cni0" / "brif" / name).mkdir(parents=True)
        (tmp_path / "cni0" / "brif" / name / "hairpin_mode").write_text(f"{value}\n")
    monkeypatch.setattr(node_checks, "way_out", lambda *_: "cni0")
    monkeypatch.setattr(node_checks, "bridges", lambda: [Bridge("cni0", filtered)])
    monkeypatch.setattr(node_checks, "hairpin_ports", lambda name: hairpin_ports(name, tmp_path))
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), packet=Packet(POD, NEAR, 6, 80))
    asked = replace(why(), source="10.244.0.7", endpoints=tuple(Target(end, 0.5, masqueraded=True) for end in ends))
    found = list(connection._hairpin(node, asked))
    assert [one.severity.mark for one in found] == marks
    assert all("50.0% of the connections return" in one.why for one in found)


@pytest.mark.parametrize(
    ("ports", "detector", "marks"),
    [
        ({"veth1": 0}, "10.244.0.0/16", ["x"]),
        ({"veth1": 0, "eth0": 1}, "10.244.0.0/16", ["-"]),
        ({"veth1": 1}, "10.244.0.0/16", []),
        ({}, "10.244.0.0/16", []),
        ({"veth1": 0}, "10.8.0.0/16", []),
    ],
)
def test_doctor_looks_at_hairpin_mode_of_bridges_of_pods(ports, detector, marks, monkeypatch):
    monkeypatch.setattr(node_checks, "bridges", lambda: [Bridge("cni0", (Family.IPV4,))])
    monkeypatch.setattr(node_checks, "hairpin_ports", lambda _: {name: bool(on) for name, on in ports.items()})
    monkeypatch.setattr(node_checks, "local_addresses", lambda _: [Address(HOST, 24, "cni0", 0)])
    part = FamilyGlobals(detector=Detector("network", detector))
    facts = SimpleNamespace(world=Globals("node-a", ipv4=part))
    node = CheckedNode(facts, 0, MODE, KubeProxyConfiguration(), family=Family.IPV4)
    found = list(node_checks.unreflecting_bridges(node))
    assert [one.severity.mark for one in found] == marks
    assert all("time out" in one.why and one.fix for one in found)


@pytest.mark.parametrize(
    ("out", "scope", "uevent", "stacked", "near"),
    [
        ("eth1", 0, "INTERFACE=eth1", False, "eth0"),
        ("eth0", 0, "INTERFACE=eth0", False, ""),
        ("eth1", 253, "INTERFACE=eth1", False, ""),  # no address that other hosts can reach, such as a pod's
        ("eth1", 0, "DEVTYPE=vxlan", False, ""),
        ("eth1", 0, "DEVTYPE=vlan", False, "eth0"),
        ("eth1", 0, "INTERFACE=eth1", True, ""),  # macvlan on top of eth0
    ],
)
def test_packets_of_a_neighbour_arrive_on_its_network(out, scope, uevent, stacked, near, tmp_path, monkeypatch):
    (tmp_path / out).mkdir()
    (tmp_path / out / "type").write_text("1\n")
    (tmp_path / out / "uevent").write_text(uevent + "\n")
    if stacked:
        (tmp_path / out / "lower_eth0").mkdir()
    monkeypatch.setattr(node_checks, "SYS", tmp_path)
    own = [Address(HOST, 24, "eth0", 0), Address(END, 24, "eth1", scope)]
    assert node_checks.bypassed(HOST[:3] + b"\x32", out, own) == near


@pytest.mark.parametrize(
    ("dropped", "ends", "verdict", "effect"),
    [
        (
            DROPS[:1],
            2,
            "drops",
            "a retransmission picks an endpoint again, and clients see delays of 1, 3, ... seconds",
        ),
        (DROPS, 2, "drops", "the client sees a timeout"),
        (DROPS[:1], 0, "drops by its policy", "the client sees a timeout"),  # session affinity
        (DROPS[:1], 2, "rejects", "the client is refused"),
        (DROPS, 2, "drops or rejects", "the client sees a timeout, or is refused"),
        (ANSWERED[:1], 2, "drops", "the client sees a timeout"),
    ],
)
def test_the_effect_of_a_chain_is_named(dropped, ends, verdict, effect):
    all_ends = frozenset((packet.destination, packet.port) for packet in PACKETS)
    asked = Packet(POD, FRONT, 6, 80)
    again = all_ends if ends else frozenset()
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), packet=asked, targets=all_ends, picked_again=again)
    (found,) = strangers.dropping([one._replace(verdict=verdict) for one in dropped], node.harm_of)
    lost = frozenset((one.packet.source, 3000) if one in ANSWERED else all_ends for one in dropped)
    assert found.harm == STOPS if len(dropped) == 2 else found.harm.ends < all_ends, lost
    assert (f"chain guard: {verdict} " in found.what, found.why.endswith(effect)) == (True, True), found.text


@pytest.mark.parametrize(
    ("protocol", "used", "said"),
    [("UDP", 90, "shorten conntrack.udpTimeout and conntrack.udpStreamTimeout"), ("UDP", 9, ""), ("TCP", 90, "raise")],
)
def test_the_fix_of_a_full_table_is_that_of_its_entries(protocol, used, said, monkeypatch):
    target = target_of(FRONT, PROTOCOLS[protocol], 53)
    held = [Tracked(target, bytes((10, 9, 9, n)) + b"\0\1", b"", 0, 0, b"") for n in range(used)]
    monkeypatch.setattr(node_checks, "read_sysctl", lambda key: "100" if key.endswith("max") else str(used))
    monkeypatch.setattr(node_checks.Netlink, "open", lambda *_: nullcontext())
    monkeypatch.setattr(node_checks, "entries", lambda _, family: held if family is Family.IPV4 else [])
    assert [said in one.fix and "tcpEstablished" not in one.fix for one in node_checks.full_conntrack()] == [
        True
    ] * bool(said)


E1, E2 = ((packet.destination, packet.port) for packet in PACKETS)
SWITCH = "net/ipv6/conf/all/forwarding"


@pytest.mark.parametrize(
    ("forwards", "family", "what", "harm"),
    [
        ({SWITCH}, Family.IPV6, "", None),
        ((), Family.IPV6, "net.ipv6.conf.all.forwarding is 0", STOPS),
        ({"net/ipv6/conf/cni0/force_forwarding"}, Family.IPV6, "net.ipv6.conf.eth0.force_forwarding is 0", [E1]),
        ({"net/ipv6/conf/eth0/force_forwarding"}, Family.IPV6, "net.ipv6.conf.cni0.force_forwarding is 0", STOPS),
        ({f"net/ipv6/conf/{n}/force_forwarding" for n in ("eth0", "cni0")}, Family.IPV6, "", None),
        ({"net/ipv4/conf/cni0/forwarding"}, Family.IPV4, "net.ipv4.conf.eth0.forwarding is 0", [E1]),
        ({f"net/ipv4/conf/{n}/forwarding" for n in ("eth0", "cni0")}, Family.IPV4, "", None),
        ((), Family.IPV4, "net.ipv4.ip_forward is 0", STOPS),
        ({"net/ipv4/ip_forward", "net/ipv4/conf/cni0/forwarding"}, Family.IPV4, "net.ipv4.conf.eth0.forwarding", [E1]),
    ],
)
def test_the_interfaces_of_a_connection_forward_its_packets(forwards, family, what, harm, monkeypatch):
    monkeypatch.setattr(node_checks, "number", lambda key: int(key in forwards or ("/cni1/" in key and forwards != ())))
    monkeypatch.setattr(node_checks, "_entrances", lambda: {"cni0", "cni1", "eth0", "up2"})
    monkeypatch.setattr(node_checks, "bridges", list)
    there = [one._replace(interfaces=("cni0", name)) for one, name in zip(PACKETS, ("eth0", "cni1"), strict=True)]
    back = [
        each.packet._replace(interfaces=(name, "cni0")) for each, name in zip(ANSWERED, ("eth0", "cni1"), strict=True)
    ]
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), family=family, passing=[*there, *back])
    node = replace(node, packet=Packet(POD, FRONT, 6, 80), targets=frozenset({E1, E2}))
    found = list(node_checks.unforwarded(node))
    assert [one.what.startswith(what) for one in found] == [True] * bool(what), found
    wanted = Harm(Effect.LOSES, frozenset(harm)) if isinstance(harm, list) else harm
    assert [one.harm for one in found] == [wanted] * bool(what)


@pytest.mark.parametrize(
    ("on", "marks"),
    [
        ({SWITCH}, ""),
        ((), "x net.ipv6.conf.all.forwarding"),
        ({"net/ipv6/conf/cni0/force_forwarding"}, "x net.ipv6.conf.eth0.force_forwarding"),
        ({"net/ipv6/conf/eth0/force_forwarding"}, "- net.ipv6.conf.cni0.force_forwarding"),
    ],
)
def test_doctor_looks_at_the_interfaces_that_ipv6_forwards_by(on, marks, monkeypatch):
    monkeypatch.setattr(node_checks, "number", lambda key: int(key in on))
    monkeypatch.setattr(node_checks, "_entrances", lambda: {"cni0", "eth0"})
    monkeypatch.setattr(node_checks, "_served", lambda *_: {"eth0"})
    node = CheckedNode(None, 0, MODE, KubeProxyConfiguration(), family=Family.IPV6)
    found = list(node_checks.unforwarded(node))
    assert "".join(f"{one.severity.mark} {one.what.removesuffix(' is 0')}" for one in found) == marks
