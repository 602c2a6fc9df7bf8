"""Commands that read files: how they resolve a NAME, their answers without a programmed state, and their JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask import offline
from kubeproxy.ask.checks import checkup, doctor, greeting
from kubeproxy.ask.checks.checkup import Checkup
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.kernel import present
from kubeproxy.ask.offline import desk
from kubeproxy.backends.mode import Mode, Trace
from kubeproxy.commands import conntrack
from kubeproxy.commands.parsers import parser_of, run
from kubeproxy.commands.services import service_name
from kubeproxy.control import client
from kubeproxy.control.client import Client
from kubeproxy.control.listener import listen
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.errors import ApplyError, ConfigError
from kubeproxy.kernel.conntrack.tracked import Level, Refusals
from kubeproxy.kernel.proc import processes
from kubeproxy.model.addresses import Family
from support.answers import valid

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "shop"},
    "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "protocol": "TCP"}]},
}


@pytest.fixture
def folder(tmp_path: Path) -> list[str]:
    (tmp_path / "web.json").write_text(json.dumps(SERVICE))
    return ["--manifests", str(tmp_path), "--hostname-override", "here"]


@pytest.mark.parametrize(
    ("text", "name"),
    [("web", ("default", "web")), ("shop/web", ("shop", "web")), ("s/" + "n" * 253, ("s", "n" * 253))],
)
def test_a_name_without_namespace_is_in_default(text: str, name: tuple[str, str]) -> None:
    assert service_name(text) == name


@pytest.mark.parametrize("text", ["", "/web", "shop/", "a/b/c", "n" * 7000])
def test_an_invalid_name_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME: expected NAMESPACE/NAME, or a NAME in default, got '") as error:
        service_name(text)
    assert len(str(error.value)) < 400


def test_without_a_proxy_services_are_planned(folder: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["services", *folder]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("  -  ")
    assert "the answer follows from the objects alone" in lines[0]
    assert lines[2].split()[:2] == ["shop/web", "planned"]
    assert run(["services", "shop/web", "-o", "json", *folder]) == 0
    assert json.loads(capfd.readouterr().out)["state"] == "planned"


def test_endpoints_are_counted_as_this_node_uses_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    local = {**SERVICE, "spec": {**SERVICE["spec"], "internalTrafficPolicy": "Local"}}
    dual = {"metadata": {"name": "dual", "namespace": "shop"}, "spec": {**SERVICE["spec"], "clusterIP": "10.96.0.11"}}
    dual["spec"]["clusterIPs"] = ["10.96.0.11", "fd00:96::11"]
    (tmp_path / "web.json").write_text(json.dumps(local))
    (tmp_path / "dual.json").write_text(json.dumps({**SERVICE, **dual}))
    far = {"metadata": {"name": "far", "namespace": "shop"}, "spec": {**local["spec"], "clusterIP": "10.96.0.12"}}
    (tmp_path / "far.json").write_text(json.dumps({**SERVICE, **far}))
    for service, family, addresses in (
        ("web", "IPv4", {"10.244.0.7": "here", "10.244.1.7": "there"}),
        ("far", "IPv4", {"10.244.1.7": "there"}),
        ("dual", "IPv4", {"10.244.0.7": "here", "10.244.1.7": "there"}),
        ("dual", "IPv6", {"fd00:244::7": "here", "fd00:244:1::7": "there"}),
    ):
        piece = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-{family.lower()}",
                "namespace": "shop",
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": family,
            "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
            "endpoints": [{"addresses": [address], "nodeName": node} for address, node in addresses.items()],
        }
        (tmp_path / f"{service}-{family}.json").write_text(json.dumps(piece))
    folder = ["--manifests", str(tmp_path), "--hostname-override", "here"]
    assert run(["services", *folder]) == 0
    rows = [line.split("  ") for line in capfd.readouterr().out.splitlines()[1:]]
    assert {row[0]: [cell.strip() for cell in row if cell.strip()][2] for row in rows[1:]} == {
        "shop/dual": "2",
        "shop/far": "0 of 1 on this node (policy Local)",
        "shop/web": "1 of 2",
    }
    assert run(["services", "-o", "json", *folder]) == 0
    assert [one["endpoints"] for one in json.loads(capfd.readouterr().out)["services"]] == [2, 0, 1]


def test_a_port_without_endpoints_is_marked_and_does_not_change_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = [{"name": "http", "port": 80}, {"name": "dead", "port": 81}]
    piece = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080}],
        "endpoints": [{"addresses": ["10.244.0.7"]}],
    }
    (tmp_path / "web.json").write_text(json.dumps({**SERVICE, "spec": {**SERVICE["spec"], "ports": ports}}))
    folder = ["--manifests", str(tmp_path), "--hostname-override", "here"]
    for count, lines, lacking, cause in (
        (" 0 (x): no endpoints ", 2, ["80/TCP", "81/TCP"], "no endpoints"),
        (" 1, none for 81/TCP (x): no port named dead ", 1, ["81/TCP"], "no port named dead"),
    ):
        assert run(["services", *folder]) == 0
        assert count in capfd.readouterr().out
        assert run(["services", "shop/web", *folder]) == 0
        assert capfd.readouterr().out.count("    endpoints    none (x)") == lines
        assert run(["services", "-o", "json", *folder]) == 0
        made = valid("services", capfd.readouterr().out)
        assert [(one["unserved"], one["cause"]) for one in made["services"]] == [(lacking, cause)]
        (tmp_path / "piece.json").write_text(json.dumps(piece))


def test_json_is_json_also_for_a_service_that_is_unknown(folder: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["services", "none", "-o", "json", *folder]) == 2
    made = json.loads(capfd.readouterr().out)
    assert (made["namespace"], made["name"], made["state"]) == ("default", "none", "unknown")
    assert run(["services", "none", *folder]) == 2
    assert capfd.readouterr().err.startswith("Error: no Service default/none that is watched")


def test_errors_carry_no_control_characters_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["services", "a/\x1b[31m/c"]) == 2
    assert "\x1b" not in capfd.readouterr().err


def test_the_answer_of_why_has_names_for_programs(folder: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "node", "shop/web:80", "-o", "json", *folder]) == 1
    made = json.loads(capfd.readouterr().out)["why"]
    assert made["clientSees"] == "connection refused, by a reset"
    assert made["steps"][0] == {
        "passes": True,
        "text": "10.96.0.10:80/TCP is the cluster IP of shop/web",
        "field": "spec.clusterIPs",
    }


def test_a_client_that_is_another_node_of_the_files_decides_there(
    folder: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = {"type": "InternalIP", "address": "192.0.2.9"}
    other = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "there"}, "status": {"addresses": [address]}}
    (tmp_path / "there.json").write_text(json.dumps(other))
    assert run(["why", "192.0.2.9", "shop/web:80", *folder]) == 2
    assert "192.0.2.9 is there's own address (status.addresses of Node there)" in capfd.readouterr().out
    assert run(["why", "192.0.2.8", "shop/web:80", *folder]) == 1


TROUBLE = "https://h:6443: certificate is not signed by the authority"


@pytest.fixture
def unlisted(folder: list[str], monkeypatch: pytest.MonkeyPatch) -> Facts:
    """A proxy whose API server has been unreachable since its start."""
    facts = desk(parser_of("services").parse_args(folder)).facts()
    reach = Reach(server="https://h:6443", trouble=TROUBLE, watched=(), certificates={})
    facts = replace(facts, listed=False, manifests="", reach=reach)

    def ask(_: Client, page: str, *__: object, **___: str) -> object:
        assert page == "/facts", "it knows nothing of Services"
        return facts

    monkeypatch.setattr(Client, "ask", ask)
    return facts


@pytest.mark.parametrize(
    "words",
    [
        "why node 10.96.0.10:80",
        "why node shop/web:80",
        "services",
        "services shop/web",
        "flows shop/web",
        "plan --cluster-cidr 10.0.0.0/8",
        "verify",
        "trace node shop/web:80",
    ],
)
@pytest.mark.usefixtures("unlisted")
def test_a_proxy_without_a_list_gives_no_answers(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    out, error = capfd.readouterr()
    assert (out, "never had a list of all Services and EndpointSlices" in error, TROUBLE in error) == ("", True, True)


@pytest.fixture
def waiting(folder: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy with all lists that waits for a missing Node."""
    monkeypatch.setattr(offline.Planned, "awaits", "Node node-x, which the API server has not listed")
    facts = desk(parser_of("services").parse_args(folder)).facts()
    names = ("services", "endpointslices", "nodes")
    watched = tuple(WatchStanding(resource=name, synced=True, connected=True, stale=0.0) for name in names)
    reach = Reach(server="https://h:6443", trouble="", watched=watched, certificates={})
    standings = tuple(FamilyStanding(family) for family in Family)
    unready = {"sync": "not yet synced for the first time"}
    facts = replace(facts, manifests="", reach=reach, node=None, standings=standings, unready=unready)
    monkeypatch.setattr(Client, "ask", lambda _, page, *__, **___: facts if page == "/facts" else False)
    monkeypatch.setattr(Client, "pid", lambda _: 0)


