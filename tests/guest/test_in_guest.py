"""Boots the guest, runs the tests of inside/ in it, and tests the runner itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.guest import narrow
from support.guest.guest import GuestError, run_in_guest
from support.places import ROOT

HERE = Path(__file__).parent


SCENARIOS = ROOT / "tests/scenarios"
PARTS = {
    "the-mode-itself": [HERE / "inside"],
    "two-nodes": [SCENARIOS / "e2e/test_e2e_services.py"],
    "two-nodes-more": sorted({*(SCENARIOS / "e2e").glob("test_*.py")} - {SCENARIOS / "e2e/test_e2e_services.py"}),
    "restarts": [SCENARIOS / "test_restart.py", SCENARIOS / "test_udp_clients.py"],
    "scenarios": [SCENARIOS / f"test_{name}.py" for name in ("affinity", "policies", "udp_flows")],
    "commands": [SCENARIOS / f"test_commands_{name}.py" for name in ("flows", "conntrack", "untraceable")],
    "verify": [SCENARIOS / "test_commands_verify.py"],
}
SECONDS = {
    "scenarios": 90,
    "commands": 55,
    "restarts": 40,
    "the-mode-itself": 20,
    "verify": 15,
    "two-nodes": 25,
    "two-nodes-more": 35,
}
QUICK = ("the-mode-itself",)


def part(name: str) -> Any:
    """Return a parameter of the test below: it begins early, and is slow unless it is one of QUICK."""
    slow = () if name in QUICK else (pytest.mark.slow("minutes of an emulated kernel"),)
    return pytest.param(name, marks=(pytest.mark.long(SECONDS[name]), *slow))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [part(name) for name in PARTS])
def test_tests_under_the_guests_kernel(name: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Run all of inside/ and the scenarios in ipvs mode, one guest per part: without xdist (one CPU), writing no files
    here.

    The expression of -m also selects the tests of inside/.
    """
    monkeypatch.chdir(ROOT)
    plugins = ("xdist", "randomly", "cacheprovider", "cov")
    selected = ["-m", pytestconfig.option.markexpr] if name == "the-mode-itself" else []
    argv = [sys.executable, "-m", "pytest", "--color=no", *(f"-pno:{plugin}" for plugin in plugins), *selected]
    argv += map(str, PARTS[name])
    done = run_in_guest(argv, 560, environment={"KUBEPROXY_GUEST": "1"})
    assert done.status == 0, done.output
    summary = re.search(r"^(\d+) passed(, \d+ deselected)? in .*$", done.output, re.MULTILINE)
    assert summary, f"not all tests ran and passed:\n{done.output}"


@pytest.mark.timeout(200)
def test_status_output_and_writes_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    script = "echo one; echo two >&2; touch lost shared/kept; echo $WORD; exit 7"
    shared = [tmp_path / "shared"]
    done = run_in_guest(["sh", "-c", script], 120, environment={"WORD": "three"}, writable=shared)
    assert (done.status, done.output) == (7, "one\ntwo\nthree\n")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "shared"]


@pytest.mark.slow("another boot")
@pytest.mark.timeout(200)
def test_it_boots_and_loads_modules_where_processors_have_more_state_than_it_can_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrow, "wide_here", lambda: True)
    done = run_in_guest(["ip", "link", "add", "pair", "type", "veth"], 120)
    assert done.status == 0, done.output


def test_processors_with_more_state_are_recognised_by_their_flags() -> None:
    assert narrow.too_wide("processor : 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n")
    assert not narrow.too_wide("processor : 0\nmodel name : amx_tile\nflags\t\t: fpu avx512f\n")


def test_the_starter_passes_arguments_and_environment(tmp_path: Path) -> None:
    starter = tmp_path / "starter"
    starter.write_bytes(narrow.starter("/bin/sh", {"ONE": "1", "TWO": "a=b"}))
    starter.chmod(0o755)
    done = subprocess.run(
        [starter, "-c", "echo $ONE $TWO $0 $1", "x", "y z"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 a=b x y z\n"
    starter.write_bytes(narrow.starter("/nowhere", {}))
    assert subprocess.run([starter], check=False).returncode == 127


@pytest.mark.timeout(200)
def test_a_guest_that_hangs_or_has_lost_its_caller_is_ended() -> None:
    with pytest.raises(GuestError, match=r"was not done after 0\.5 s"):
        run_in_guest(["sleep", "1000"], 0.5)
    command = [sys.executable, "-m", "support.guest.guest", "sh", "-c", "echo up; sleep 1000"]
    caller = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert caller.stdout is not None
    with caller.stdout:
        assert caller.stdout.readline() == b"up\n"
        started = _descendants(caller.pid)
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    assert started
    until = time.monotonic() + 30
    while any(_alive(pid) for pid in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in started if _alive(pid)]


def test_a_missing_requirement_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(GuestError, match="apt-get install user-mode-linux kmod"):
        run_in_guest(["true"], 10)


def _descendants(pid: int) -> list[int]:
    children = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            children.append(int(entry.name))
    return children + [below for child in children for below in _descendants(child)]


def _alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
