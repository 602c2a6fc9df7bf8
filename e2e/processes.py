"""The processes of the cluster: each has a separate log, and is ended by its id, also those of containers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from e2e.errors import E2EError
from e2e.layout import NAMESPACES, NODES
from e2e.network import inside
from lab.iproute import processes_in
from lab.netns import names

_CGROUPS = Path("/sys/fs/cgroup")


class Processes:
    """The programs of one cluster; each writes into `NAME.log` of a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}

    def start(self, name: str, namespace: str, command: Sequence[str], hostname: str = "") -> None:
        """Start a program of the cluster in a network namespace; the program runs until the end."""
        self._commands[name] = [*inside(namespace, hostname), *command]
        self.resume(name)

    def resume(self, name: str) -> None:
        """Start a stopped program of the cluster again with the same arguments."""
        self._running[name] = self._open(name, self._commands[name])

    def spawn(self, name: str, namespace: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program that ends on its own, or that the caller ends."""
        return self._open(name, [*inside(namespace), *command])

    def _open(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def pid(self, name: str) -> int:
        """Return the process id of a program of the cluster."""
        return self._running[name].pid

    def log(self, name: str) -> Path:
        """Return the path of a program's log."""
        return self._logs / f"{name}.log"

    def check(self) -> None:
        """Raise E2EError if a program of the cluster has ended unexpectedly."""
        for name, process in self._running.items():
            if (code := process.poll()) is not None:
                tail = "\n".join(self.log(name).read_text(errors="replace").splitlines()[-8:])
                raise E2EError(f"{name} ended with exit code {code}; the end of its log:\n{tail}")

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one program by a signal, after ten seconds by SIGKILL."""
        process = self._running.pop(name)
        process.send_signal(number)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def reap(self) -> None:
        """Wait for the programs that end_all() has ended."""
        for process in self._running.values():
            process.wait()
        self._running.clear()


def cgroups() -> list[Path]:
    """Return the root cgroup of each node in each hierarchy; cgroup v2 has only one hierarchy."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS / node.namespace for node in NODES]
    hierarchies = [path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]
    return [hierarchy / node.namespace for hierarchy in sorted(hierarchies) for node in NODES]


def remaining() -> set[int]:
    """Return the processes inside the cluster's network namespaces and cgroups, all of which belong to the cluster."""
    there = set(names("kpe2e-"))
    pids = {pid for name in NAMESPACES if name in there for pid in processes_in(name)}
    for cgroup in cgroups():
        for folder, _, _ in os.walk(cgroup):  # this call skips folders that disappear
            with contextlib.suppress(OSError):
                pids.update(int(pid) for pid in Path(folder, "cgroup.procs").read_text().split())
    return pids - {os.getpid()}


def end_all(patience: float = 8.0) -> None:
    """End every process of the cluster: SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + patience
    _signal(remaining(), signal.SIGTERM)
    while (pids := remaining()) and time.monotonic() < deadline + patience:
        if time.monotonic() > deadline:
            _signal(pids, signal.SIGKILL)
        time.sleep(0.2)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
