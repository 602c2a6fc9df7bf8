"""Reads processes, their sockets and descriptors from /proc: finds kube-proxies and the process that listens on a port;
reaps orphans; sets the limit of open files. A function that reads /proc of every process is slow: call it only for a
rare message. Sources: proc(5), ptrace(2)."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family

PROC: Final = Path("/proc")

_NAME: Final = "kube-proxy"
_PYTHON: Final = re.compile(r"python[0-9.]*")


class ProxyProcess(NamedTuple):
    """A kube-proxy process: its arguments, and whether it is this program or the Go kube-proxy."""

    pid: int
    arguments: tuple[str, ...]
    ours: bool


class Descriptors(NamedTuple):
    """The number of a process's open files, and its limit."""

    used: int
    limit: int


def proxies(proc: Path = PROC) -> list[ProxyProcess]:
    """Return the kube-proxy processes in the caller's network namespace, except commands such as `kube-proxy why`."""
    here = _namespace(proc / "self")
    found = []
    for pid in _pids(proc):
        with suppress(OSError):  # the process has ended, or is not visible
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            process = _read(pid, words)
            if process is not None and here is not None and _namespace(proc / str(pid)) == here:
                found.append(process)
    return found


def is_halted(pid: int, proc: Path = PROC) -> bool:
    """Return whether a signal (SIGSTOP) or a debugger has stopped a process."""
    try:
        return _stat(pid, proc)[:1] in (["T"], ["t"])
    except OSError:
        return False


def _stat(pid: int, proc: Path = PROC) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, process group, session, ... Raises OSError."""
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _pids(proc: Path) -> list[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal())


def descriptors(pid: int, proc: Path = PROC) -> Descriptors | None:
    """Return the number of a process's open files and its limit; None if /proc does not show them."""
    try:
        used = sum(1 for _ in (proc / str(pid) / "fd").iterdir())
        limits = (proc / str(pid) / "limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^Max open files +(\d+)", limits, re.MULTILINE)
    return Descriptors(used, int(match[1])) if match is not None else None


def value_of(arguments: Sequence[str], flag: str) -> str:
    """Return the value of a flag in a command line; '' if the flag is missing."""
    for position, word in enumerate(arguments):
        if word.lstrip("-") == flag and position + 1 < len(arguments):
            return arguments[position + 1]
        if word.lstrip("-").startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def _read(pid: int, words: list[str]) -> ProxyProcess | None:
    program, arguments, ours = PurePath(words[0]).name, words[1:], False
    if _PYTHON.fullmatch(program):
        # The command line of a script is `python [-options] /path/of/kube-proxy ...`, or `python -m kubeproxy.cli ...`.
        scripts = [at for at, word in enumerate(arguments) if not word.startswith("-")]
        if not scripts:
            return None
        name, arguments, ours = arguments[scripts[0]], arguments[scripts[0] + 1 :], True
        program = _NAME if name in {"kubeproxy", "kubeproxy.cli"} else PurePath(name).name
    if program != _NAME or (arguments and not arguments[0].startswith("-")):
        return None
    return ProxyProcess(pid, tuple(arguments), ours)


def _namespace(process: Path) -> tuple[int, int] | None:
    try:
        status = (process / "ns/net").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def is_elsewhere(pid: int, proc: Path = PROC) -> bool:
    """Return whether a process certainly is in another network namespace than the caller."""
    there = _namespace(proc / str(pid))
    return there is not None and there != _namespace(proc / "self")


def sockets(pid: int, proc: Path = PROC) -> set[str] | None:
    """Return the inodes of a process's open sockets; None if /proc does not show them."""
    try:
        return {link[len("socket:[") : -1] for link in _links(proc / str(pid)) if link.startswith("socket:[")}
    except OSError:
        return None


class Process(NamedTuple):
    """A process: its ID in this process's PID namespace, and the name of its command."""

    pid: int
    command: str


def holder(port: int, name: str, proc: Path = PROC, address: bytes = b"") -> Process | None:
    """Return the process that listens on a port, on any address or on one address; None if /proc does not show it. A
    process with capabilities that this process lacks hides its descriptors (ptrace(2), "access mode checking"). If
    exactly one such process has the name `name` and is in the listener's network namespace, return that process."""
    sockets = _listeners(port, proc / "net", address)
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
            continue  # the process has ended
    near = [process for process in hidden if _listeners(port, proc / str(process.pid) / "net") & sockets]
    return near[0] if len(near) == 1 else None


