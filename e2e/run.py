"""One run of upstream's test binary: a separate process for each test, several at once, and a verdict from each."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from e2e.binaries import etcd, first_line
from e2e.choice import is_serial, pattern
from e2e.cluster import say
from e2e.controlplane import kubeconfig, kubectl
from e2e.errors import E2EError
from e2e.layout import FOLDER, HUB, LOGS
from e2e.processes import Processes
from e2e.results import Result, Verdict, names_in, verdict

_FRAMEWORK: Final = (
    "-ginkgo.no-color",
    f"-kubeconfig={kubeconfig(FOLDER, 'admin')}",
    "-provider=skeleton",
    "-num-nodes=2",
    "-node-os-distro=debian",
)
_GRACE: Final = 120
"""Seconds for the clean-up of a test that Ginkgo interrupted."""


def list_tests(programs: Path) -> list[str]:
    """Return the names of upstream's network tests in the test binary. Raises E2EError."""
    report = LOGS / "tests.json"
    command = [str(programs / "e2e.test"), *_FRAMEWORK, "-ginkgo.dry-run", r"-ginkgo.focus=\[sig-network\]"]
    done = subprocess.run([*command, f"-ginkgo.json-report={report}"], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not report.exists():
        raise E2EError(f"e2e.test cannot list its tests: {(done.stdout + done.stderr).strip()[-600:]}")
    return names_in(json.loads(report.read_text()))


class Job(NamedTuple):
    """A running test: its start time, and its number, which names its log and its report."""

    name: str
    number: int
    process: subprocess.Popen[bytes]
    begin: float


class Run:
    """Runs tests of one cluster and calls a function with each verdict."""

    def __init__(self, programs: Path, processes: Processes, minutes: int) -> None:
        self._program = str(programs / "e2e.test")
        self._processes = processes
        self._minutes = minutes
        self._number = 0

    def play(self, names: Iterable[str], workers: int, judged: Callable[[str, Verdict], None]) -> None:
        """Run tests, some in parallel. Raises E2EError if a program of the cluster ends."""
        waiting = list(names)
        running: list[Job] = []
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(self._start(waiting.pop(0)))
            time.sleep(0.5)
            self._processes.check()
            for job in [job for job in running if self._ended(job)]:
                running.remove(job)
                judged(job.name, self._verdict(job))

    def _start(self, name: str) -> Job:
        self._number += 1
        command = [self._program, *_FRAMEWORK, "-ginkgo.v", f"-ginkgo.timeout={self._minutes}m"]
        command += [f"-ginkgo.focus={pattern(name)}", f"-ginkgo.json-report={self._report(self._number)}"]
        process = self._processes.spawn(f"test-{self._number}", HUB, command)
        return Job(name, self._number, process, time.monotonic())

    def _ended(self, job: Job) -> bool:
        if time.monotonic() - job.begin > self._minutes * 60 + _GRACE and job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        return job.process.poll() is not None

    @staticmethod
    def _report(number: int) -> Path:
        return LOGS / f"test-{number}.json"

    def _verdict(self, job: Job) -> Verdict:
        seconds = time.monotonic() - job.begin
        report = self._report(job.number)
        found = verdict(json.loads(report.read_text()), seconds) if report.exists() else None
        if found is None:
            tail = self._processes.log(f"test-{job.number}").read_text(errors="replace").strip().splitlines()[-1:]
            found = Verdict("failed", f"no verdict: exit code {job.process.returncode}: {''.join(tail)[:100]}")
        return found


def run(runner: Run, result: Result, workers: int, save: Callable[[], object]) -> None:
    """Run the tests without a verdict, those that must be alone one by one, and then repeat each failed test, alone.

    A test that failed in a resumed run is repeated too. The result is saved after each test.
    """
    begin = time.monotonic() - result.seconds
    total = len(result.pending) + len(result.tests)

    def judged(name: str, found: Verdict) -> None:
        now = found.after(result.tests.get(name))
        result.tests[name] = now
        result.pending = [each for each in result.pending if each != name]
        result.seconds = round(time.monotonic() - begin)
        save()
        reason = f": {now.reason}" if now.reason else ""
        say(f"{len(result.tests)} of {total}: {now.state} in {found.seconds} s: {name}{reason}")

    runner.play([name for name in result.pending if not is_serial(name)], workers, judged)
    for name in list(result.pending):
        runner.play([name], 1, judged)
    for name in result.failed:
        runner.play([name], 1, judged)


def versions(programs: Path, proxy: Sequence[str]) -> dict[str, str]:
    """Return the versions that influence a run's results; the folder's file `version` contains that of Kubernetes."""
    server: Mapping[str, Any] = json.loads(kubectl(programs, FOLDER, "get", "--raw", "/version"))
    parts = (server.get("major") or server.get("emulationMajor"), server.get("minor") or server.get("emulationMinor"))
    file = programs / "version"
    return {
        "kubernetes": file.read_text().strip() if file.exists() else ".".join(filter(None, parts)),
        "go": str(server["goVersion"]),
        "kernel": platform.release(),
        "containerd": first_line(["containerd", "--version"]).rpartition(" ")[2],
        "etcd": first_line([etcd(programs), "--version"]).rpartition(" ")[2],
        "kube-proxy": first_line([*proxy, "--version"]),
    }


def commit() -> str:
    """Return the project's commit, with a plus sign if files of the program or of e2e differ from it."""
    here = Path(__file__).parent
    name = first_line(["git", "-C", str(here), "rev-parse", "--short", "HEAD"])
    paths = [str(here.parent / "src"), *map(str, here.rglob("*.py"))]
    changed = first_line(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no", "--", *paths])
    return name + ("+" if changed else "")


def begin(proxy: str, mode: str, focus: str, chosen: Sequence[str], left_out: Mapping[str, str]) -> Result:
    """Return the result of a new run: all tests are pending."""
    return Result(proxy, mode, [], [], {}, 0, focus, {}, list(chosen), dict(left_out))


def resume(earlier: Result, fresh: Result) -> Result:
    """Return a result that continues an earlier one with its verdicts of the tests that are selected now.

    Raises E2EError.
    """
    if earlier.focus != fresh.focus:
        raise E2EError(f"the run to resume had FOCUS={earlier.focus or '(none)'}, this one {fresh.focus or '(none)'}")
    known = {name: found for name, found in earlier.tests.items() if name in fresh.pending}
    pending = [name for name in fresh.pending if name not in known]
    return msgspec.structs.replace(earlier, tests=known, pending=pending, left_out=fresh.left_out)


def today() -> str:
    """Return the date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def stamp(result: Result, known: Mapping[str, str]) -> None:
    """Add this day and commit to a result, and set the versions."""
    result.dates = sorted({*result.dates, today()})
    if commit() not in result.commits:
        result.commits = [*result.commits, commit()]
    result.versions = dict(known)
