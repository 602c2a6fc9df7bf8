"""Opens sockets in another network namespace of this node; an address identifies the namespace. A child process enters
the namespace, drops all capabilities, and opens the sockets. Sources: setns(2), network_namespaces(7), and
net/core/net_namespace.c of Linux 6.18."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from kubeproxy.errors import ApplyError, KubeProxyError, NoAnswerError, Unsupported
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.proc.capability import forbid_new_privileges, keep_only, threads
from kubeproxy.kernel.proc.processes import PROC
from kubeproxy.kernel.route import local_addresses
from kubeproxy.model.addresses import family_of, unpack

FOLDERS: Final = (Path("/run/netns"), Path("/run/docker/netns"))
"""The folders in which container runtimes and iproute2 mount network namespaces."""
_CLONE_NEWNET: Final = 0x40000000
_GET_ID: Final = 90  # RTM_GETNSID
_ID, _DESCRIPTOR = 1, 3  # NETNSA_NSID, NETNSA_FD
_ANY: Final = b"\0\0\0\0"  # struct rtgenmsg, padded
_NUMBER: Final = struct.Struct("=i")
_LONGEST: Final = 1024
_READY, _UNSUPPORTED, _FAILED = b"0", b"1", b"2"  # the first byte of a child's answer; a text follows


class SocketsElsewhere(nl.Closing):
    """A child process that opens sockets in the network namespace of an address, and binds them to the address."""

    def __init__(self, child: int, channel: socket.socket) -> None:
        self._child = child
        self._channel = channel

    @classmethod
    def enter(cls, address: bytes) -> Self:
        """Start the child process; there must be only one thread. Raises Unsupported without the right to enter a
        namespace, and NoAnswerError unless exactly one namespace has the address."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                child = os.fork()
            except OSError as error:
                ours.close()
                raise NoAnswerError(f"cannot start a process: {error.strerror}") from error
            if not child:
                status = 1
                try:
                    ours.close()
                    _serve(address, theirs)
                    status = 0
                finally:
                    os._exit(status)
        made = cls(child, ours)
        try:
            made._answer()
        except BaseException:
            made.close()
            raise
        return made

    def open(self, kind: socket.SocketKind) -> socket.socket:
        """Return a new socket of this kind in the child's network namespace. Raises NoAnswerError."""
        with suppress(OSError):  # the process has ended
            self._channel.send(bytes([kind]))
        return socket.socket(fileno=self._answer()[0])

    def _answer(self) -> Sequence[int]:
        answer, descriptors = b"", list[int]()
        with suppress(ConnectionResetError):  # the process has ended before it read the request
            answer, descriptors, _, _ = socket.recv_fds(self._channel, _LONGEST, 1)
        text = answer[1:].decode(errors="replace")
        if not answer:
            text = f"the process that enters the namespace ended {self._wait()}"
        if answer[:1] == _UNSUPPORTED:
            raise Unsupported(text)
        if answer[:1] != _READY:
            raise NoAnswerError(text)
        return descriptors

    def close(self) -> None:
        """End the child process."""
        self._channel.close()
        self._wait()

    def _wait(self) -> str:
        """Wait until the child process has ended; return how it ended."""
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        except ChildProcessError:  # SIGCHLD is ignored, or an earlier call has waited
            return "for an unknown reason"
        return f"with exit status {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"


def _serve(address: bytes, channel: socket.socket) -> None:
    try:
        _enter(address)
        keep_only(frozenset())
        forbid_new_privileges()
        channel.send(_READY)
        while kind := channel.recv(1):
            with socket.socket(family_of(address), kind[0] | socket.SOCK_CLOEXEC) as made:
                made.bind((unpack(address), 0))
                socket.send_fds(channel, [_READY], [made.fileno()])
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        kind = _UNSUPPORTED if isinstance(error, Unsupported) else _FAILED
        text = str(error) if isinstance(error, KubeProxyError | OSError) else repr(error)
        channel.send(kind + text.encode(errors="replace")[: _LONGEST - 1])


def _enter(address: bytes) -> None:
    """Move this process into the namespace with the address. A thread searches, and enters each namespace. During the
    search /proc/PID/ns/net still shows the original namespace, so a program that ends all processes of a searched
    namespace does not end this process."""
    if _has(address):
        return
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_holder, address).result()
    _move(found)
    while threads() > 1:  # the thread of the search has ended, but the kernel still counts it
        time.sleep(0.001)


def _holder(address: bytes) -> int:
    """Return a descriptor of the only other namespace with the address."""
    holders: list[tuple[int, bool]] = []
    seen = denied = 0
    with nl.Netlink.open(nl.NETLINK_ROUTE) as here:
        socket.if_nameindex()  # makes the kernel assign numbers to the namespaces of peers, for _is_linked
        for path in _files():
            seen += 1
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                _move(descriptor)
                if _has(address):
                    holders.append((descriptor, _is_linked(here, descriptor)))
                else:
                    os.close(descriptor)
            except (FileNotFoundError, ProcessLookupError, ApplyError):
                continue  # another program changes or deletes the namespace
            except OSError:
                denied += 1
    # A namespace without a link to this namespace belongs to another node on this machine, or to a deleted pod.
    chosen = [one for one, linked in holders if linked] or [one for one, _ in holders]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise NoAnswerError(f"{len(chosen)} network namespaces have this address")
    if denied or not seen:
        why = f"{denied} of {seen} network namespaces here cannot be entered" if seen else "no namespace is visible"
        raise Unsupported(f"it needs CAP_SYS_ADMIN and the node's folder {FOLDERS[0]}: {why}")
    raise NoAnswerError(f"none of the {seen} other network namespaces that are visible here has this address")


def _files() -> Iterator[Path]:
    """Yield a file of each visible network namespace except this process's namespace."""
    own = Path(PROC, "self/ns/net").stat()
    seen = {own.st_ino}
    named = (path for folder in FOLDERS if folder.is_dir() for path in sorted(folder.iterdir()))
    for path in (*named, *(path / "ns/net" for path in PROC.iterdir() if path.name.isdecimal())):
        with suppress(OSError):  # the process has ended, or is hidden
            about = path.stat()
            if about.st_dev == own.st_dev and about.st_ino not in seen:
                seen.add(about.st_ino)
                yield path


def _move(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _has(address: bytes) -> bool:
    return any(one.ip == address for one in local_addresses(family_of(address)))


@nl.understood("a network namespace")
def _is_linked(here: nl.Netlink, descriptor: int) -> bool:
    """Return whether an interface in the namespace of a netlink socket has its peer in another namespace."""
    asked = _ANY + nl.attribute(_DESCRIPTOR, _NUMBER.pack(descriptor))
    places = here.ask(_GET_ID, asked, "the number of a network namespace", len(_ANY))
    return any(_NUMBER.unpack(nl.parts(*place)[_ID])[0] >= 0 for place in places)