def _processes(proc: Path) -> Iterator[Process]:
    for pid in _pids(proc):
        with suppress(OSError):
            yield Process(pid, (proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip())


def named(beginnings: tuple[str, ...], proc: Path = PROC) -> bool:
    """Return whether the name of a visible process starts with one of `beginnings`. A process that certainly is in
    another network namespace does not count."""
    return any(one.command.startswith(beginnings) and not is_elsewhere(one.pid, proc) for one in _processes(proc))


def _holds(process: Path, links: set[str]) -> bool:
    return not links.isdisjoint(_links(process))


def _links(process: Path) -> Iterator[str]:
    for entry in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(entry.readlink())


def _listeners(port: int, net: Path, address: bytes = b"") -> set[str]:
    """Return the inodes of the sockets that listen on a TCP port of any address, or of one packed address."""
    found: set[str] = set()
    for family in Family:
        with suppress(ApplyError):
            for inode, one in listeners(family, socket.IPPROTO_TCP, net).items():
                # A socket that is bound to an address of zeros listens on each address.
                if one.port == port and (not address or one.address == address or not any(one.address)):
                    found.add(inode)
    return found


_SOCKET_TABLES: Final = {
    (Family.IPV4, socket.IPPROTO_TCP): "tcp",
    (Family.IPV4, socket.IPPROTO_UDP): "udp",
    (Family.IPV6, socket.IPPROTO_TCP): "tcp6",
    (Family.IPV6, socket.IPPROTO_UDP): "udp6",
}
_LISTEN: Final = "0A"  # TCP_LISTEN
_NET: Final = Path("/proc/thread-self/net")
_UNCONNECTED: Final = "07"  # TCP_CLOSE, the state of UDP sockets without a peer


class Listening(NamedTuple):
    """A packed address (all zeros for any address) and a port on which a socket listens."""

    address: bytes
    port: int


def listening(family: Family, protocol: int) -> frozenset[Listening]:
    """Return the addresses and ports on which sockets of a family listen (TCP or UDP). Raises ApplyError."""
    return frozenset(listeners(family, protocol).values())


def listeners(family: Family, protocol: int, net: Path = _NET) -> dict[str, Listening]:
    """Return the addresses and ports on which sockets of a family listen, by the socket's inode. Raises ApplyError."""
    path = net / _SOCKET_TABLES[family, protocol]
    try:
        lines = path.read_text(errors="replace").splitlines()[1:]
    except FileNotFoundError:  # the kernel has no IPv6
        return {}
    except OSError as error:
        raise ApplyError(f"cannot read {path}: {error.strerror}") from error
    wanted = _LISTEN if protocol == socket.IPPROTO_TCP else _UNCONNECTED
    # sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode ...
    rows = (line.split(None, 10) for line in lines if f" {wanted} " in line)
    try:
        return {row[9]: _endpoint(row[1]) for row in rows if row[3] == wanted}
    except (ValueError, IndexError, OverflowError) as error:
        raise ApplyError(f"cannot read {path}: a line has an unknown format") from error


def _endpoint(text: str) -> Listening:
    """Parse an address (32-bit words in host byte order) and a port."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(address), 8))
    return Listening(b"".join(words), int(port, 16))


_RESERVED: Final = 512
_MOST_CLIENTS: Final = 1024
_MOST_RELAYED: Final = 1 << 18  # an upper bound, because each connection also uses memory


class Shares(NamedTuple):
    """The numbers of descriptors for clients of the HTTP servers, for listening sockets, and for relayed traffic.
    Clients cannot use the descriptors that the proxy needs for the API server, netlink, pipes and files. Without these
    descriptors the proxy cannot restore a table that another program deletes."""

    clients: int
    listeners: int
    relayed: int


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, as Go programs do; return the new limit. The usual soft
    limit of 1,024 protects programs that call select(), which supports no higher descriptors. Child processes of the
    proxy open few files, so their descriptors are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def shares() -> Shares:
    """Divide the limit of open files into shares; at least an eighth remains for the proxy itself."""
    return shares_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def shares_of(limit: int) -> Shares:
    """Divide a limit of open files into shares."""
    if limit < 0:  # RLIM_INFINITY
        limit = 1 << 30
    clients, listeners = min(_MOST_CLIENTS, limit // 8), limit // 8
    rest = limit - clients - listeners - min(_RESERVED, limit // 4)
    return Shares(clients, listeners, min(rest, _MOST_RELAYED))


INIT: Final = 1
LOOK: Final = 2.0
"""Seconds between two checks for zombies; a check that finds no zombies is one system call."""


class Orphans:
    """Reaps ended processes if their parents have ended, too. The parent of such a process becomes process 1, which in
    a container is the proxy.

    Orphans that no process reaps remain zombies, and a container's number of processes is limited: a credential plugin
    may leave processes behind with every token. A separate init process would need memory for this task only. The
    proxy's own children are not reaped here, because other code waits for them. A zombie in the proxy's own session is
    such a child. A credential plugin has its own session, but asyncio reaps it immediately, so a zombie in another
    session that two checks find is an orphan."""

    def __init__(self) -> None:
        self._seen: frozenset[int] = frozenset()

    async def run(self) -> None:
        """Reap orphans until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.reap()

    def reap(self) -> int:
        """Reap the zombies that this check and the previous check both found; return their number."""
        ended = frozenset(_strangers()) if _any_ended() else frozenset()
        gone = ended & self._seen
        self._seen = ended - gone
        for pid in gone:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return len(gone)


def _any_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _strangers() -> Iterator[int]:
    """Yield the child processes in another session that are zombies."""
    ours = str(os.getpid()), str(os.getsid(0))
    for pid in _pids(PROC):
        with suppress(OSError):
            words = _stat(pid)
            if words[0] == "Z" and words[1] == ours[0] and words[3] != ours[1]:
                yield pid
