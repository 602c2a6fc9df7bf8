"""`kubectl kubeproxy why` of a connection between nodes, with a substitute for kubectl; it names the dropping node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kubeproxy.ask.finding import AS_CLIENT, doubt
from kubeproxy.cluster.answers import WhyAnswer, decoded
from kubeproxy.cluster.ends import MOST, Delivery, excuse
from kubeproxy.cluster.fleet import Reply
from kubeproxy.cluster.main import main
from kubeproxy.commands import NO, UNKNOWN, YES
from kubeproxy.errors import NO_PROXY, NoAnswerError
from kubeproxy.model.port_ranges import FIELD
from support.answers import refusal, valid
from support.kubectl_stand_in import StandIn

Json = dict[str, Any]
Ask = Callable[..., tuple[int, str]]
SERVICE = "10.244.0.7 -> 10.96.0.10:80/tcp"
FORWARDED = f"{SERVICE}: kube-proxy forwards it"
CODES = {"yes": YES, "no": NO, "unknown": UNKNOWN}
GUARD = "table inet firewall, chain guard: drops what goes to 10.244.1.8:3000"
SILENT = "TCP from this node to 10.244.1.8:3000: no answer within 1 s"


def end(address: str, node: str, client: str = "10.244.0.7", share: float = 0.5) -> Json:
    return {"address": address, "share": share, "masqueraded": False, "node": node, "client": client}


def found(severity: str, about: str, what: str) -> Json:
    return {"severity": severity, "about": about, "what": what, "why": "", "fix": f"mend {about}"}


def why(
    heading: str, answer: str, destination: str, ends: list[Json], findings: tuple[Json, ...] = (), service: str = ""
) -> Json:
    decision = {
        "service": service,
        "source": heading.partition(" -> ")[0],
        "destination": destination,
        "outcome": "forwarded",
        "clientSees": "the answer of the endpoint",
        "endpoints": ends,
    }
    lost = any(one["about"] == "endpoints" for one in findings)
    probes = [
        {"address": "10.244.1.8:3000", "protocol": "TCP", "seconds": 1, "problem": "no answer" * lost, "refused": False}
    ]
    parts = {"findings": findings, "probes": probes, "fixes": [one["fix"] for one in findings], "next": "kube-proxy …"}
    head = {"heading": heading, "decision": heading.partition(": ")[2], "answer": answer}
    out = {"schemaVersion": 1, "version": "0.1.0", **head, "why": decision, **parts}
    return {"out": json.dumps(out), "status": CODES[answer]}


def near(
    answer: str, *findings: Json, ends: list[Json] | None = None, heading: str = FORWARDED, service: str = ""
) -> Json:
    ends = ends if ends is not None else [end("10.244.0.9:3000", "node-a"), end("10.244.1.8:3000", "node-b")]
    return why(heading, answer, "10.96.0.10:80/tcp", ends, findings, service)


def far(answer: str, *findings: Json, place: str = "10.244.1.8:3000") -> Json:
    return why(f"10.244.0.7 -> {place}/tcp: forwarded", answer, f"{place}/tcp", [end(place, "node-b")], findings)


@pytest.fixture
def cluster(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture
def ask(cluster: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setenv("PATH", cluster.install())
        status = main(["why", "10.244.0.7", "10.96.0.10:80", *words])
        return status, capfd.readouterr().out

    return run


def asked(cluster: StandIn) -> list[list[str]]:
    """The pod and the arguments of each command."""
    calls = [call for call in cluster.calls if "exec" in call]
    return sorted([call[call.index("--") - 1].removeprefix("kube-proxy-py-"), *call[-2:]] for call in calls)


DROPS = found("broken", "firewall", GUARD)
LATE = found("broken", "api", "the API server is away")
NEAR_PROBE, NEAR_DOUBT = (
    found(severity, "endpoints", SILENT) | {"endpoint": "10.244.1.8:3000"} for severity in ("broken", "unknown")
)
THERE = "10.244.1.8:3000 (50.0% of the connections)"


@pytest.mark.parametrize(
    ("here", "there", "status", "decision"),
    [
        (near("yes"), far("yes"), YES, "kube-proxy forwards it, and node-b delivers it"),
        (near("yes"), far("no", DROPS), NO, f"node-b does not deliver to {THERE}: {GUARD} (x)"),
        (near("no", NEAR_PROBE), far("no", DROPS), NO, f"node-b does not deliver to {THERE}: {GUARD} (x)"),
        (
            near("unknown", NEAR_DOUBT),
            far("unknown", NEAR_DOUBT),
            UNKNOWN,
            f"{THERE} answers no probe of node-b, its node: {SILENT.replace('this node', 'node-b')} (?)",
        ),
        (
            near("no", DROPS, heading=f"{SERVICE}: it does not get through: {GUARD} (x)"),
            far("yes"),
            NO,
            f"on node-a, it does not get through: {GUARD} (x)",
        ),
        (
            near("no", LATE, heading=f"{FORWARDED}, not all is well (x)"),
            far("no", DROPS),
            NO,
            f"on node-a, kube-proxy forwards it, not all is well (x); node-b does not deliver to {THERE}: {GUARD} (x)",
        ),
        (
            near("unknown", NEAR_DOUBT, heading=f"{SERVICE}: forwarded, if this node can (?)"),
            far("yes"),
            UNKNOWN,
            "on node-a, forwarded, if node-a can (?); node-b delivers it: see the network between the nodes",
        ),
        (
            near("yes"),
            refusal(NoAnswerError("no kube-proxy answers at /run/x", kind=NO_PROXY)) | {"status": 2},
            UNKNOWN,
            f"kube-proxy forwards it; node-b, which has {THERE}, gave no answer (?)",
        ),
    ],
)
def test_the_first_line_names_the_node_that_drops(
    cluster: StandIn, ask: Ask, here: Json, there: Json, status: int, decision: str
):
    cluster.node("node-a", **here)
    cluster.node("node-b", **there)
    code, text = ask()
    assert text.splitlines()[1] == f"{SERVICE}: {decision}"
    assert code == status
    assert "gave no answer" not in decision or "gave no answer: no kube-proxy answers at /run/x: `kubectl" in text
    assert [call for call in asked(cluster) if call[1] != "192.0.2.1"] == [  # packets of node-a
        ["node-a", "10.244.0.7", "10.96.0.10:80"],
        ["node-b", "10.244.0.7", "10.244.1.8:3000/tcp"],
    ]
    code, text = ask("-o", "json")
    whole = valid("cluster", text)
    assert (code, whole["heading"]) == (status, f"{SERVICE}: {decision}")
    assert [one["node"]["node"] for one in whole["deliveries"]] == ["node-b"]


def test_fixes_of_the_endpoints_node_take_the_place_of_those_of_probes(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("unknown", NEAR_DOUBT))
    cluster.node("node-b", **far("no", DROPS))
    _, text = ask()
    assert [line for line in text.splitlines() if line.startswith("Fix")] == ["Fix: on node-b: mend firewall"]


def test_probes_are_recognised_by_their_fields(cluster: StandIn, ask: Ask):
    probe = NEAR_DOUBT | {"what": "in other words"}
    there = json.loads(far("unknown", probe)["out"])
    there["probes"][0] |= {"problem": "also in other words", "refused": True}
    cluster.node("node-a", **near("unknown", probe))
    cluster.node("node-b", out=json.dumps(there), status=UNKNOWN)
    assert f"  ?  {THERE} refuses connections, also of node-b, its node\n" in ask()[1]
    cluster.printed["kube-proxy-py-node-b"] = far("no", DROPS)
    assert "in other words" not in ask()[1]


def test_the_first_line_has_the_name_of_the_clients_node(cluster: StandIn, ask: Ask):
    heading = "this node -> 10.96.0.10:80/tcp: dropped: no endpoint is on this node (x)"
    cluster.node("node-a", **near("no", ends=[], heading=heading))
    assert ask()[1].splitlines()[1] == heading.replace("this node", "node-a")


def test_the_fix_of_a_probe_from_the_endpoints_node_is_not_for_that_node(cluster: StandIn, ask: Ask):
    probe = NEAR_DOUBT | {"fix": "connect from the client; this node does not reach it"}
    cluster.node("node-a", **near("unknown", NEAR_DOUBT))
    cluster.node("node-b", **far("no", DROPS, probe))
    _, text = ask()
    fixes = [line for line in text.splitlines() if line.startswith("Fix")]
    assert fixes == ["Fix: on node-b: mend firewall", "Fix: connect from the client; node-b does not reach it"]


def test_the_next_step_is_a_command_of_the_plugin_with_the_same_options(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes"))
    cluster.node("node-b", **far("yes"))
    _, text = ask("--context=prod", "-n", "shop", "--no-probe", "--node", "node-a")
    again = "kubectl kubeproxy trace 10.244.0.7 10.96.0.10:80 --namespace=shop --context=prod --node=node-a"
    assert f"Next: the rules that the packets pass on both nodes: {again}\n" in text


def test_a_node_with_the_go_kube_proxy_is_no_error(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes"))
    refusal = {"err": "Error: unknown shorthand flag: 'o' in -o\n", "status": 1}
    cluster.node("node-b", app="kube-proxy", **refusal, version="Kubernetes v1.36.0\n")
    status, text = ask()
    assert (status, text.splitlines()[1]) == (YES, FORWARDED)
    assert f"-  node-b, which has {THERE}, gave no answer: it has the Go kube-proxy v1.36.0" in text


@pytest.mark.parametrize(
    "answer",
    [
        # An answer of a release that does not state the client.
        near("yes", ends=[end("10.244.1.8:3000", "node-b", client="")]),
        near("yes", ends=[end("192.0.2.8:3000", "")]),
        near("yes", ends=[end("10.244.1.8:3000", "node-a")]),
        near("yes", ends=[]),
    ],
)
def test_no_node_is_asked_about_endpoints_without_node_or_client(cluster: StandIn, ask: Ask, answer: Json):
    cluster.node("node-a", **answer)
    cluster.node("node-b", **far("yes"))
    assert ask()[0] == YES
    assert len(asked(cluster)) == 1


def test_the_proxys_own_port_is_an_endpoint_that_the_proxy_has(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes"))
    there = json.loads(far("yes")["out"])
    there["why"] |= {"outcome": "answered by the proxy", "endpoints": []}
    cluster.node("node-b", out=json.dumps(there), status=YES)
    status, text = ask()
    assert (status, f"ok node-b delivers to {THERE}" in text) == (YES, True), text


def test_fixes_name_the_command_of_the_plugin(cluster: StandIn, ask: Ask):
    drops = DROPS | {
        "fix": "let it pass; `kube-proxy trace` shows the rule; `kube-proxy plan --cluster-cidr N` is there"
    }
    cluster.node("node-a", **near("yes"))
    cluster.node("node-b", **far("no", drops))
    _, text = ask()
    assert "`kubectl kubeproxy trace` shows the rule; `kube-proxy plan --cluster-cidr N` is there" in text


def test_the_api_server_has_the_node_of_an_endpoint_without_node_name(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes", ends=[end("10.244.1.8:3000", "")]))
    cluster.node("node-b", **far("no", DROPS))
    status, text = ask()
    assert (status, f"node-b does not deliver to {THERE}: {GUARD} (x)" in text) == (NO, True), text


def test_each_endpoint_of_a_node_is_checked(cluster: StandIn, ask: Ask):
    places = [f"10.244.1.{n}:3000" for n in (7, 8, 9)]
    there = {one: far("yes", place=one) for one in places}
    there[places[1]] = far("no", DROPS)
    cluster.node("node-a", **near("yes", ends=[end(one, "node-b", share=0.25) for one in places]))
    cluster.node("node-b", **there)
    status, text = ask()
    part = f"node-b does not deliver to {places[1]} (25.0% of the connections): {GUARD} (x)"
    assert (status, text.splitlines()[1]) == (NO, f"{SERVICE}: {part}")
    assert [text.count(f"  ok node-b delivers to {one} (25.0% of") for one in places] == [1, 0, 1]
    assert [place for pod, _, place in asked(cluster) if pod == "node-b"] == [f"{one}/tcp" for one in places]

    cluster.printed["kube-proxy-py-node-b"][places[0]] = far("no", DROPS, place=places[0])
    _, text = ask()
    assert text.count("Fix: on node-b: mend firewall\n") == 1
    both = f"{places[0]}, {places[1]} (50.0% of the connections)"
    assert text.splitlines()[1] == f"{SERVICE}: node-b does not deliver to {both}: {GUARD} (x)"
    assert len(valid("cluster", ask("-o", "json")[1])["deliveries"]) == 3


def test_endpoints_beyond_the_limit_are_named_and_make_the_answer_unknown(cluster: StandIn, ask: Ask):
    places = {f"10.244.1.{n}:3000": "node-b" for n in range(1, MOST + 3)} | {"10.244.2.1:3000": "node-c"}
    cluster.node("node-a", **near("yes", ends=[end(*one, share=0.05) for one in places.items()]))
    for name in ("node-b", "node-c"):
        cluster.node(name, **{one: far("yes", place=one) for one in places})
    status, text = ask()
    rest = "3 more endpoints (15.0% of the connections) could not be checked (?)"
    assert (status, text.splitlines()[1]) == (UNKNOWN, f"{FORWARDED}, and node-b, node-c deliver it; {rest}")
    assert [pod for pod, *_ in asked(cluster)] == ["node-a", *["node-b"] * (MOST - 1), "node-c"]
    unasked = (
        f"  ?  node-b was not asked about 10.244.1.{MOST}:3000 (5.0% of the connections): at most {MOST} endpoints"
    )
    assert (text.count("was not asked about"), unasked in text) == (3, True)


def test_endpoints_of_different_nodes_are_checked_first(cluster: StandIn, ask: Ask):
    ends = [end(f"10.244.{n}.9:3000", f"node-{n}") for n in range(2, MOST + 3)] + [end("10.244.1.8:3000", "node-b")]
    cluster.node("node-a", **near("unknown", NEAR_DOUBT, ends=ends))
    cluster.node("node-b", **far("yes"))
    status, text = ask()
    assert [pod for pod, client, _ in asked(cluster) if client == "10.244.0.7"] == ["node-a", "node-b"]
    assert status == UNKNOWN
    assert "which has 10.244.4.9:3000 (50.0% of the connections), gave no answer: no kube-proxy was found there" in text
    last = MOST + 1
    assert (
        f"?  node-{last} was not asked about 10.244.{last}.9:3000 (50.0% of the connections): at most {MOST} e" in text
    )


def test_a_proxy_that_does_not_have_the_endpoint_cannot_tell(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes"))
    cluster.node("node-b", **why(f"{SERVICE}: not ours", "no", "10.244.1.8:3000/tcp", []))
    status, text = ask()
    assert status == UNKNOWN
    assert (
        f"kube-proxy forwards it; the proxy of node-b does not have {THERE} as an endpoint (?)" in text.splitlines()[1]
    )


def listed(cluster: StandIn, *addresses: str) -> None:
    """Add an EndpointSlice of shop/web with these addresses."""
    labels = {"kubernetes.io/service-name": "web"}
    ends = [{"addresses": [one]} for one in addresses]
    made = {"metadata": {"name": "web-1", "namespace": "shop", "labels": labels}, "endpoints": ends}
    cluster.objects["endpointslices"].append(made | {"ports": [{"port": 3000}]})


UNKNOWN_THERE = why(f"{SERVICE}: not ours", "no", "10.244.1.8:3000/tcp", [])


def test_a_clients_node_with_outdated_endpoints_is_named_and_not_the_endpoints_node(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes", service="shop/web"))
    cluster.node("node-b", **UNKNOWN_THERE)
    listed(cluster, "10.244.0.9", "10.244.2.5")
    status, text = ask()
    late = f"the proxy of node-a has outdated objects: the API server does not have {THERE} as an endpoint"
    assert (status, text.splitlines()[1]) == (NO, f"{SERVICE}: {late} (x); kube-proxy forwards it")
    assert f"  x  {late}: if the endpoints have just changed, ask again\n" in text
    assert f"-  the proxy of node-b does not have {THERE} as an endpoint, and the API server no longer has it" in text
    assert (
        "Fix: see whether the proxy of node-a reaches the API server: `kubectl kubeproxy doctor --node node-a`\n"
        in text
    )
    status, text = ask("-o", "json")
    assert (status, late in valid("cluster", text)["heading"]) == (NO, True)


def test_an_endpoints_node_with_outdated_objects_is_named(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes", service="shop/web"))
    cluster.node("node-b", **UNKNOWN_THERE)
    listed(cluster, "10.244.0.9", "10.244.1.8")
    status, text = ask()
    late = f"the proxy of node-b does not have {THERE} as an endpoint, which the API server has: its objects are "
    assert (status, f": kube-proxy forwards it; {late}outdated, so it " in text.splitlines()[1]) == (UNKNOWN, True)
    assert "Fix: see whether the proxy of node-b reaches the API server: `kubectl kubeproxy doctor --node node" in text


def test_an_endpoint_has_each_port_of_a_range(cluster: StandIn, ask: Ask):
    place = "10.244.1.8:3005"
    here = near("yes", ends=[end(place, "node-b")], service="shop/web")
    answer = json.loads(here["out"])
    answer["why"]["steps"] = [{"passes": True, "text": "10.96.0.10 is the cluster IP, ports 3000-3010", "field": FIELD}]
    cluster.node("node-a", **here | {"out": json.dumps(answer)})
    cluster.node("node-b", **far("yes", place=place))
    listed(cluster, "10.244.1.8")
    assert (ask()[0], ask()[1].splitlines()[1]) == (YES, f"{FORWARDED}, and node-b delivers it")


def test_endpoints_that_cannot_be_listed_are_not_outdated(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("yes", service="shop/web"))
    cluster.node("node-b", **far("yes"))
    cluster.errors["endpointslices"] = "Error from server (Forbidden)"
    assert ask()[0] == YES


def test_a_probe_is_no_doubt_if_the_endpoints_node_drops_only_the_packets_of_the_clients_node():
    here, there, probe = (
        cast("WhyAnswer", decoded(one["out"].encode(), "why", ())[0])
        for one in (near("unknown", NEAR_DOUBT), far("yes"), far("no", DROPS))
    )
    here.node, there.node = "node-a", "node-b"
    here.doubt, reply = doubt(here.probes, here.findings), Reply(node="node-a", status=UNKNOWN)
    assert here.decided == "kube-proxy forwards it, but 10.244.1.8:3000 did not answer node-a (?)"
    excuse(here, reply, Delivery(here.why.endpoints[1], Reply(node="node-b"), there), probe)
    assert (here.answer, reply.status, here.decided, here.fixes) == ("yes", YES, "kube-proxy forwards it", [])
    assert here.findings[0].text.endswith(f": node-b drops packets of node-a itself ({GUARD}), but not this client's")


def test_a_first_line_without_a_doubt_gets_none_if_another_probe_is_no_doubt():
    other = NEAR_DOUBT | {"endpoint": "10.244.2.8:3000"}
    broken = found("broken", "endpoints", "TCP from this node to 10.244.0.9:3000: refused")
    here, there, probe = (
        cast("WhyAnswer", decoded(one["out"].encode(), "why", ())[0])
        for one in (near("no", broken, NEAR_DOUBT, other), far("yes"), far("no", DROPS))
    )
    here.node, there.node = "node-a", "node-b"
    here.probes = [*here.probes, replace(here.probes[0], address="10.244.2.8:3000")]
    excuse(here, Reply(node="node-a"), Delivery(here.why.endpoints[1], Reply(node="node-b"), there), probe)
    assert here.decided == "kube-proxy forwards it"


MAY_DROP = found("note", "firewall", "table netdev cloud, chain guard may drop packets, and is not evaluated")


def test_the_network_between_the_nodes_is_no_cause_of_a_silent_endpoint_on_the_clients_node(cluster: StandIn, ask: Ask):
    here = near("unknown", NEAR_DOUBT, heading=f"{SERVICE}: forwarded, if this node can (?)")
    answer = json.loads(here["out"])
    answer["probes"][0]["address"] = "10.244.0.9:3000"
    cluster.node("node-a", **here | {"out": json.dumps(answer)})
    cluster.node("node-b", **far("yes"))
    assert ask()[1].splitlines()[1].endswith("on node-a, forwarded, if node-a can (?); node-b delivers it")


def test_an_endpoint_that_answers_neither_the_client_nor_its_node_is_no_doubt_if_the_client_is_a_node(
    cluster: StandIn, ask: Ask
):
    here = near("no", NEAR_PROBE, heading="this node -> 10.96.0.10:80/tcp: kube-proxy forwards it")
    cluster.node("node-a", **here)
    probe = NEAR_DOUBT | {"why": "the pod network loses packets, or a policy perhaps drops those of the client"}
    cluster.node("node-b", **far("unknown", probe | {"fix": f"{AS_CLIENT.format('10.244.1.8:3000')}look at the pod"}))
    status, text = ask()
    seen = f"{THERE} answers no probe of node-b, its node: TCP from node-b to 10.244.1.8:3000: no answer within 1 s"
    assert (status, text.splitlines()[1]) == (NO, f"node-a -> 10.96.0.10:80/tcp: {seen} (x)")
    assert f"     x  {SILENT}: node-a, which is the client, does not reach it either\n" in text
    assert [line for line in text.splitlines() if line.startswith("Fix")] == ["Fix: look at the pod"]


def test_chains_that_may_drop_are_named_together_with_the_network(cluster: StandIn, ask: Ask):
    cluster.node("node-a", **near("unknown", NEAR_DOUBT, heading=f"{SERVICE}: forwarded, if this node can (?)"))
    cluster.node("node-b", **far("yes", MAY_DROP))
    status, text = ask()
    assert status == UNKNOWN
    line = f"node-b delivers it: see the network between the nodes; on node-b, {MAY_DROP['what']} (-)"
    assert text.splitlines()[1].endswith(line)


def test_chains_that_may_drop_are_in_the_first_line_of_a_connection_that_passes(cluster: StandIn, ask: Ask):
    there = far("yes", MAY_DROP), far("yes", MAY_DROP, place="10.244.1.9:3000")
    cluster.node("node-a", **near("yes", ends=[end(f"10.244.1.{n}:3000", "node-b") for n in (8, 9)]))
    cluster.node("node-b", **{f"10.244.1.{n}:3000": one for n, one in zip((8, 9), there, strict=True)})
    status, text = ask()
    line = f"{FORWARDED}, and node-b delivers it; on node-b, {MAY_DROP['what']} (-)"
    assert (status, text.splitlines()[1]) == (YES, line)
    cluster.printed["kube-proxy-py-node-b"]["10.244.1.9:3000"] = far("no", DROPS, place="10.244.1.9:3000")
    assert MAY_DROP["what"] not in ask()[1].splitlines()[1]


@pytest.mark.parametrize("note", [(MAY_DROP,), ()])
def test_a_udp_reply_that_only_the_endpoints_node_got_is_a_doubt(cluster: StandIn, ask: Ask, note: tuple[Json, ...]):
    here, there = near("yes"), far("yes", *note)
    for name, made, unanswered in (("node-a", here, True), ("node-b", there, False)):
        answer = json.loads(made["out"])
        answer["probes"][0] |= {"protocol": "UDP", "unanswered": unanswered}
        cluster.node(name, **made | {"out": json.dumps(answer)})
    status, text = ask()
    cause = MAY_DROP["what"] if note else "see the network between the nodes"
    line = f"node-b perhaps does not deliver to {THERE}: node-a got no UDP reply, and node-b got one: {cause} (?)"
    assert (status, text.splitlines()[1]) == (UNKNOWN, f"{FORWARDED}; {line}")


def test_addresses_of_endpoints_nodes_and_ineligible_endpoints_have_names(cluster: StandIn, ask: Ask):
    silent = found("broken", "routes", "nothing answers ARP for 192.0.2.2")
    cluster.node("node-a", **near("no", silent))
    cluster.node("node-b", **far("yes"))
    assert "nothing answers ARP for 192.0.2.2 (node node-b)" in ask()[1]
    answer = json.loads(near("no", ends=[], heading=f"{SERVICE}: dropped", service="shop/web")["out"])
    absent = {"address": "10.244.1.8:3000", "reason": "it is on node-b", "field": "nodeName", "slice": "web-1"}
    answer["why"] |= {"outcome": "dropped", "missing": [absent]}
    cluster.printed["kube-proxy-py-node-a"] = {"out": json.dumps(answer), "status": NO}
    end = {"addresses": ["10.244.1.8"], "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-8"}}
    about = {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}}
    cluster.objects["endpointslices"].append({"metadata": about, "endpoints": [end], "ports": [{"port": 3000}]})
    assert "not to 10.244.1.8:3000 (shop/web-8): it is on node-b" in ask()[1]
