"""Where a running cluster keeps its files, and which process it is: /run/kubeproxy-lab/ID."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from kubeproxy.errors import ConfigError
from lab.topology import Topology

RUN = Path("/run/kubeproxy-lab")


def run_folder(cluster_id: str) -> Path:
    """Where a cluster keeps its kubeconfig, logs and pid. Raises ConfigError for an id that makes no names."""
    if not re.fullmatch(r"[a-z0-9]{1,16}", cluster_id):
        raise ConfigError(f"id: {cluster_id!r} must be 1 to 16 lower-case letters or digits")
    return RUN / cluster_id


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot: with the pid it names one process for good (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def owner_pid(folder: Path) -> int | None:
    """The process that runs the cluster of a folder; None when it is gone."""
    try:
        pid, started = (folder / "pid").read_text().split()
        return int(pid) if _started(int(pid)) == started else None
    except (OSError, ValueError, IndexError):
        return None


def claim(folder: Path) -> None:
    """Make the cluster's folder; leftovers of a killed run are replaced. Raises ConfigError when it is running."""
    pid = owner_pid(folder)
    if pid is not None:
        raise ConfigError(f"id: a lab {folder.name} is running already (pid {pid}); choose another --id")
    shutil.rmtree(folder, ignore_errors=True)
    _make(folder)
    (folder / "pid").write_text(f"{os.getpid()} {_started(os.getpid())}")


def _make(folder: Path) -> None:
    for _ in range(10):
        # The last cluster to leave removes the parent, perhaps just now.
        with contextlib.suppress(FileNotFoundError):
            RUN.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)
            return
    raise ConfigError(f"{folder} cannot be made: it is removed again and again")


def release(folder: Path) -> None:
    """Remove the cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # The last one out.
        RUN.rmdir()


def remove_leftovers(cluster_id: str) -> bool:
    """Remove what a killed cluster left; whether there was anything. Raises ConfigError when it still runs."""
    folder = run_folder(cluster_id)
    if (pid := owner_pid(folder)) is not None:
        raise ConfigError(f"id: the lab {cluster_id} is running (pid {pid})")
    topology = Topology(cluster_id)
    found = topology.exists() or folder.exists()
    topology.down()
    release(folder)
    return found


def clusters() -> dict[str, int | None]:
    """The clusters that left a folder, and their processes (None: killed)."""
    try:
        folders = sorted(p for p in RUN.iterdir() if p.is_dir())
    except FileNotFoundError:
        return {}
    return {p.name: owner_pid(p) for p in folders}
