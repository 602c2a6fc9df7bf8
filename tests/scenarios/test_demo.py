"""The demo for a newcomer: a process that prints, exits with 0 or 1, and leaves nothing behind, however it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from lab.__main__ import main
from lab.demo.ledger import Ledger
from lab.demo.report import Report, milliseconds
from lab.demo.stage import names_of, seen_as
from lab.netns import names
from lab.runfolder import run_folder
from lab.topology import PREFIX

PLAY = """
import sys
from lab.demo.play import ACTS, DemoConfig, run
sys.exit(run(DemoConfig({arguments})))
"""


def demo_id(name: str) -> str:
    return f"{name}{os.getpid()}"


def play(arguments: str) -> list[str]:
    return [sys.executable, "-c", PLAY.format(arguments=arguments)]


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A demo as a process with a separate session, as a shell would start it; always ended at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    printed = ""
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"the demo ended without {text!r}:\n{printed}")


def leftovers(cluster_id: str) -> list[str]:
    found = names(f"{PREFIX}{cluster_id}-")
    found += [str(run_folder(cluster_id))] if run_folder(cluster_id).exists() else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if f"{PREFIX}{cluster_id}-".encode() in command or f"/{cluster_id}/".encode() in command:
            found.append(command.decode(errors="replace"))
    return found


def test_all_is_well_and_nothing_is_left() -> None:
    cluster_id = demo_id("well")
    command = [sys.executable, "-m", "lab", "demo", "--id", cluster_id]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"All is well: \d+ checks and [\d,]+ connections in [\d.]+ s, and none failed\.", lines[-1])
    assert "WRONG" not in done.stdout
    titles = [line for line in lines if re.match(r"\d\. ", line)]
    assert [t.split(":")[0] for t in titles] == [
        "1. ClusterIP",
        "2. NodePort",
        "3. LoadBalancer",
        "4. sessionAffinity",
        "5. externalTrafficPolicy",
        "6. A pod is deleted and replaced",
        "7. 1,000 Services more",
        "8. How long changes took",
    ]
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line != line.rstrip()] == []
    assert "\x1b" not in done.stdout
    assert leftovers(cluster_id) == []


@pytest.mark.slow("a demo of its own")
def test_wrong_answers_are_named() -> None:
    cluster_id = demo_id("wrong")
    # A kube-proxy that serves NodePorts on no address of this node.
    sabotage = '{"nodePortAddresses": ["10.0.0.0/8", "fd99::/64"]}'
    command = play(f"cluster_id={cluster_id!r}, acts=ACTS[:2], proxy={sabotage}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"Not well: 13 of 25 checks failed, named above\.", lines[-1]), lines[-1]
    named = [line for line in lines[-14:-1] if line.startswith("   WRONG ")]
    assert len(named) == 13
    assert any("NodePort, TCP from outside to 192.168.100.2:31647: expected answers" in line for line in named)
    assert not any("ClusterIP" in line for line in named)
    assert "The end of kube-proxy's log:" in lines
    assert leftovers(cluster_id) == []


def test_interrupt_takes_everything_down() -> None:
    cluster_id = demo_id("ctrlc")
    with running(play(f"cluster_id={cluster_id!r}")) as process:
        read_until(process, "2. NodePort")
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == "   Interrupted. The cluster is removed."
    assert leftovers(cluster_id) == []


def rows_of(page: str) -> list[list[Any]]:
    """Return the Services on a page, one per row."""
    with urlopen(f"{page}api/services", timeout=10) as answer:
        rows: list[list[Any]] = json.load(answer)["services"]
        return rows


@pytest.mark.slow("a demo of its own")
def test_a_kept_cluster_prints_its_usage_and_ends_with_ctrl_c() -> None:
    cluster_id = demo_id("keep")
    with running(play(f"cluster_id={cluster_id!r}, acts=ACTS[:3], keep=True")) as process:
        printed = read_until(process, "tail -f")
        commands = re.findall(r"     (ip netns exec \S+ (?:curl|nft) .*)", printed)
        assert len(commands) == 4
        said = [subprocess.check_output(c.split(), text=True, timeout=10) for c in commands]
        assert any('"pod": "whoami-' in text for text in said)
        assert any("map cluster-services" in text for text in said)
        page = re.search(r"http://127\.0\.0\.1:\d+/ui/", printed)
        assert page is not None, printed
        with urlopen(page[0], timeout=10) as answer:
            assert "<title>kube-proxy</title>" in answer.read().decode()
        asked = re.findall(r"     (ip netns exec \S+ \S+/kube-proxy .*)", printed)
        assert [re.search(r"kube-proxy (\w+)", one)[1] for one in asked] == ["why", "flows", "doctor"]  # type: ignore[index]
        why = subprocess.check_output(asked[0].split(), text=True, timeout=30)
        assert "kube-proxy forwards it" in why
        port = urlsplit(page[0]).port
        assert re.search(rf"^     ssh -N -L {port}:127\.0\.0\.1:{port} \S+$", printed, re.MULTILINE)
        assert re.search(r"^     \S*kubectl get nodes,pods,svc", printed, re.MULTILINE)
        rows = {row[0]: row for row in rows_of(page[0])}
        assert rows["default/orphan"][2:4] == [0, 0]
        assert rows["default/shop"][2] > 0
        with subprocess.Popen(asked[1].split(), stdout=subprocess.PIPE, text=True) as flows:
            try:
                assert flows.stdout is not None
                assert any(":80" in line for line in flows.stdout)  # the continuous requests
            finally:
                flows.kill()
        assert f"export KUBECONFIG={run_folder(cluster_id)}/kubeconfig" in printed
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0, rest
    assert "All is well" in printed
    assert leftovers(cluster_id) == []


def test_missing_root_is_reported_in_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["demo", "--id", demo_id("nobody")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "lab: root is needed to make network namespaces: run this as root (sudo)\n"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.00084, "0.84 ms"), (0.0124, "12 ms"), (0.245, "245 ms"), (1.25, "1.25 s"), (0, "0.00 ms")]
)
def test_times_for_the_eye(seconds: float, shown: str) -> None:
    assert milliseconds(seconds) == shown


@pytest.mark.parametrize(
    ("origin", "clients", "seen"),
    [
        ("outside", {"192.168.100.1"}, "the client"),
        ("outside", {"192.168.100.2", "10.244.0.1"}, "the node"),
        ("outside", {"192.168.100.1", "192.168.100.2"}, "192.168.100.1, 192.168.100.2"),
        ("pod", {"fd00:244::2"}, "the client"),
        ("node", {"fd00:100::2", "fd00:244::1"}, "the node"),
        ("node", {"10.244.0.9"}, "10.244.0.9"),
        ("pod", set(), "-"),
    ],
)
def test_the_client_address_that_pods_see(origin: str, clients: set[str], seen: str) -> None:
    assert seen_as(origin, clients) == seen


def test_pods_are_distinguished_by_the_end_of_their_names() -> None:
    assert names_of({"whoami-bbbbb", "whoami-aaaaa"}) == "aaaaa bbbbb"
    assert names_of(set()) == "none"


def test_tables_keep_brackets_and_pods_keep_their_colour() -> None:
    out = io.StringIO()
    report = Report(out)
    report.table(["to", report.pod("whoami-abcde")], [["[fd00::1]:80", report.count("whoami-abcde", 7)]], " r")
    assert "[fd00::1]:80      7" in out.getvalue()
    assert report.pod("whoami-abcde").style == report.count("whoami-abcde", 0).style


def test_the_last_line_counts_failed_checks() -> None:
    ledger = Ledger()
    assert ledger.hold("first", True, "a", "a")
    assert not ledger.hold("second", False, "a", "b")
    out = io.StringIO()
    Report(out).outcome(ledger, 1.0)
    assert out.getvalue().splitlines()[-2:] == [
        "   WRONG second: expected a, got b",
        "Not well: 1 of 2 checks failed, named above.",
    ]


def test_times_never_run_backwards() -> None:
    ledger = Ledger()
    for seconds in (-0.1, 0.2, 0.4):
        ledger.took("change", seconds)
    assert ledger.times == {"change": [0.0, 0.2, 0.4]}
    assert ledger.median("change") == 0.2
    assert ledger.median("no such change") == 0.0
