"""Creates a cluster of two nodes, and removes it completely after success, failure or interruption."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e import controlplane, nodes
from e2e.errors import E2EError
from e2e.images import make_images
from e2e.layout import FOLDER, HUB, LOGS
from e2e.network import network_down, network_up
from e2e.processes import Processes, cgroups, end_all

_LOCK = Path("/run/lock/kpe2e.lock")


def say(text: str) -> None:
    """Print a line of progress with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@contextlib.contextmanager
def cluster(programs: Path, proxy: Sequence[str], mode: str) -> Iterator[Processes]:
    """Run a cluster with a kube-proxy on both nodes; everything except its logs is removed at the end. Raises E2EError.

    The remains of a killed run are removed first. One cluster at a time can run on a machine.
    """
    with _place() as processes:
        _bring_up(programs, proxy, mode, processes)
        yield processes


@contextlib.contextmanager
def alone(programs: Path) -> Iterator[Processes]:
    """Run only an API server in the cluster's network, otherwise like cluster(). Raises E2EError."""
    with _place() as processes:
        say("starting the API server")
        network_up()
        controlplane.write_credentials(FOLDER)
        controlplane.start_api(programs, FOLDER, processes)
        yield processes


@contextlib.contextmanager
def _place() -> Iterator[Processes]:
    """Take the lock, clean up, and make the folders; remove everything at the end."""
    with _locked():
        remove()
        shutil.rmtree(LOGS, ignore_errors=True)
        for folder in (FOLDER, LOGS):
            folder.mkdir(mode=0o700)
        processes = Processes(LOGS)
        try:
            yield processes
        finally:
            say("removing the cluster")
            # A second Ctrl-C would leave half of the cluster behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            remove()
            processes.reap()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise E2EError(f"another run is active: it holds {_LOCK}") from e
        yield


def _bring_up(programs: Path, proxy: Sequence[str], mode: str, processes: Processes) -> None:
    say("making images")
    images = make_images(programs, FOLDER / "images")
    say("starting the control plane")
    network_up()
    controlplane.write_credentials(FOLDER)
    controlplane.start(programs, FOLDER, processes)
    for stand_in in ("dns", "loadbalancer"):
        processes.start(stand_in, HUB, [sys.executable, "-m", "e2e", "stand-in", stand_in])
    controlplane.add_dns(programs, FOLDER)
    say("starting two nodes")
    nodes.start(programs, FOLDER, images, processes)
    say(f"starting {Path(proxy[0])} in {mode} mode on both")
    nodes.start_proxies(proxy, mode, FOLDER, processes)
    processes.check()


def remove() -> None:
    """Remove processes, mounts, namespaces, cgroups and the folder of a cluster, complete or not."""
    end_all()
    _unmount()
    network_down()
    for cgroup in cgroups():
        # The kernel removes cgroups without processes, children first; their files do not prevent this.
        for path, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                Path(path).rmdir()
    _remove_log_links()
    shutil.rmtree(FOLDER, ignore_errors=True)


def _unmount() -> None:
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed(mounts):
        if Path(mount).is_relative_to(FOLDER):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)


def _remove_log_links() -> None:
    """Remove the links to container logs that a kubelet makes in /var/log, wherever its own folder is."""
    for folder in (Path("/var/log/containers"), Path("/var/log/pods")):
        for link in folder.iterdir() if folder.is_dir() else ():
            if link.is_symlink() and os.readlink(link).startswith(f"{FOLDER}/"):  # noqa: PTH115 - text, not a path
                link.unlink()
