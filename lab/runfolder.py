"""The files of a running cluster, and the id of its process: /run/kubeproxy-lab/ID."""

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
    """Return the folder of a cluster's kubeconfig, logs and pid. Raises ConfigError for an invalid id."""
    if not re.fullmatch(r"[a-z0-9]{1,16}", cluster_id):
        raise ConfigError(f"id: {cluster_id!r} must be 1 to 16 lower-case letters or digits")
    return RUN / cluster_id


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot: pid and start time together identify a process
    (proc(5)).
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def owner_pid(folder: Path) -> int | None:
    """Return the pid of the process that runs a folder's cluster; None if the process has ended."""
    try:
        pid, started = (folder / "pid").read_text().split()
        return int(pid) if _started(int(pid)) == started else None
    except (OSError, ValueError, IndexError):
        return None


def claim(folder: Path) -> None:
    """Create the cluster's folder; it replaces the folder of a killed run. Raises ConfigError if the cluster is
    running.
    """
    pid = owner_pid(folder)
    if pid is not None:
        raise ConfigError(f"id: a lab {folder.name} is running already (pid {pid}); choose another --id")
    shutil.rmtree(folder, ignore_errors=True)
    _make(folder)
    (folder / "pid").write_text(f"{os.getpid()} {_started(os.getpid())}")


def _make(folder: Path) -> None:
    for _ in range(10):
        # Another cluster may have removed the parent folder at this moment, as the last one to end.
        with contextlib.suppress(FileNotFoundError):
            RUN.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)
            return
    raise ConfigError(f"{folder} cannot be made: it is removed again and again")


def release(folder: Path) -> None:
    """Remove the cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # The last cluster also removes the parent folder.
        RUN.rmdir()


def remove_leftovers(cluster_id: str) -> bool:
    """Remove the remains of a killed cluster; return whether there were any. Raises ConfigError if the cluster still
    runs.
    """
    folder = run_folder(cluster_id)
    if (pid := owner_pid(folder)) is not None:
        raise ConfigError(f"id: the lab {cluster_id} is running (pid {pid})")
    topology = Topology(cluster_id)
    found = topology.exists() or folder.exists()
    topology.down()
    release(folder)
    return found


def clusters() -> dict[str, int | None]:
    """Return the ids of the clusters with a folder, and their processes (None: killed)."""
    try:
        folders = sorted(p for p in RUN.iterdir() if p.is_dir())
    except FileNotFoundError:
        return {}
    return {p.name: owner_pid(p) for p in folders}
