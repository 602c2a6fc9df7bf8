"""One run of upstream's test binary: shards side by side, and what became of each test."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.cluster import say
from e2e.controlplane import kubeconfig, kubectl
from e2e.errors import E2EError
from e2e.layout import FOLDER, HUB, LOGS
from e2e.processes import Processes
from e2e.results import Result, Verdict, verdicts

SHARDS: Final = (
    r"\[sig-network\] Services ",
    r"\[sig-network\] (Networking |Conntrack|KubeProxy|Traffic|Topology|EndpointSlice |Service CIDRs|Connectivity)",
    r"\[sig-network\] (LoadBalancers|\[Feature:IPv6DualStack\])",
)
"""Regular expressions of the tests that a kube-proxy decides; each runs in a process of its own."""

SKIP: Final = (
    r"Disruptive|\[Flaky\]|Ingress|NetworkPolicy|SCTP|sctp|GCE|HostPort|Migration|NFAcct|finalizer|PerformanceDNS"
)


def run(
    programs: Path, processes: Processes, shards: Sequence[str], skip: str, timeout: str
) -> tuple[dict[str, Verdict], float]:
    """Run the tests; return a verdict for each that ran, and the seconds. Raises E2EError when none ran."""
    begin = time.monotonic()
    running: dict[int, subprocess.Popen[bytes]] = {}
    for number, focus in enumerate(shards, 1):
        running[number] = processes.start(f"tests-{number}", HUB, _command(programs, number, focus, skip, timeout))
    said: dict[int, tuple[int, int]] = {}
    while any(process.poll() is None for process in running.values()):
        time.sleep(5)
        for number in running:
            counts = progress(processes.log(f"tests-{number}").read_text(errors="replace"))
            if counts != said.get(number, (0, 0)):
                said[number] = counts
                say(f"shard {number}: {counts[0]} tests finished, {counts[1]} of them failed")
    found: dict[str, Verdict] = {}
    for number in running:
        report = LOGS / f"report-{number}.json"
        if report.exists():
            found |= verdicts(json.loads(report.read_text()))
        else:
            say(f"shard {number} wrote no report; its log ends: {processes.log(f'tests-{number}').read_text()[-600:]}")
    if not found:
        raise E2EError("no test ran")
    return found, time.monotonic() - begin


def _command(programs: Path, number: int, focus: str, skip: str, timeout: str) -> list[str]:
    return [
        str(programs / "e2e.test"),
        "-ginkgo.no-color",
        "-ginkgo.v",
        f"-ginkgo.timeout={timeout}",
        f"-ginkgo.focus={focus}",
        f"-ginkgo.skip={skip}",
        f"-ginkgo.json-report={LOGS / f'report-{number}.json'}",
        f"-kubeconfig={kubeconfig(FOLDER, 'admin')}",
        "-provider=skeleton",
        "-num-nodes=2",
        "-node-os-distro=debian",
    ]


def progress(log: str) -> tuple[int, int]:
    """Return how many tests a shard's log has finished, and how many of them failed."""
    finished = re.findall(r"^• \[(\S+)", log, re.MULTILINE)
    return len(finished), sum(not word[0].isdigit() for word in finished)


def versions(programs: Path, proxy: Sequence[str]) -> dict[str, str]:
    """Return the versions that decide what a run shows."""
    server: Mapping[str, Any] = json.loads(kubectl(programs, FOLDER, "get", "--raw", "/version"))
    return {
        "kubernetes": f"{server['major']}.{server['minor']}" if server["major"] else "",
        "go": str(server["goVersion"]),
        "kernel": platform.release(),
        "containerd": _first_line(["containerd", "--version"]),
        "etcd": _first_line(["etcd", "--version"]),
        "kube-proxy": _first_line([*proxy, "--version"]),
    }


def _first_line(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0].strip()


def commit() -> str:
    """Return the project's commit, with a plus sign when files differ from it."""
    here = Path(__file__).parent
    name = _first_line(["git", "-C", str(here), "rev-parse", "--short", "HEAD"])
    changed = _first_line(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return name + ("+" if changed else "")


def result(
    proxy: str, mode: str, found: Mapping[str, Verdict], seconds: float, known: Mapping[str, str], part: bool
) -> Result:
    """Return what is written about a run."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return Result(proxy, mode, day, commit(), dict(known), round(seconds), part, dict(found))
