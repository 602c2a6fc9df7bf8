"""The kube-proxies that replace each other: ours, the Go kube-proxy, and ours of an earlier git revision."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from e2e.binaries import first_line
from e2e.errors import E2EError
from e2e.layout import NODES
from lab.proxyprocess import proxy_command

FLAGS: Final[Mapping[str, Sequence[str]]] = {
    NODES[0].name: ("--connection-counters", "--reset-gone-endpoints"),
    NODES[1].name: ("--connection-counters", "--fast-forward-after=20"),
}
"""Our flags by node: resets and fast forwarding exclude each other."""

MODES: Final = ("nftables", "iptables")

_ROOT: Final = Path(__file__).parents[2]
_RUN: Final = "import sys; from kubeproxy.cli import main; sys.exit(main())"


class Program(NamedTuple):
    """A kube-proxy in a mode: its command, and flags by node."""

    name: str
    mode: str
    command: Sequence[str]
    flags: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


def ours(mode: str) -> Program:
    """Return our kube-proxy of this checkout."""
    return Program("ours", mode, [proxy_command()], FLAGS)


def go(folder: Path, mode: str) -> Program:
    """Return the Go kube-proxy in a folder of programs."""
    return Program("Go", mode, [str(folder / "kube-proxy")])


def last_revision() -> str:
    """Return the last tag of this checkout, or without tags the revision 50 commits ago."""
    return first_line(["git", "-C", str(_ROOT), "describe", "--tags", "--abbrev=0", "HEAD^"]) or "HEAD~50"


def earlier(revision: str, mode: str, folder: Path) -> Program:
    """Return our kube-proxy of a revision, whose source is unpacked into a folder. Raises E2EError.

    It runs with the Python packages of this checkout.
    """
    git = ["git", "-C", str(_ROOT)]
    commit = first_line([*git, "rev-parse", "--short", "--verify", f"{revision}^{{commit}}"])
    archive = subprocess.run([*git, "archive", commit or revision, "src"], capture_output=True, check=False)
    if not commit or archive.returncode != 0:
        raise E2EError(f"PREVIOUS={revision}: git cannot unpack it: {archive.stderr.decode().strip()[-200:]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    command = ["env", f"PYTHONPATH={folder / 'src'}", sys.executable, "-c", _RUN]
    return Program(f"ours ({commit})", mode, command, FLAGS)