@pytest.mark.parametrize("words", ["why node 10.96.0.10:80", "verify", "services", "plan --cluster-cidr 10.0.0.0/8"])
@pytest.mark.usefixtures("waiting")
def test_a_proxy_that_waits_for_its_node_is_not_ready(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    out, error = capfd.readouterr()
    awaited = "the proxy is not ready: it waits for Node node-x, which the API server has not listed"
    assert (out, awaited in error) == ("", True)


@pytest.mark.usefixtures("waiting")
def test_the_wait_for_a_node_is_one_finding(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkup, "_look_at_way", lambda *_: None)
    monkeypatch.setattr(greeting, "greeted", lambda *_: ())
    monkeypatch.setattr(checkup, "_able", lambda *_: ())
    run(["doctor", "-o", "json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    (found,) = [one for one in findings if one["about"] in {"node", "kernel", "ready"} and one["severity"] == "broken"]
    assert (found["about"], "the proxy waits for the Node" in found["why"]) == ("node", True)


def test_refused_credentials_are_one_finding(
    unlisted: Facts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("services", "endpointslices", "nodes", "servicecidrs")
    trouble = "the token file /t (k: users[u].user.tokenFile) cannot be used: it is empty"
    watched = [WatchStanding(resource=name, synced=False, connected=False, stale=9, trouble=trouble) for name in names]
    reach = Reach(server="https://h:6443", trouble="", watched=tuple(watched), certificates={})
    standings = tuple(FamilyStanding(family) for family in Family)
    unready = {"sync": "not yet synced for the first time", "api": trouble}
    facts = replace(unlisted, reach=reach, standings=standings, unready=unready)
    monkeypatch.setattr(Client, "ask", lambda _, page, *__, **___: facts if page == "/facts" else False)
    monkeypatch.setattr(Client, "pid", lambda _: 0)
    monkeypatch.setattr(greeting, "greeted", lambda *_: ())
    monkeypatch.setattr(checkup, "_able", lambda *_: ())
    run(["doctor", "-o", "json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    (found,) = [one for one in findings if one["about"] in {"api", "node", "kernel", "ready"}]
    assert found["what"] == f"no list of {', '.join(names)} has arrived for 9 seconds: {trouble}"
    assert "write a valid token into this file of the node" in found["fix"]


def test_connection_tracking_is_shown_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(conntrack.Netlink, "open", lambda *_: nullcontext())
    monkeypatch.setattr(conntrack, "refusals", lambda _: Refusals(*[0] * len(Refusals._fields)))
    monkeypatch.setattr(conntrack, "entries", lambda *_: [])
    monkeypatch.setattr(conntrack, "level", lambda _: Level(3, 100))
    assert run(["conntrack", "--seconds", "0.01", "--control-socket", str(tmp_path / "none.sock")]) == 0
    out = capfd.readouterr().out
    assert "3 of 100 entries" in out
    assert "no kube-proxy answers" in out


@pytest.mark.usefixtures("unlisted")
def test_connection_tracking_is_shown_before_the_first_list(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conntrack.Netlink, "open", lambda *_: nullcontext())
    monkeypatch.setattr(conntrack, "refusals", lambda _: Refusals(*[0] * len(Refusals._fields)))
    monkeypatch.setattr(conntrack, "entries", lambda *_: [])
    for used, status in ((3, 0), (100, 1)):
        monkeypatch.setattr(conntrack, "level", lambda _, used=used: Level(used, 100))
        assert run(["conntrack", "--seconds", "0.01"]) == status
        out = capfd.readouterr().out
        assert (f"{used} of 100 entries" in out, "the proxy has no Services yet" in out) == (True, True)


@pytest.mark.parametrize("pids", [(), (812,)])
def test_the_doctor_takes_itself_for_no_proxy(
    pids: tuple[int, ...], folder: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = [Trace("nf_tables table ip kube-proxy", Family.IPV4)]
    monkeypatch.setattr(Mode, "traces", lambda mode, *_: left if mode.name == "nftables" else [])
    monkeypatch.setattr(processes, "proxies", lambda: [processes.ProxyProcess(pid, (), ours=True) for pid in pids])
    status = run(["doctor", "--proxy-mode", "nftables", *folder])
    out = capfd.readouterr().out
    assert ("(kube-proxy" in out, "nothing is wrong" in out) == (False, False), out
    if pids:
        assert "kube-proxy runs here (pid 812), and was not asked" in out
        assert "table ip kube-proxy" not in out
    else:
        assert (status, "no kube-proxy runs here" in out) == (1, True)
        assert "rules without a proxy that answers: nf_tables table ip kube-proxy" in out


def unreadable(*_: object) -> None:
    raise ApplyError("not permitted")


@pytest.mark.parametrize(("pids", "remain"), [((), False), ((), True), ((812,), True)])
def test_without_a_proxy_the_answer_is_that_of_a_new_proxy(
    pids: tuple[int, ...],
    remain: bool,
    folder: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ready = {"addresses": ["192.0.2.9"], "conditions": {"ready": True}}
    labels = {"kubernetes.io/service-name": "web"}
    piece = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": [ready]}
    piece |= {"metadata": {"name": "web-1", "namespace": "shop", "labels": labels}, "ports": [{"port": 80, "name": ""}]}
    Path(folder[1], "slice.json").write_text(json.dumps(piece))
    left = [Trace("nf_tables table ip kube-proxy", Family.IPV4)]
    monkeypatch.setattr(Mode, "traces", lambda mode, *_: left if remain and mode.name == "nftables" else [])
    monkeypatch.setattr(present, "examiners", unreadable)
    monkeypatch.setattr(processes, "proxies", lambda: [processes.ProxyProcess(pid, (), ours=True) for pid in pids])
    status = run(["why", "node", "shop/web:80", "--no-probe", *folder])
    out = capfd.readouterr().out
    if pids:
        assert (status, "kube-proxy would forward it" in out, "(pid 812), and was not asked" in out) == (2, True, True)
        assert "?  the kernel's rules could not be read: not permitted" in out
    else:
        assert (status, "kube-proxy would forward it" in out) == (2, True), out
        assert "no kube-proxy runs here; the answer follows from the objects alone" in out
        assert "forward it; until a kube-proxy runs, no rule in the kernel translates 10.96.0.10:80 (?)" in out
        assert ("?  rules without a proxy that answers: nf_tables table ip kube-proxy" in out) is remain
        assert (f"(`kube-proxy verify {shlex.join(folder[:4])}`), and start the proxy again" in out) is remain


def test_the_rules_of_the_go_kube_proxy_are_not_compared(
    folder: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "proxies", lambda: [processes.ProxyProcess(812, (), ours=False)])
    for asked in (["why", "node", "shop/web:80", "--no-probe"], ["services", "shop/web"]):
        status = run([*asked, *folder])
        assert "the rules of the Go kube-proxy have another layout" in capfd.readouterr().out
        assert status == 2 - (asked[0] == "why")  # refused, as the Service has no endpoint


def test_a_proxy_that_only_its_control_socket_shows_runs_here(
    folder: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = [Trace("nf_tables table ip kube-proxy", Family.IPV4)]
    monkeypatch.setattr(Mode, "traces", lambda mode, *_: left if mode.name == "nftables" else [])
    monkeypatch.setattr(processes, "proxies", list)
    monkeypatch.setattr(client, "FIRST_TIMEOUT", 0.1)
    path = str(tmp_path / "control/control.sock")
    asked = [*folder, "--control-socket", path]
    with listen(path):
        run(["doctor", *asked])
        out = capfd.readouterr().out
        assert f"x  a kube-proxy runs here (pid {os.getpid()}), and hangs: the proxy at " in out
        assert "rules without a proxy" not in out
        run(["why", "192.0.2.8", "192.0.2.9:80", "--no-probe", *asked])
        assert f"-  a kube-proxy runs here (pid {os.getpid()}), and hangs: " in capfd.readouterr().out
        monkeypatch.setattr(processes, "is_elsewhere", lambda pid: pid == os.getpid())
        run(["doctor", *asked])
        assert "?  no kube-proxy runs here" in capfd.readouterr().out
    run(["doctor", *asked])  # the socket's file remains, but no process listens
    out = capfd.readouterr().out
    assert "?  no kube-proxy runs here" in out
    assert "rules without a proxy that answers: nf_tables table ip kube-proxy" in out


@pytest.mark.parametrize("flag", ["--masquerade-all", "--masquerade-all=true", "--masquerade-all true"])
def test_a_boolean_flag_of_plan_needs_no_value(flag: str, folder: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    run(["plan", *flag.split(), *folder])
    assert "masqueradeAll: false -> true" in capfd.readouterr().out


def test_the_doctor_prints_first_that_no_proxy_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = [Trace("nf_tables table ip kube-proxy", Family.IPV4)]
    monkeypatch.setattr(Mode, "traces", lambda mode, *_: left if mode.name == "nftables" else [])
    monkeypatch.setattr(processes, "proxies", list)
    assert run(["doctor", "--proxy-mode", "nftables", "--control-socket", str(tmp_path / "none.sock")]) == 1
    assert capfd.readouterr().out.splitlines()[1].strip().startswith("?  no kube-proxy answers at")


@pytest.mark.parametrize(("reads", "kubelet"), [(True, False), (False, True), (False, False)])
def test_the_doctor_reports_a_node_without_any_rules(
    reads: bool, kubelet: bool, folder: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mode, "traces", lambda *_: [])
    monkeypatch.setattr(processes, "proxies", list)
    monkeypatch.setattr(processes, "named", lambda _: kubelet)
    status = run(["doctor", *(folder if reads else folder[-2:])])
    shown = capfd.readouterr()
    if reads or kubelet:
        assert (
            status,
            "no kube-proxy runs on this node, and the kernel has no rules of a kube-proxy" in shown.out,
        ) == (1, True)
    else:
        assert (status, shown.err.startswith("Error: this machine is no node: no kubelet runs here")) == (2, True)


class OutOfReach:
    """An API server that only fails: in the connection, or in each list."""

    knows_nodes = True

    def __init__(self, trouble: str, *lists: str) -> None:
        names = ("services", "endpointslices", "nodes")
        each = dict(zip(names, lists or [""] * 3, strict=True)).items()
        watched = [
            WatchStanding(resource=name, synced=False, connected=False, stale=0, trouble=text) for name, text in each
        ]
        self._reach = Reach(server="https://h:6443", trouble=trouble, watched=tuple(watched), certificates={})

    async def run(self) -> None:
        await asyncio.Event().wait()

    def reach(self) -> Reach:
        return self._reach

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("sources", "what", "fix"),
    [
        (OutOfReach("h:6443: connection refused"), "h:6443: connection refused", "make https://h:6443 reachable"),
        (OutOfReach(TROUBLE + ".crt"), TROUBLE, "put the authority that signed"),
        (
            OutOfReach("h: the server's certificate is not for h: give an address"),
            "is not for h",
            "tls-server-name to a",
        ),
        (OutOfReach("h: the server's certificate has expired, or the"), "has expired", "renew the API server's"),
        (
            OutOfReach("", *["Unauthorized (code 401)"] * 3),
            "Unauthorized (code 401)",
            "write a valid token or certificate",
        ),
        (OutOfReach("", *["forbidden (code 403)"] * 3), "forbidden (code 403)", "bind the identity of the kubeconfig"),
    ],
)
def test_a_wait_without_end_is_reported_with_the_fix(
    sources: OutOfReach,
    what: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(offline, "open_sources", lambda *_: sources)
    monkeypatch.setattr(offline, "UNREACHED", 0.0)
    monkeypatch.setattr(offline, "TIMEOUT", 1e9)
    monkeypatch.setattr(doctor, "look_at", lambda _: Checkup([], []))
    assert run(["doctor", "-o", "json", "--kubeconfig", "k"]) == 1
    (found,) = json.loads(capfd.readouterr().out)["findings"]
    assert (found["severity"], what in found["what"], fix in found["fix"]) == ("broken", True, True), found
    assert run(["why", "node", "10.96.0.10:80", "--kubeconfig", "k"]) == 2
    said = capfd.readouterr().err
    assert (what in said, f"Fix: {found['fix']}" in said) == (True, True)


@pytest.mark.parametrize("content", [None, "nonsense", "[]"])
def test_a_file_that_is_no_kubeconfig_is_reported_with_a_fix(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "look_at", lambda _: Checkup([], []))
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    assert run(["doctor", "-o", "json", "--kubeconfig", str(file)]) == 1
    (found,) = json.loads(capfd.readouterr().out)["findings"]
    assert (str(file) in found["what"], "kubectl --kubeconfig FILE" in found["fix"]) == (True, True)


def test_no_answer_waits_for_a_missing_node() -> None:
    watched = (WatchStanding(resource="nodes", synced=True, connected=True, stale=0.0),)
    reach = Reach(server="https://h", trouble="", watched=watched, certificates={})

    planner, sources = SimpleNamespace(complete=True, nodes={}), SimpleNamespace(reach=lambda: reach, knows_nodes=True)
    assert offline._is_read(planner, sources, 0.0)
