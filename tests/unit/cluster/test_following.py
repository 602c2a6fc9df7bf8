"""`kubectl kubeproxy trace`: one sentence for the result of one or two traces, and the nodes that are traced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_both_ends import end, near

from kubeproxy.ask.why import Target, Why
from kubeproxy.cluster.answers import decoded
from kubeproxy.cluster.fleet import Fleet, Reply
from kubeproxy.cluster.following import follow
from kubeproxy.cluster.main import main
from kubeproxy.commands import NO, UNKNOWN, YES
from kubeproxy.errors import CANNOT_SEND, NoAnswerError
from support.answers import refusal
from support.kubectl_stand_in import StandIn

Json = dict[str, Any]
END, CLIENT, SERVICE = "10.244.1.8:3000", "192.0.2.1", "10.96.0.10:80/tcp"
RULE = 'the request was dropped by rule "drop" of table inet firewall, chain guard, which is not ours'
SILENT = "nothing here dropped it: it left by eth0, and connection tracking saw no answer"


def packet(source: str = "10.244.0.7:40000", lost: str = "", to: str = END) -> Json:
    verdict = "refused" if "refused" in lost else "accepted"
    met = {"hook": "output", "table": "t", "chain": "c", "destination": to, "words": (), "verdict": verdict}
    path = {"direction": "request", "refusal": "", "source": source, "destination": to, "met": [met]}
    return {**path, "lost": lost, "last": "postrouting"}


def reset(local: bool = False) -> Json:
    back = {"direction": "answer", "refusal": "reset", "source": END, "destination": f"{CLIENT}:40000", "met": []}
    return {**back, "lost": "", "last": "postrouting", "local": local}


def trace(text: str, passed: bool | None, *packets: Json, departed: bool = False, client: str = CLIENT) -> Json:
    served = [{"endpoint": END, "answered": bool(passed), "client": client}] if packets else []
    out = {"schemaVersion": 1, "version": "0.1.0", "journeys": packets, "served": served, "lost": 0, "legacy": 0}
    left = {"departed": departed, "sent": False, "lostAnswers": ""}
    return {**out, "verdict": {"text": text, "passed": passed}, **left}


LOST = "but no answer arrives on node-a: see the network between the nodes"
LATE = "the first packet had no answer in time"
ASTRAY = f"it leaves node-a for {END}, but no rule of node-b meets it: see the network between them"
NONE = "node-b received no further packet of it: let the client connect again during the trace"
LEFT = trace(SILENT, False, packet(), packet(), departed=True)
STRAYED = trace(SILENT, False, packet(), packet(to="10.244.2.8:3000"), departed=True)  # a packet to another endpoint
ELSEWHERE = f"{SILENT}; a rule gives it another source"
MOVED = trace(ELSEWHERE, False, packet(), packet(), departed=True) | {"lostAnswers": "a rule gives it another source"}
DROPPED = trace(RULE, False, packet(lost="dropped"))
RESET = trace("a reset", False, packet(), reset(), packet(), reset()) | {"served": []}
REFUSED = 'the request was refused by rule "reject" of table inet firewall'
QUIET = (
    f"{{}} forwards it to {END}, and nothing comes back: see the endpoint's pod (its process, and the rules in its "
    "network namespace)"
)
OTHERS = "; `kubectl kubeproxy why` checks the other 1 endpoint"
ANSWERED = trace("nothing here dropped it, and it answered", True, packet())
NOTHING = trace("no packet of this flow arrived", None)


def followed(*answers: dict[str, Json | str], client: str = "10.244.0.7", node: str = "node-b"):
    """Follow a connection with these answers, or problems, by node for each round of traces; and with these flows."""
    left, flows = list(answers), []

    def ask(each, packets):
        flows.append((dict(each), packets))
        fleet, found = Fleet("trace", (), whole=False), left.pop(0)
        for name in each:
            one = found[name]
            problem = one if isinstance(one, str) else ""
            answer, facts = (None, ()) if problem else decoded(json.dumps(one).encode(), "trace", ())
            fleet.add(Reply(node=name, problem=problem), answer, facts)
        return fleet

    ends = (Target("10.244.0.9:3000", 0.5, False, "node-a"), Target(END, 0.5, True, node))
    why = Why(source=client, destination=SERVICE, outcome="forwarded", client_sees="", endpoints=ends)
    made = follow(ask, "node-a", client, why, "node-a")
    assert not left
    return made, flows


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        (ANSWERED, f"on node-a, nothing here dropped it, and it answered{OTHERS}", YES),
        (DROPPED, f"node-a drops it: {RULE}", NO),
        (NOTHING, "on node-a, no packet of this flow arrived", UNKNOWN),
        (trace("a reset", False, packet(), reset(local=True)), "on node-a, a reset", NO),
        ("no pod of kube-proxy", "node-a gave no answer: no pod of kube-proxy", UNKNOWN),
    ],
)
def test_the_clients_node_alone_is_asked(answer, text, status):
    made, flows = followed({"node-a": answer})
    assert (made.text, made.status) == (text, status)
    assert flows == [({"node-a": ("10.244.0.7", SERVICE)}, 1)]


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ("node-a", QUIET.format("node-a")),
        ("", f"on node-a, {SILENT}; the node of {END} is unknown, so only this node was asked"),
    ],
)
def test_an_endpoint_of_the_same_node_or_of_none(node, text):
    made, _ = followed({"node-a": LEFT}, node=node)
    assert made.text == text


@pytest.mark.parametrize(
    ("second", "far", "text", "status"),
    [
        (LEFT, DROPPED, f"node-b drops it: {RULE}", NO),
        (LEFT, trace("nothing listens there", False, packet()), "on node-b, nothing listens there", NO),
        (LEFT, trace("over UDP", None, packet()), "on node-b, over UDP", UNKNOWN),
        (LEFT, trace(SILENT, False, packet(), departed=True), QUIET.format("node-b"), NO),
        (LEFT, trace(REFUSED, False, packet(lost="refused by rule")), f"node-b refuses it: {REFUSED}", NO),
        (LEFT, ANSWERED, f"node-b delivers it, and {END} answers, {LOST}", NO),
        (MOVED, ANSWERED, f"node-b delivers it, and {END} answers, but on node-a, {ELSEWHERE}", NO),
        (ANSWERED, ANSWERED, f"node-b delivers it, and {END} answers; {LATE}", YES),
        (LEFT, NOTHING, ASTRAY, NO),
        (STRAYED, NOTHING, f"on node-a, {SILENT}; {NONE}", NO),
        (LEFT, "it hangs", f"on node-a, {SILENT}; node-b, which has {END}, gave no answer: it hangs", UNKNOWN),
    ],
)
def test_both_nodes_are_asked_about_a_packet_that_left_one(second, far, text, status):
    made, flows = followed({"node-a": LEFT}, {"node-a": second, "node-b": far})
    assert (made.text, made.status) == (text, status)
    assert flows[1] == ({"node-b": (CLIENT, f"{END}/tcp"), "node-a": ("10.244.0.7", SERVICE)}, 10)
    assert [one.node for one in made.fleet.replies] == ["node-a", "node-b"]


@pytest.mark.parametrize(
    ("second", "far", "text", "status"),
    [
        (RESET, trace(REFUSED, False, packet(lost="refused by rule")), f"node-b refuses it: {REFUSED}", NO),
        (RESET, RESET, "on node-b, a reset", NO),
        (RESET, NOTHING, ASTRAY, NO),
        (RESET, ANSWERED, f"node-b delivers it, and {END} answers, but on node-a, a reset", NO),
    ],
)
def test_a_reset_may_come_from_a_firewall_of_the_endpoints_node(second, far, text, status):
    made, flows = followed({"node-a": RESET}, {"node-a": second, "node-b": far})
    assert (made.text, made.status) == (text, status)
    assert flows[1][0] == {"node-b": (CLIENT, f"{END}/tcp"), "node-a": ("10.244.0.7", SERVICE)}


@pytest.mark.parametrize(("source", "certain"), [(CLIENT, True), ("10.244.0.0", False)])
def test_a_node_sends_to_the_endpoint_itself_which_has_to_see_the_address_that_is_looked_for(source, certain):
    sent = packet(f"{source}:40000")
    second = trace(SILENT, False, sent, sent, departed=True)
    made, flows = followed({"node-a": LEFT}, {"node-a": second, "node-b": NOTHING}, client="node")
    assert flows[1][0] == {"node-b": (CLIENT, f"{END}/tcp"), "node-a": ("node", f"{END}/tcp")}
    assert ("no rule of node-b meets it" in made.text) is certain


@pytest.mark.parametrize(("seen", "to"), [("10.244.0.7", f"{END}/tcp"), (CLIENT, SERVICE)])
def test_packets_from_a_pod_are_sent_to_the_endpoint_itself_if_it_sees_the_pods_address(seen, to):
    first = trace(SILENT, False, packet(), departed=True, client=seen) | {"sent": True}
    _, flows = followed({"node-a": first}, {"node-a": first, "node-b": DROPPED})
    assert flows[1][0] == {"node-b": (seen, f"{END}/tcp"), "node-a": ("10.244.0.7", to)}


@pytest.fixture
def ask(tmp_path, monkeypatch, capfd):
    cluster = StandIn(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setenv("PATH", cluster.install())
        status = main(["trace", *words])
        printed = capfd.readouterr()
        return status, printed.out + printed.err

    return cluster, run


REFUSAL = "cannot send from the network namespace of 10.244.0.7: it needs CAP_SYS_ADMIN. Fix: set podTrace"


def test_a_node_that_cannot_send_waits_for_the_pods_packets(ask):
    cluster, run = ask
    printed = {"out": json.dumps(ANSWERED), "status": YES}
    send = refusal(NoAnswerError(REFUSAL, kind=CANNOT_SEND)) | {"status": UNKNOWN}
    cluster.node("node-a", **near("yes", ends=[]), trace=printed, send=send)
    status, text = run("10.244.0.7", "10.96.0.10:80", "--seconds", "3")
    assert status == YES
    assert f"node-a {REFUSAL}\nnode-a: tracing for 3 s; let 10.244.0.7 connect now\n" in text
    assert [call[call.index("--") + 7] for call in cluster.calls if "trace" in call] == ["--send", "--no-send"]


def test_printed_results(ask):
    cluster, run = ask
    ends = [end(END, "node-b")]
    cluster.node("node-a", **near("yes", ends=ends), trace={"out": json.dumps(LEFT), "status": NO})
    cluster.node("node-b", app="kube-proxy", err="Error: unknown shorthand flag: 'o' in -o\n", status=1,
                 version="Kubernetes v1.36.0\n")  # fmt: skip
    status, text = run("10.244.0.7", "10.96.0.10:80", "--seconds", "3")
    assert status == UNKNOWN
    assert (
        f"10.244.0.7 -> {SERVICE}: on node-a, {SILENT}; node-b, which has {END}, gave no answer: it has the Go " in text
    )
    assert "node-a, 10.244.0.7 -> 10.96.0.10:80/tcp:\n  ok request 10.244.0.7:40000 -> " in text
    assert "connect now" not in text
    words = [call[call.index("kube-proxy") + 1 :] for call in cluster.calls if "trace" in call]
    options = ["trace", "-o", "json", "--seconds=3.0"]
    assert words[0] == [*options, "--packets=1", "--send", "--", "10.244.0.7", SERVICE]
    assert sorted(words[1:])[0][:6] == [*options, "--packets=10", "--no-send"]


def test_a_trace_names_outdated_objects_of_the_clients_node(ask):
    cluster, run = ask
    answer = near("yes", ends=[end(END, "node-a")], service="shop/web")
    cluster.node("node-a", **answer, trace={"out": json.dumps(ANSWERED), "status": YES})
    labels = {"kubernetes.io/service-name": "web"}
    there = {"endpoints": [{"addresses": ["10.244.1.9"]}], "ports": [{"port": 3000}]}
    cluster.objects["endpointslices"].append(
        {"metadata": {"name": "w", "namespace": "shop", "labels": labels}, **there}
    )
    status, text = run("10.244.0.7", "10.96.0.10:80")
    assert status == NO
    assert f": the proxy of node-a has outdated objects: the API server does not have {END} (50.0% of " in text
    assert (
        "Fix: see whether the proxy of node-a reaches the API server: `kubectl kubeproxy doctor --node node-a`\n"
        in text
    )


def test_a_trace_of_a_refused_connection_names_the_reason(ask):
    cluster, run = ask
    answer = near("no", ends=[])
    out = json.loads(answer["out"])
    out["why"] |= {"outcome": "refused", "steps": [{"passes": False, "text": "no endpoint is ready", "field": ""}]}
    out["why"]["fixes"] = ["look at the pods"]
    refused = trace(REFUSED, False, packet(lost="refused by rule"))
    printed = {"out": json.dumps(out), "status": NO}
    cluster.node("node-a", **printed, trace={"out": json.dumps(refused), "status": NO})
    status, text = run("10.244.0.7", "10.96.0.10:80")
    assert (status, f"{SERVICE}: no endpoint is ready: node-a refuses it: {REFUSED}\n" in text) == (NO, True), text
    assert text.endswith("Fix: look at the pods\n")


def test_a_client_outside_needs_a_node(ask):
    cluster, run = ask
    cluster.node("node-a", **near("yes"))
    status, text = run("198.51.100.7", "10.96.0.10:80")
    assert status == UNKNOWN
    assert "trace follows the packets of 198.51.100.7 from one node: give its name by --node" in text
