"""`kubectl kubeproxy` with a substitute for kubectl: names, the selection of pods, hostile answers, and many nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kubeproxy.cluster.main import main
from kubeproxy.commands import NO, UNKNOWN, YES, watching
from kubeproxy.commands.parsers import parser_of
from kubeproxy.errors import HALTED, NO_PROXY, SILENT, NoAnswerError
from support.answers import refusal, valid
from support.kubectl_stand_in import StandIn

Json = dict[str, Any]
Run = Callable[..., tuple[int, str, str]]

VERSION = "0.1.0+g0123456789ab"


def test_the_plugin_needs_no_package_but_msgspec():
    """kubectl-kubeproxy, one file, contains no other."""
    lines = "sys.modules |= dict.fromkeys(['httptools', 'yaml'])", "import kubeproxy.cluster.main"
    subprocess.run(
        [sys.executable, "-c", "; ".join(("import sys", *lines, "import kubeproxy.cluster.completion"))], check=True
    )


HALT = "a signal (SIGSTOP) has stopped it: `kill -CONT 7`"


def made(**fields: Any) -> str:
    return json.dumps({"schemaVersion": 1, "version": VERSION, **fields})


def finding(what: str, severity: str = "broken") -> Json:
    return {"severity": severity, "about": "sysctl", "what": what, "why": "why it matters", "fix": "what mends it"}


def doctor(*findings: Json) -> Json:
    wrong = any(one["severity"] == "broken" for one in findings)
    return {"out": made(mode="nftables", pid=1, findings=findings, unknown=[]), "status": int(wrong)}


def why(heading: str, answer: str = "yes", elsewhere: str = "", **fields: Any) -> Json:
    decision = {
        "service": "shop/web",
        "source": "10.244.0.7",
        "destination": "10.96.0.10:80/tcp",
        "outcome": "forwarded",
        "clientSees": "the answer of the endpoint",
        "steps": [
            {"passes": True, "text": "10.96.0.10:80/TCP is the cluster IP of shop/web", "field": "spec.clusterIPs"}
        ],
        "endpoints": [{"address": "10.244.1.8:3000", "share": 1.0, "masqueraded": False, "node": "node-b"}],
        "elsewhere": {"node": elsewhere, "reason": "it is there", "field": "nodeName"} if elsewhere else None,
    }
    head = {"heading": heading, "decision": heading.partition(": ")[2], "answer": answer}
    out = made(**head, why=decision, findings=[], probes=[], fixes=[], next="", **fields)
    return {"out": out, "status": {"yes": 0, "no": 1, "unknown": 2}[answer]}


def service(version: str, *endpoints: str, state: str = "programmed", **more: Json | list[str]) -> Json:
    port = {
        "name": "http",
        "protocol": "TCP",
        "family": "IPv4",
        "frontends": [
            {"kind": "cluster", "address": "10.96.0.10:80", "fromPods": "endpoints", "fromNode": "", "fromOutside": ""}
        ],
        "endpoints": endpoints,
        "localEndpoints": endpoints[:1],
        **more,
    }
    return {
        "out": made(
            mode="nftables",
            namespace="shop",
            name="web",
            state=state,
            resourceVersion="7",
            slices={"web-1": version},
            ports=[port],
        )
    }


@pytest.fixture
def cluster(tmp_path: Path) -> StandIn:
    found = StandIn(tmp_path)
    found.objects["services"].append(
        {
            "metadata": {"name": "web", "namespace": "shop"},
            "spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]},
        }
    )
    target = {"addresses": ["10.244.1.8"], "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-8"}}
    labels, ports = {"kubernetes.io/service-name": "web"}, [{"port": 3000}]
    found.objects["endpointslices"].append(
        {"metadata": {"name": "web-1", "namespace": "shop", "labels": labels}, "endpoints": [target], "ports": ports}
    )
    found.pod("client", "shop", "node-a", ["10.244.0.7", "fd00:244::7"])
    return found


@pytest.fixture
def run(cluster: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def ask(*words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("PATH", cluster.install())
        status = main(words)
        return status, *capfd.readouterr()

    return ask


def asked(cluster: StandIn) -> list[tuple[str, list[str]]]:
    """Return the pod and the command of each call of a kube-proxy."""
    calls = [call for call in cluster.calls if "exec" in call]
    return [(call[call.index("--") - 1], call[call.index("--") + 1 :]) for call in calls]


def test_a_question_is_asked_in_the_pod_of_the_clients_node(cluster: StandIn, run: Run):
    cluster.node("node-a", **why("10.244.0.7 -> 10.96.0.10:80/tcp: kube-proxy forwards it"))
    cluster.node("node-b")
    status, text, _ = run("why", "pod/client", "svc/web:http", "-n", "shop", "--context=prod")
    assert status == YES
    command = ["kube-proxy", "why", "-o", "json", "--", "10.244.0.7", "shop/web:http"]
    assert asked(cluster) == [("kube-proxy-py-node-a", command)]
    assert all(call[0] == "--context=prod" for call in cluster.calls)
    assert "asked on node-a, pod kube-system/kube-proxy-py-node-a" in text
    assert "10.244.0.7 (shop/client) -> 10.96.0.10:80/tcp: kube-proxy forwards it" in text
    assert "100.0% to 10.244.1.8:3000 (shop/web-8) on node-b" in text


@pytest.mark.parametrize(
    ("client", "target", "arguments", "node"),
    [
        ("shop/client", "shop/web", ["10.244.0.7", "shop/web:80/tcp"], "node-a"),
        ("po/shop/client", "svc/shop/web:80", ["10.244.0.7", "shop/web:80"], "node-a"),
        ("10.244.0.7:40000", "10.96.0.10:53/udp", ["10.244.0.7:40000", "10.96.0.10:53/udp"], "node-a"),
        ("fd00:244::7", "[fd00:10:96::1]:80", ["fd00:244::7", "[fd00:10:96::1]:80"], "node-a"),
        ("10.244.1.99", "10.96.0.10:80", ["10.244.1.99", "10.96.0.10:80"], "node-b"),
        ("192.0.2.2", "shop/web:80", ["192.0.2.2", "shop/web:80"], "node-b"),
        ("node/node-b", "shop/web:80", ["node", "shop/web:80"], "node-b"),
        ("shop/client", "node/node-b:30080", ["10.244.0.7", "192.0.2.2:30080"], "node-a"),
        ("shop/client", "pod/shop/client:8080", ["10.244.0.7", "10.244.0.7:8080"], "node-a"),
        ("kube-system/kube-proxy-py-node-b", "shop/web:80", ["node", "shop/web:80"], "node-b"),
    ],
)
def test_names_are_resolved(client: str, target: str, arguments: list[str], node: str, cluster: StandIn, run: Run):
    for name in ("node-a", "node-b"):
        cluster.node(name, **why("a -> b: kube-proxy forwards it"))
    status, _, errors = run("why", client, target)
    assert (status, errors) == (YES, "")
    assert asked(cluster) == [(f"kube-proxy-py-{node}", ["kube-proxy", "why", "-o", "json", "--", *arguments])]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("why", "pod/none", "shop/web:80", "-n", "shop"), 'pods "none" not found in namespace shop\n'),
        (
            ("why", "pod/client", "shop/web:80", "-n", "a"),
            'pods "client" not found in namespace a; there is shop/client',
        ),
        (
            ("why", "shop/client", "web:80"),
            'services "web" not found in the namespace of the kubeconfig\'s context (see -n); there is shop/web\n',
        ),
        (("why", "shop/client", "shop/none:80"), 'services "none" not found in namespace shop\n'),
        (("why", "svc/shop/web", "shop/web:80"), "a Service is no client"),
        (
            ("why", "shop/client", "shop/web:htpp"),
            "Error: Service shop/web has no port htpp; it has http 80/TCP (spec.ports)\n",
        ),
        (
            ("trace", "shop/client", "shop/web:http/udp"),
            "Error: Service shop/web has no UDP port http; it has http 80/TCP (spec.ports)\n",
        ),
        (("why", "node/node-z", "shop/web:80"), "node node-z: there is no such Node"),
        (("why", "node", "shop/web:80"), "give node/NAME"),
        (("why", "10.244.0.7", "[fd00::1]:80"), "client (10.244.0.7) and destination (fd00::1) have no address family"),
        (("why", "shop/client", "[fd00::1]:80", "--node", "node-z"), "node node-z: there is no such Node"),
        (("why", "--", "--all", "shop/web:80"), "'--all' is no address and no name"),
        (("why", "shop/client", "shop/-o:80"), "'shop/-o:80' is no address and no name"),
        (("why", "shop/client", "shop/web:80; id"), "is no address and no name"),
        (("why", "shop/client", "node/node-a:80/../x"), "is no address and no name"),
        (("services", "--", "-x"), "'-x' is no address and no name"),
        (("doctor", "--node=--all"), "node --all: there is no such Node"),
    ],
)
def test_a_wrong_question_is_refused_before_a_node_is_asked(
    words: tuple[str, ...], says: str, cluster: StandIn, run: Run
):
    cluster.node("node-a")
    status, text, errors = run(*words)
    assert (status, text) == (UNKNOWN, "")
    assert says in errors
    assert asked(cluster) == []


def test_a_port_without_a_name_is_asked_for_if_there_are_several(cluster: StandIn, run: Run):
    cluster.node("node-a")
    cluster.objects["services"][0]["spec"]["ports"].append({"name": "dns", "port": 53, "protocol": "UDP"})
    status, text, _ = run("why", "shop/client", "shop/web", "-o", "json")
    error = "Service shop/web has no port in this question; it has http 80/TCP, dns 53/UDP (spec.ports)"
    assert (status, json.loads(text)["error"]) == (UNKNOWN, error)
    assert asked(cluster) == []


def test_a_question_about_a_service_needs_no_port(cluster: StandIn, run: Run):
    cluster.node("node-a")
    web = cluster.objects["services"][0]
    web["metadata"]["namespace"] = "default"
    web["spec"]["ports"].append({"name": "dns", "port": 53, "protocol": "UDP"})
    run("services", "svc/web")
    assert asked(cluster)[0][1][-1] == "default/web"


def test_a_namespace_that_does_not_exist_is_the_only_one_that_the_error_names(cluster: StandIn, run: Run):
    cluster.node("node-a")
    cluster.errors["services"] = 'Error from server (NotFound): namespaces "other" not found'
    _, _, errors = run("why", "shop/client", "svc/web:80", "-n", "other")
    assert errors == 'Error: Error from server (NotFound): namespaces "other" not found\n'


@pytest.mark.parametrize("option", ["-n", "--namespace=shop", "-nshop", "--context"])
def test_an_option_before_the_command_is_refused(option: str, run: Run, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        run(option, "shop", "why", "client", "web:80")
    said = f"error: put {option} after the command, as in `kubectl kubeproxy why pod/client svc/web:80 -n shop`\n"
    assert (error.value.code, capfd.readouterr().err.endswith(said)) == (UNKNOWN, True)


def test_options_of_the_command_reach_the_node_as_single_arguments(cluster: StandIn, run: Run):
    cluster.node("node-a", **why("a -> b: kube-proxy forwards it"))
    run("why", "shop/client", "shop/web:80", "--interface=--no-probe", "--no-probe")
    (_, command), *_ = asked(cluster)
    assert command[4:7] == ["--no-probe", "--interface=--no-probe", "--"]


@pytest.mark.parametrize(
    "words",
    [
        ("why", "shop/client", "shop/web:80", "--no-probe"),
        ("doctor",),
        ("verify", "--api"),
        ("verify", "shop/web"),
        ("services",),
        ("services", "shop/web"),
        ("flows", "--seconds", "2"),
        ("flows", "shop/web"),
    ],
)
def test_the_nodes_command_gets_the_given_arguments(words: tuple[str, ...], cluster: StandIn, run: Run):
    cluster.node("node-a")
    run(*words)
    ((_, (program, command, *given)),) = asked(cluster)
    found = parser_of(command).parse_args(given)
    assert (program, command, found.output) == ("kube-proxy", words[0], "json")


def test_a_pod_that_has_not_started_is_named(cluster: StandIn, run: Run):
    cluster.node("node-a")
    cluster.pod("new", "shop", "", [], phase="Pending")
    assert "pod shop/new has no node and address: it is Pending" in run("why", "shop/new", "shop/web:80")[2]


@pytest.mark.parametrize(
    ("cluster_ips", "readable", "again"),
    [(["10.96.0.10"], True, 0), (["10.96.0.10", "fd00:10:96::10"], True, 1), (["fd00:10:96::10"], False, 0)],
)
def test_a_nodeport_is_asked_about_again_in_a_family_of_its_service(
    cluster_ips: list[str], readable: bool, again: int, cluster: StandIn, run: Run
):
    cluster.objects["services"][0]["spec"]["clusterIPs"] = cluster_ips
    cluster.errors |= {} if readable else {"services": 'services "web" is forbidden'}
    cluster.node("node-a", **why("10.244.0.7 -> 192.0.2.1:30080/tcp: kube-proxy forwards it"))
    cluster.objects["nodes"][0]["status"]["addresses"].append({"type": "InternalIP", "address": "fd00:100::1"})
    _, text, _ = run("why", "shop/client", "node/node-a:30080")
    assert text.count("Next: the same over IPv6: kubectl kubeproxy why shop/client '[fd00:100::1]:30080'\n") == again


def test_the_node_that_an_answer_names_is_asked_next(cluster: StandIn, run: Run):
    cluster.node("node-a", **why("x -> y: decided on node-b", "unknown", elsewhere="node-b"))
    cluster.node("node-b", **why("x -> y: decided here"))
    status, text, _ = run("why", "10.244.0.99", "shop/web:80")
    assert (status, "decided here" in text) == (YES, True)


def test_a_client_outside_is_asked_about_on_all_nodes(cluster: StandIn, run: Run):
    for name in ("node-a", "node-b", "node-c"):
        cluster.node(name, **why("x -> y: kube-proxy forwards it"))
    cluster.printed["kube-proxy-py-node-c"] = why("x -> y: dropped, the client sees a timeout", "no")
    status, text, errors = run("why", "198.51.100.9", "203.0.113.1:80")
    assert status == NO
    assert "198.51.100.9 is on no known node, so all nodes are asked" in errors
    assert "1 of 3 nodes: 10.244.0.7 -> 10.96.0.10:80/tcp: dropped, the client sees a timeout: node-c" in text
    assert "2 of 3 nodes: 10.244.0.7 -> 10.96.0.10:80/tcp: kube-proxy forwards it: node-a, node-b" in text
    assert text.count("     10.96.0.10:80/TCP is the cluster IP of shop/web\n") == 2
    assert len(asked(cluster)) == 3
    status, text, _ = run("why", "198.51.100.9", "203.0.113.1:80", "--node", "node-a")
    assert (status, "asked on node-a" in text) == (YES, True)


@pytest.mark.parametrize("target", ["192.0.2.2:30080", "node/node-b:30080"])
def test_a_client_outside_is_asked_about_on_the_node_that_has_the_address(cluster: StandIn, run: Run, target: str):
    for name in ("node-a", "node-b"):
        cluster.node(name, **why("x -> y: kube-proxy forwards it"))
    status, text, errors = run("why", "198.51.100.9", target)
    assert (status, errors) == (YES, "")
    assert "asked on node-b" in text
    assert [pod for pod, _ in asked(cluster)] == ["kube-proxy-py-node-b"]


def test_common_values_are_reported_once_and_differences_by_node(cluster: StandIn, run: Run):
    for number in range(4):
        found = [finding(f"the Go kube-proxy runs here too (pid {number})")] if number else []
        cluster.node(f"node-{number}", **doctor(finding("a note of all", "note"), *found))
    status, text, _ = run("doctor")
    assert status == NO
    assert "4 of 4 nodes answered, 4 in nftables mode, 4 of version 0.1.0+g0123456789ab" in text
    assert text.count("a note of all") == 1
    assert "x  3 of 4 nodes: the Go kube-proxy runs here too (pid 1): node-1, node-2, node-3" in text
    assert "Fix: what mends it" in text


def test_nodes_of_another_mode_or_version_are_named(cluster: StandIn, run: Run):
    for name in ("node-a", "node-b", "node-c"):
        cluster.node(name, **doctor())
    cluster.printed["kube-proxy-py-node-c"] = {"out": made(mode="ipvs", pid=1, findings=[], unknown=[]), "status": 0}
    cluster.printed["kube-proxy-py-node-b"]["out"] = doctor()["out"].replace(VERSION, "0.0.9")
    status, text, _ = run("doctor")
    assert status == YES
    assert "3 of 3 nodes answered, 2 in nftables mode, 1 in ipvs mode, 2 of version 0.1.0+g0123456789ab, 1 of" in text
    assert "\n  -  1 in ipvs mode: node-c\n  -  1 of version 0.0.9: node-b\n" in text


def test_a_missing_endpoint_and_an_old_slice_are_named(cluster: StandIn, run: Run):
    for name in ("node-a", "node-b", "node-d"):
        cluster.node(name, **service("9", "10.244.0.7:3000", "10.244.1.8:3000"))
    cluster.node("node-c", **service("8", "10.244.0.7:3000"))
    status, text, _ = run("services", "shop/web")
    assert status == NO
    assert "x  1 of 4 nodes lacks endpoint 10.244.1.8:3000 (shop/web-8) (http TCP IPv4): node-c" in text
    assert "x  1 of 4 nodes alone: slice web-1 in version 8: node-c" in text
    assert text.count("10.244.0.7:3000") == 1


def test_the_reason_of_outdated_objects_is_named(cluster: StandIn, run: Run):
    late = finding("the API server cannot be reached", "broken")
    for words, answer in ((("shop/web",), service("9", "10.244.0.7:3000")), ((), {"out": made(mode="", services=[])})):
        cluster.node("node-a", **answer)
        cluster.printed["kube-proxy-py-node-a"]["out"] = json.dumps(json.loads(answer["out"]) | {"findings": [late]})
        _, text, _ = run("services", *words)
        assert "x  the API server cannot be reached\n" in text


def test_a_service_without_endpoints_is_noted(cluster: StandIn, run: Run):
    cluster.node("node-a", **service("9"))
    status, text, _ = run("services", "shop/web")
    assert (status, "\n  -  no endpoint for new connections (http TCP IPv4)\n" in text) == (YES, True), text


def test_weights_drained_and_ejected_endpoints_are_noted(cluster: StandIn, run: Run):
    drained, ejected = "10.244.1.9:3000", "10.244.1.10:3000"
    pools = {"weights": {"10.244.0.7:3000": 100, "10.244.1.8:3000": 25}, "drainedEndpoints": [drained]}
    for name in ("node-a", "node-b"):
        lost = (
            {"ejectedEndpoints": {ejected: "it does not answer"}} if name == "node-b" else {"otherEndpoints": [ejected]}
        )
        cluster.node(name, **service("9", "10.244.0.7:3000", "10.244.1.8:3000", **pools, **lost))
    status, text, _ = run("services", "shop/web")
    assert (status, text.count("ok endpoint 10.244.")) == (YES, 4), text
    weights = "endpoints 10.244.0.7:3000 (100) 10.244.1.8:3000 (shop/web-8) (25)"
    assert f"  -  all 2 nodes: http TCP IPv4: {weights}\n" in text, text
    assert f"  -  all 2 nodes: http TCP IPv4: drained {drained}\n" in text, text
    assert f"  -  1 of 2 nodes: http TCP IPv4: ejected {ejected} (it does not answer): node-b\n" in text, text


def test_nodes_without_local_endpoint_do_not_differ_in_the_list_of_services(cluster: StandIn, run: Run):
    row = {"namespace": "shop", "name": "web", "state": "programmed", "reason": "", "addresses": ["10.96.0.10:80/tcp"]}
    for name, here in (("node-a", 0), ("node-b", 1)):
        it = row | {"endpoints": here, "serving": 1, "unserved": ["80/TCP"] * (not here), "problems": []}
        cluster.node(name, out=made(mode="nftables", services=[it]), status=0)
    status, text, _ = run("services")
    assert status == YES
    assert "\n  ok shop/web: programmed, 1 endpoint: 10.96.0.10:80/tcp\n" in text
    assert "\n  -  1 of 2 nodes: shop/web: no endpoint for 80/TCP: node-a\n" in text


def test_differences_of_the_kernel_are_named_by_node(cluster: StandIn, run: Run):
    lost = {"service": ["shop", "web"], "kind": "missing", "what": "endpoint 10.244.1.8:3000", "where": "map endpoints"}
    for name in ("node-a", "node-b"):
        found = [lost | {"wanted": "", "present": ""}] if name == "node-b" else []
        lists: Json = {key: [] for key in ("behind", "onTheirWay", "restless", "caveats", "troubles")}
        cluster.node(name, out=made(mode="nftables", services=5, findings=found, **lists), status=len(found))
    status, text, _ = run("verify")
    assert status == NO
    assert "1 of 2 nodes: shop/web: missing: endpoint 10.244.1.8:3000 [map endpoints]: node-b" in text
    assert "ok compared 5 Services" in text


def test_an_api_server_that_does_not_answer_is_no_difference(cluster: StandIn, run: Run):
    lists: Json = {key: [] for key in ("findings", "behind", "onTheirWay", "restless", "caveats")}
    for name, troubles in (("node-a", []), ("node-b", ["the API server did not answer within 10 s"])):
        out = made(mode="nftables", services=1, troubles=troubles, **lists)
        cluster.node(name, out=out, status=2 * len(troubles))
    status, text, _ = run("verify", "shop/web")
    assert status == UNKNOWN
    assert "?  1 of 2 nodes: the API server did not answer within 10 s: node-b\n" in text
    assert "Fix: " not in text


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            'Error from server (Forbidden): pods "{pod}" is forbidden: User "dev" cannot create resource "pods/exec"',
            (
                'no answer of node-a, node-b: User "dev" cannot create resource "pods/exec": give your user the right '
                "to create pods/exec in namespace kube-system (`kubectl auth can-i create pods/exec -n kube-system`)\n"
            ),
        ),
        (
            NoAnswerError("no kube-proxy answers at /run/x", "run `kubectl exec`", kind=NO_PROXY),
            (
                "no answer of node-a, node-b: no kube-proxy answers at /run/x: `kubectl kubeproxy doctor` has the "
                "reason; the rules of a stopped proxy remain in effect\n"
            ),
        ),
        (
            'error: unable to upgrade connection: container not found ("kube-proxy")',
            (
                "no answer of node-b: its kube-proxy does not run (error: unable to upgrade connection: container not "
                'found ("kube-proxy")), '
                "and the kube-proxy's rules are still in effect: see `kubectl -n kube-system logs "
                "kube-proxy-py-node-b -c kube-proxy --previous`\n"
            ),
        ),
        (
            NoAnswerError("the proxy at /run/x did not answer within 10 s", "x", kind=SILENT, more="it drops"),
            (
                "no answer of node-b: the proxy at /run/x did not answer within 10 s: see its log (`kubectl -n "
                "kube-system logs kube-proxy-py-node-b -c kube-proxy`), or end it: `kubectl -n kube-system delete pod "
                "kube-proxy-py-node-b`; it drops\n"
            ),
        ),
        (
            NoAnswerError("the proxy at /run/x did not answer within 10 s", HALT, kind=HALTED),
            f"did not answer within 10 s: {HALT}\n",
        ),
    ],
)
def test_a_node_without_an_answer_has_a_fix_for_a_user_of_kubectl(
    error: str | NoAnswerError, says: str, cluster: StandIn, run: Run
):
    for name in ("node-a", "node-b"):
        text = {"err": str(error).format(pod=f"kube-proxy-py-{name}") + "\n"}
        cluster.node(name, **text if isinstance(error, str) else refusal(error), status=2)
    status, text, _ = run("verify")
    assert (status, says in text) == (UNKNOWN, True), text


def test_nodes_that_a_load_balancer_avoids_are_no_error(cluster: StandIn, run: Run):
    for name in ("node-a", "node-b"):
        cluster.node(name, **why("x -> y: kube-proxy forwards it"))
    answer = json.loads(why("x -> y: dropped, the client sees a timeout", "no")["out"])
    answer["why"] |= {"outcome": "dropped", "endpoints": []}
    address = {"passes": True, "text": "203.0.113.1:80/TCP is the load balancer address", "field": FRONT}
    answer["why"]["steps"] = [address, {"passes": False, "text": "policy Local", "field": "spec.externalTrafficPolicy"}]
    avoided = {"out": json.dumps(answer | {"fixes": ["set the policy"]}), "status": 1}
    cluster.printed["kube-proxy-py-node-b"] = avoided
    status, text, _ = run("why", "198.51.100.9", "203.0.113.1:80")
    assert status == YES
    assert "-  1 of 2 nodes: 10.244.0.7 -> 10.96.0.10:80/tcp: dropped, the client sees a timeout: node-b\n" in text
    assert "see whether it obeys the health check at spec.healthCheckNodePort" in text
    assert "set the policy" not in text
    cluster.printed["kube-proxy-py-node-a"] = avoided
    assert run("why", "198.51.100.9", "203.0.113.1:80")[0] == NO


FRONT = "status.loadBalancer.ingress"


def test_connections_of_all_nodes_are_added_up(cluster: StandIn, run: Run):
    for name, count in (("node-a", 3), ("node-b", 4)):
        used = {"connections": count, "closing": 0, "unanswered": count - 3, "newPerSecond": 0.5}
        end = {"address": "10.244.1.8:3000", "pod": "shop/web-8", "share": 1.0, "serving": True, **used}
        gone = end | {"address": "10.244.1.9:3000", "pod": "", "serving": False}
        port = {"service": "shop/web", "port": "http/TCP", "family": "IPv4", "endpoints": [end, gone], "clients": []}
        port |= used
        cluster.node(name, out=made(mode="nftables", ports=[port], look={}), status=count - 3)
    status, text, _ = run("flows", "shop/web")
    assert status == NO
    assert "10.244.1.8:3000 http/TCP  shop/web-8            7            1.0    1           0" in text
    assert "10.244.1.9:3000 http/TCP  no endpoint any more  7            1.0    1           0" in text
    assert "x  1 of 2 nodes: shop/web: connections to which nothing came back for a second: node-b" in text


HOSTILE = "\x1b]0;owned\x07\u202etxt.exe\r\x9b31m"


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ({"out": "no JSON" + HOSTILE, "err": "Error: " + HOSTILE, "status": 1}, "]0;owned"),
        ({"out": '{"schemaVersion": 2}'}, "this plugin cannot decode the node's answer: Invalid enum value 2"),
        ({"out": made(mode=5, findings=[], unknown=[])}, "Expected `str`, got `int` - at `$.mode`"),
        ({"out": made(mode="", findings=[finding("x", "dire")], unknown=[])}, "cannot decode the node's answer"),
        ({"out": made(mode="", findings=[{}], unknown=[])}, "cannot decode the node's answer"),
        ({"out": "{" + '"a":{' * 100_000}, "cannot decode the node's answer"),
        ({"out": '{"a":"\ud800"}'.encode("utf-8", "replace").decode()}, "cannot decode the node's answer"),
        ({"flood": 5 << 20}, "the answer is larger than 4096 kB"),
        ({"err": "e" * (1 << 20)}, "the answer is larger than 256 kB"),
        ({"err": "error: unable to upgrade connection: container not found", "status": 0}, "container not found"),
        ({}, "exit code 0 without a message"),
    ],
)
def test_a_hostile_or_broken_answer_is_a_node_without_one(printed: Json, says: str, cluster: StandIn, run: Run):
    cluster.node("node-a", **printed)
    cluster.node("node-b", **doctor(finding("net.ipv4.ip_forward is 0" + HOSTILE)))
    status, text, _ = run("doctor")
    assert status == NO
    assert "1 of 2 nodes answered" in text
    assert "?  no answer of node-a: " in text
    assert says in text
    assert "net.ipv4.ip_forward is 0" in text
    assert text.replace("\n", "").isprintable()
    whole = run("doctor", "-o", "json")[1]
    assert whole.replace("\n", "").isprintable()
    valid("cluster", whole)


def test_names_of_the_api_that_could_be_options_are_not_used(cluster: StandIn, run: Run):
    cluster.node("node-a", **doctor())
    cluster.objects["pods"][-1]["metadata"]["name"] = "--help"
    status, _, errors = run("doctor")
    assert (status, asked(cluster)) == (UNKNOWN, [])
    assert "'--help' is not the name of an object" in errors


def test_missing_rights_are_named(cluster: StandIn, run: Run):
    denied = 'Error from server (Forbidden): {} is forbidden: User "me" cannot list resource'
    cluster.node("node-a", **doctor())
    cluster.node("node-b", err=denied.format("pods/exec"), status=0)
    cluster.errors["nodes"] = denied.format("nodes")
    status, text, errors = run("doctor")
    assert status == UNKNOWN
    assert (
        "nodes could not be listed, so nodes without a kube-proxy are unknown: Error from server (Forbidden)" in errors
    )
    assert 'no answer of node-b: User "me" cannot list resource: give your user the right to create pods/exec' in text
    cluster.errors["pods"] = denied.format("pods")
    status, text, errors = run("doctor")
    assert (status, text) == (UNKNOWN, "")
    assert "Error from server (Forbidden): pods is forbidden" in errors


def test_a_node_that_hangs_is_named(cluster: StandIn, run: Run):
    cluster.node("node-a", **doctor())
    cluster.node("node-b", hangs=True)
    status, text, _ = run("doctor", "--timeout", "6")
    assert status == UNKNOWN
    assert "1 of 2 nodes answered" in text
    assert "no answer of node-b: no answer within 6 s" in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_interrupt_ends_the_plugin_at_once(form: str, cluster: StandIn, tmp_path: Path):
    cluster.node("node-a", hangs=True)
    cluster.node("node-b", hangs=True)
    environment = {"PATH": cluster.install(), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kubeproxy.cluster.main", "doctor", "--at-once=1", "-o", form]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not (tmp_path / "running").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # not to kubectl: a shell makes background processes ignore it
        assert process.communicate(timeout=10)[0] == b""
    assert process.returncode == UNKNOWN


def test_errors_are_json_too(cluster: StandIn, run: Run):
    cluster.node("node-a")
    status, text, errors = run("why", "pod/none", "shop/web:80", "-n", "shop", "-o", "json")
    assert status == UNKNOWN
    assert errors == f"Error: {valid('error', text)['error']}\n"


def test_a_node_without_a_running_proxy_is_examined_but_has_not_answered(cluster: StandIn, run: Run):
    cluster.node("node-a", **doctor(finding("net.ipv4.ip_forward is 0")))
    silence = "no kube-proxy answers at /run/kube-proxy/control.sock"
    findings = [finding("net.ipv4.ip_forward is 0")]
    cluster.node("node-b", out=made(mode="iptables", pid=0, findings=findings, unknown=[silence]), status=NO)
    status, text, _ = run("doctor")
    assert (status, text.splitlines()[0]) == (NO, f"1 of 2 nodes answered, 1 in nftables mode, 1 of version {VERSION}")
    assert f"?  1 of 2 nodes: {silence}: node-b" in text
    assert "x  all 2 nodes: net.ipv4.ip_forward is 0" in text
    status, text, _ = run("doctor", "-o", "json")
    found = valid("cluster", text)
    assert [reply["dead"] for reply in found["nodes"]] == [False, True]
    assert found["modes"] == {"nftables": 1}


def test_nodes_with_the_go_kube_proxy_are_counted_and_no_error(cluster: StandIn, run: Run):
    cluster.node("node-a", **doctor())
    refusal = {"err": "Usage:\n  kube-proxy [flags]\nError: unknown shorthand flag: 'o' in -o\n", "status": 1}
    cluster.node("node-b", app="kube-proxy", **refusal, version="Kubernetes v1.36.0\n")
    status, text, _ = run("doctor")
    assert status == YES
    assert "-  1 with the Go kube-proxy v1.36.0, which cannot answer: node-b" in text


def test_pods_are_selected_by_the_labels_of_chart_and_kubeadm(cluster: StandIn, run: Run):
    cluster.node("node-a", app="mine-kube-proxy-py", **doctor())
    cluster.node("node-b", app="kube-proxy", **doctor())
    cluster.node("node-c", app="cilium", **doctor())
    cluster.node("node-d", **doctor())
    cluster.objects["pods"][-1]["status"]["phase"] = "Pending"
    cluster.pod("old", "kube-system", "node-a", [], app="kube-proxy")["metadata"]["deletionTimestamp"] = "2026-11-26"
    status, text, _ = run("doctor")
    assert status == UNKNOWN
    assert sorted(pod for pod, _ in asked(cluster)) == ["kube-proxy-node-b", "mine-kube-proxy-py-node-a"]
    assert "no answer of node-c: no pod of kube-proxy in namespace kube-system" in text
    assert "no answer of node-d: pod kube-system/kube-proxy-py-node-d is Pending" in text
    run("doctor", "--proxy-selector", "k8s-app=cilium", "--node", "node-c")
    assert asked(cluster)[-1][0] == "cilium-node-c"
    assert "no kube-proxy in namespace other" in _error(run("doctor", "--proxy-namespace", "other"))


def _error(result: tuple[int, str, str]) -> str:
    return result[1] + result[2]


def test_a_missing_kubectl_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor"]) == UNKNOWN
    assert "kubectl cannot be started: No such file or directory; it must be in PATH" in capfd.readouterr().err


def test_200_nodes_are_asked_16_at_a_time(cluster: StandIn, monkeypatch: pytest.MonkeyPatch, capfd):
    for number in range(200):
        ends = ["10.244.0.7:3000", *(["10.244.1.8:3000"] if number % 80 else [])]
        cluster.node(f"node-{number:03}", **service("9", *ends))
    monkeypatch.setenv("PATH", cluster.install())
    assert main(["services", "svc/web", "-n", "shop"]) == NO
    text = capfd.readouterr().out
    assert len(asked(cluster)) == 200
    assert 2 < max(cluster.at_a_time) <= 16
    lacking = "endpoint 10.244.1.8:3000 (shop/web-8) (http TCP IPv4): node-000, node-080, node-160"
    assert f"3 of 200 nodes lack {lacking}" in text


def test_watching_prints_the_facts_that_change(cluster: StandIn, run: Run, monkeypatch: pytest.MonkeyPatch):
    for name in ("node-a", "node-b"):
        cluster.node(name, **service("3", "10.244.0.7:8080"))
    later = iter((service("4", "10.244.0.7:8080"), {"err": "Error: no kube-proxy answers\n", "status": 2, "out": ""}))

    def wait(_: float) -> None:
        if not (changed := next(later, None)):
            raise KeyboardInterrupt
        cluster.printed["kube-proxy-py-node-b"].update(changed)
        cluster.install()

    monkeypatch.setattr(watching, "_wait", wait)
    status, text, _ = run("services", "shop/web", "-w")
    lines = [line[13:] for line in text.splitlines() if line[2:3] == ":"]
    assert status == YES
    assert lines == [
        "new     x  1 of 2 nodes alone: slice web-1 in version 3: node-a",
        "new     x  1 of 2 nodes alone: slice web-1 in version 4: node-b",
        "gone    ok slice web-1 in version 3",
        "new     ok slice web-1 in version 3",
        "new     ?  no answer of node-b: no kube-proxy answers",
        "gone    x  1 of 2 nodes alone: slice web-1 in version 3: node-a",
        "gone    x  1 of 2 nodes alone: slice web-1 in version 4: node-b",
    ]
