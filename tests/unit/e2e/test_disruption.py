from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import processes as processes_module
from e2e.disruption import play, programs, run, traffic
from e2e.disruption.play import Stage, Step, Window, chosen
from e2e.disruption.results import PAGE, Count, Record, Row, cell, failed, read, render, write
from e2e.errors import E2EError
from e2e.processes import Processes
from e2e.results import RESULTS, SOME
from prove.asking import KINDS, Asked, Client, Crowd
from support.live import Front

IPV4 = "10.96.0.7"
SERVICE = {
    "spec": {
        "clusterIPs": [IPV4, "fd00:10:96::7"],
        "ports": [{"name": "tcp", "nodePort": 30001}, {"name": "udp", "nodePort": 30002}],
    }
}


def client(kind: str, place: str = "pod") -> Client:
    return Client("/a", place, kind, "plain", Front(IPV4, 80), frozenset({"kept"}))


def crowd(asked: dict[str, list[Asked]]) -> Crowd:
    """A finished crowd with one client of each kind; clients that the test does not list sent a request every 0.5 s."""
    made = Crowd([client(kind) for kind in KINDS])
    for each, questions in made.asked.items():
        questions.extend(asked.get(each.kind, [Asked(at / 2, at / 2 + 0.001) for at in range(40)]))
    return made


def test_clients_of_each_kind_ask_from_each_place_over_both_families():
    found = list(traffic.clients(dict.fromkeys(traffic.OFFERS, SERVICE), "/b"))
    plain = [each for each in found if each.service == "plain"]
    assert {(each.place, each.kind, ":" in each.front.address) for each in plain} == {
        (place, kind, ipv6) for place in ("pod", "node", "outside") for kind in KINDS for ipv6 in (True, False)
    }
    assert {each.namespace for each in found if each.place == "pod"} == {"/b"}
    assert {each.front.port for each in plain if each.place == "outside" and each.protocol == "udp"} == {30002}


def test_connections_to_pods_that_are_replaced_do_not_stay_open_but_flows_do():
    rolled = [
        each for each in traffic.clients(dict.fromkeys(traffic.OFFERS, SERVICE), "/b") if each.service == "rolled"
    ]
    assert {each.kind for each in rolled} == {"new TCP", "new UDP", "long UDP"}
    assert {tuple(each.pods) for each in rolled} == {("rolled",)}


