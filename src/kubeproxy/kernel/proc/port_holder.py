"""The process that listens on a TCP port of this network namespace, if this process may see it.

Reads /proc of every process: only for occasional messages. A process with capabilities that this one lacks hides its
descriptors (ptrace(2), "access mode checking"); of these, only processes of a given name are considered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_LISTEN: Final = b"0A"  # TCP_LISTEN, in /proc/net/tcp


class Process(NamedTuple):
    """A process: its number, as this process sees it, and the name of its command."""

    pid: int
    command: str


def holder(port: int, name: str, proc: Path = _PROC) -> Process | None:
    """Return the process that listens on a port of any address, None if it is not visible.

    If exactly one process named `name` in this network namespace hides its descriptors, that one is returned.
    """
    sockets = _listeners(port, proc / "net")
    if not sockets:
        return None
    links = {f"socket:[{inode}]" for inode in sockets}
    hidden = []
    for process in _processes(proc):
        try:
            if _holds(proc / str(process.pid), links):
                return process
        except PermissionError:
            if process.command == name:
                hidden.append(process)
        except OSError:
            continue  # it has ended
    near = [process for process in hidden if _listeners(port, proc / str(process.pid) / "net") & sockets]
    return near[0] if len(near) == 1 else None


def _processes(proc: Path) -> Iterator[Process]:
    for number in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()):
        try:
            command = (proc / str(number) / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        yield Process(number, command)


def _holds(process: Path, links: set[str]) -> bool:
    for entry in (process / "fd").iterdir():
        try:
            if str(entry.readlink()) in links:
                return True
        except FileNotFoundError:
            continue
    return False


def _listeners(port: int, net: Path) -> set[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = set()
    wanted = b":%04X " % port
    for table in ("tcp", "tcp6"):
        try:
            lines = (net / table).read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...
            if wanted in line:
                words = line.split()
                if len(words) > 9 and words[1].endswith(wanted.strip()) and words[3] == _LISTEN:
                    found.add(words[9].decode(errors="replace"))
    return found