def test_services_use_affinity_weights_maglev_and_slow_start_for_servers_that_drain():
    items = traffic.objects("agnhost:1", "pause:1")["items"]
    services = {each["metadata"]["name"]: each for each in items if each["kind"] == "Service"}
    assert all(each["spec"]["ipFamilyPolicy"] == "RequireDualStack" for each in services.values())
    assert services["sticky"]["spec"]["sessionAffinity"] == "ClientIP"
    annotations = {key for each in services.values() for key in each["metadata"]["annotations"]}
    assert annotations == {"kube-proxy-py/weights", "kube-proxy-py/algorithm", "kube-proxy-py/slow-start"}
    for each in (each for each in items if each["kind"] == "Deployment"):
        pod = each["spec"]["template"]["spec"]
        assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert f"--delay-shutdown={traffic.DRAIN}" in pod["containers"][0]["args"]
        assert pod["terminationGracePeriodSeconds"] > traffic.DRAIN


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_server_is_known_by_its_deployment(kind):
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        pieces = [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 16\r\n\r\nkept-5d9f", b"-x7k2q\n"]
        for piece in pieces if kind == socket.SOCK_STREAM else [b"kept-5d9f-x7k2q"]:
            theirs.send(piece)
        assert traffic.ask(ours) == "kept"
        assert b"hostname" in theirs.recv(100)


def test_a_connection_that_the_server_ends_has_failed():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(OSError, match=r"ended early|Broken pipe"):
            traffic.ask(ours)


def test_a_row_counts_the_questions_of_its_window_and_the_longest_gap_of_each_kind():
    broken = [Asked(0, 0.001), Asked(2.5, 3.4, "timeout"), Asked(4, 4.25), Asked(9, 9.001), Asked(14, 14.5)]
    first, second = play.rows(crowd({"new TCP": broken}), [Window("cut", 2, 6), Window("calm", 6, 15)])
    assert first.counts["new TCP"] == Count(2, 1, 2250)
    assert first.counts["long UDP"] == Count(8, 0, 500)
    assert first.failures == [f"new TCP from pod to plain {IPV4}:80: 1, 0.50 to 1.40 s: timeout"]
    assert second == Row("calm", 9, second.counts, [])
    assert second.counts["new TCP"] == Count(2, 0, 5499)


def test_a_client_that_asks_nothing_is_an_error_and_no_success():
    with pytest.raises(E2EError, match=r"calm: long TCP from pod to plain .* asked nothing"):
        list(play.rows(crowd({"long TCP": [Asked(0, 1)]}), [Window("calm", 6, 15)]))


class CalmStage(Stage):
    def __init__(self) -> None:
        super().__init__(Path("programs"), Processes(Path("logs")), programs.ours("nftables"))
        self.checks = 0

    def check(self) -> None:
        self.checks += 1


class Silence(Crowd):
    def __init__(self) -> None:
        super().__init__([])


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def _no_waiting(monkeypatch):
    for name in ("SETTLE", "LOST"):
        monkeypatch.setattr(play, name, 0.0)


@pytest.mark.usefixtures("_no_waiting")
def test_each_disruption_has_a_window_and_an_interruption_keeps_those_before():
    done: list[str] = []
    windows: list[Window] = []
    steps = [Step("a", lambda: done.append("a")), Step("b", lambda: done.append("b"))]
    stage = CalmStage()
    play.play(stage, steps, Silence(), windows.append)
    assert (done, [each.title for each in windows], stage.checks) == (["a", "b"], ["a", "b"], 2)
    assert windows[0].begin <= windows[0].end <= windows[1].begin

    windows.clear()
    with pytest.raises(KeyboardInterrupt):
        play.play(stage, [steps[0], Step("c", interrupt), steps[1]], Silence(), windows.append)
    assert [each.title for each in windows] == ["a"]


@pytest.mark.usefixtures("_no_waiting")
def test_only_a_run_of_all_steps_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "SOME", tmp_path / "some")
    record = Record("ours", "nftables", "2026-11-26", "abc1234", {}, [])
    fine, bad = Step("a", lambda: None), Step("b", interrupt)
    run._play(CalmStage(), [fine], Silence(), record, tmp_path / "all")
    assert [each.name for each in (tmp_path / "all/disruption").iterdir()] == ["ours-nftables.json"]
    (tmp_path / "all/disruption/ours-nftables.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        run._play(CalmStage(), [fine, bad], Silence(), record, tmp_path / "all")
    assert not list((tmp_path / "all/disruption").iterdir())
    assert [row.title for row in read(tmp_path / "some/disruption")[0].rows] == ["a"]


def test_a_run_begins_with_the_baseline_replaces_each_program_and_ends_with_a_change():
    ways = {"go-nftables": (programs.go(Path("x"), "nftables"),), "go-iptables": (programs.go(Path("x"), "iptables"),)}
    found = CalmStage().disruptions(ways)
    assert list(found) == ["baseline", "go-nftables", "go-iptables", "kill", "apiserver", "kubelet", "rollout"]
    assert [step.title for step in found["go-iptables"]] == [
        "ours nftables to Go iptables",
        "Go iptables to ours nftables",
    ]
    assert [step.title for step in chosen(found, "baseline|go-n")] == [
        "nothing happens",
        "ours nftables to Go nftables",
        "Go nftables to ours nftables",
    ]
    assert len(chosen(found, "")) == 9
    with pytest.raises(E2EError, match=r"FOCUS=sleep: no such disruption; there are baseline, go-nftables"):
        chosen(found, "sleep")


@pytest.mark.parametrize(("mode", "other"), [("nftables", "iptables"), ("iptables", "nftables")])
def test_ours_changes_its_mode_before_the_go_program_replaces_it_and_after_it_replaces_the_go_program(
    monkeypatch, mode, other
):
    started: list[str] = []
    monkeypatch.setattr(Processes, "stop", lambda *_: None)
    monkeypatch.setattr(play.nodes, "start_proxies", lambda command, mode, *_: started.append(f"{command[0]} {mode}"))
    monkeypatch.setattr(programs, "earlier", lambda _revision, mode, _folder: programs.ours(mode))
    ways = run._ways(argparse.Namespace(proxy="ours", mode=mode, previous="HEAD"), Path("x"))
    stage = Stage(Path("programs"), Processes(Path("logs")), programs.ours(mode))
    there, back = stage.disruptions(ways)["two-steps"]
    assert there.title == f"ours {mode} to ours {other}, then Go {other}"
    assert back.title == f"Go {other} to ours {other}, then ours {mode}"
    there.disrupt()
    back.disrupt()
    ours = programs.ours(mode).command[0]
    assert started == [f"{ours} {other}", f"x/kube-proxy {other}", f"{ours} {other}", f"{ours} {mode}"]


def test_the_page_lists_the_disruptions_that_focus_selects():
    ways = run._ways(argparse.Namespace(proxy="go", mode="nftables", previous=""), Path("x"))
    for name in (*CalmStage().disruptions(ways), "two-steps", "previous"):
        assert f"`{name}`" in PAGE.read_text()


def test_a_program_is_started_again_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(processes_module, "inside", lambda _namespace, _hostname="": ["env"])
    processes = Processes(tmp_path)
    try:
        processes.start("sleeper", "n1", ["sleep", "60"])
        first = processes._running["sleeper"]
        processes.stop("sleeper")
        processes.check()
        processes.resume("sleeper")
        processes.check()
        assert processes._running["sleeper"].args == first.args == ["env", "sleep", "60"]
    finally:
        processes.stop("sleeper")
    processes.start("short", "n1", ["false"])
    processes._running["short"].wait()
    with pytest.raises(E2EError, match="short ended with exit code 1"):
        processes.check()
    processes.reap()


def test_processes_are_found_while_cgroups_vanish(monkeypatch, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("1\n")
    read_text = Path.read_text

    def read_and_remove_the_other(path: Path) -> str:
        text = read_text(path)
        shutil.rmtree(tmp_path / {"a": "b", "b": "a"}[path.parent.name])
        return text

    monkeypatch.setattr(Path, "read_text", read_and_remove_the_other)
    monkeypatch.setattr(processes_module, "cgroups", lambda: [tmp_path])
    monkeypatch.setattr(processes_module, "names", lambda _prefix: [])
    assert processes_module.remaining() == {1}


def test_the_earlier_revision_is_that_of_the_last_tag(monkeypatch, tmp_path):
    source = tmp_path / "repository/src/kubeproxy"
    source.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for word in ("old", "new", "newest"):
        (source / "__init__.py").touch()
        (source / "cli.py").write_text(f"def main():\n    print('{word}')\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", word], check=True)
        if word == "old":
            subprocess.run([*git, "tag", "v0"], check=True)
    monkeypatch.setattr(programs, "_ROOT", tmp_path / "repository")
    assert programs.last_revision() == "v0"
    program = programs.earlier("v0", "nftables", tmp_path / "old")
    assert subprocess.run(program.command, capture_output=True, check=True).stdout == b"old\n"
    assert program.flags == programs.FLAGS
    with pytest.raises(E2EError, match="PREVIOUS=v7: git cannot unpack it"):
        programs.earlier("v7", "nftables", tmp_path / "none")


def test_ours_is_that_of_this_checkout():
    assert programs.ours("iptables").command == [str(Path(sys.executable).with_name("kube-proxy"))]
    assert str(programs.ours("iptables")) == "ours iptables"


def row(title: str, count: Count, *failures: str) -> Row:
    return Row(title, 12, dict.fromkeys(KINDS, count), list(failures))


FINE, BAD = Count(900, 0, 120), Count(800, 3, 1400)


def test_the_page_has_a_table_for_each_run_and_the_number_of_clients_with_failures():
    record = Record(
        "ours",
        "nftables",
        "2026-11-26",
        "abc1234",
        {"kernel": "6.18", "flowtables": ""},
        [row("nothing happens", FINE), row("kill", BAD, "client 0", "client 1")],
    )
    page = render([record, Record("go", "iptables", "2026-11-26", "abc1234", {}, [row("kill", FINE)])])
    assert "## Ours in nftables mode\n\nThe run of 2026-11-26 used commit abc1234, kernel 6.18.\n" in page
    assert "## Go kube-proxy in iptables mode" in page
    assert "| disruption | seconds | new TCP | long TCP | new UDP | long UDP |\n|---|---:|---:|---:|---:|---:|" in page
    assert f"| nothing happens | 12 |{' 0/900, 120 ms |' * 4}\n" in page
    assert f"| kill | 12 |{' **3**/800, 1400 ms |' * 4}\n" in page
    assert "\n\nRequests failed for 2 clients in *kill*.\n" in page
    assert failed(record.rows) == {"kill": 12}
    assert cell(FINE) == "0/900, 120 ms"


def test_a_record_is_read_as_it_was_written(tmp_path):
    made = Record("ours", "nftables", "2026-11-26", "abc1234", {}, [row("kill", BAD, "client")])
    assert write(made, tmp_path / "a/b").name == "ours-nftables.json"
    assert read(tmp_path / "a/b") == [made]
    assert "No run has been recorded." in render([])


def test_the_page_is_that_of_the_recorded_results():
    assert PAGE.read_text() == render(read()), "python -m e2e page"
    assert SOME != RESULTS
