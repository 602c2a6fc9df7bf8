"""Sockets in another network namespace of this node, which is found by one of its addresses. A child process enters the
namespace, drops all capabilities, and opens the sockets. Sources: setns(2), network_namespaces(7), and
net/core/net_namespace.c of Linux 6.18."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from kubeproxy.errors import ApplyError, NoAnswerError, Unsupported
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.proc.capability import forbid_new_privileges, keep_only
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
    """A child process in the network namespace with an address, which opens sockets that are bound to the address."""

    def __init__(self, child: int, channel: socket.socket) -> None:
        self._child = child
        self._channel = channel

    @classmethod
    def enter(cls, address: bytes) -> Self:
        """Start the child process; there must be only one thread. Raises Unsupported without the right to enter a
        namespace, and NoAnswerError unless exactly one namespace has the address."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if not child:
            try:
                ours.close()
                _serve(address, theirs)
            finally:
                os._exit(0)
        theirs.close()
        made = cls(child, ours)
        try:
            made._answer()
        except BaseException:
            made.close()
            raise
        return made

    def open(self, kind: socket.SocketKind) -> socket.socket:
        """Return a new socket of a type, which belongs to that namespace. Raises NoAnswerError."""
        self._channel.send(bytes([kind]))
        return socket.socket(fileno=self._answer()[0])

    def _answer(self) -> Sequence[int]:
        answer, descriptors, _, _ = socket.recv_fds(self._channel, _LONGEST, 1)
        text = answer[1:].decode() or "the process in its network namespace has ended"
        if answer[:1] == _UNSUPPORTED:
            raise Unsupported(text)
        if answer[:1] != _READY:
            raise NoAnswerError(text)
        return descriptors

    def close(self) -> None:
        """End the child process."""
        self._channel.close()
        os.waitpid(self._child, 0)


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
    except Exception as error:
        kind = _UNSUPPORTED if isinstance(error, Unsupported) else _FAILED
        channel.send(kind + (str(error) or repr(error)).encode()[: _LONGEST - 1])


def _enter(address: bytes) -> None:
    if _has(address):
        return
    holders: list[tuple[int, bool]] = []
    seen = denied = 0
    with nl.Netlink.open(nl.NETLINK_ROUTE) as here:
        socket.if_nameindex()  # to list interfaces, the kernel numbers the namespaces of their peers
        for path in _files():
            seen += 1
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                _move(descriptor)
                if _has(address):
                    holders.append((descriptor, _is_linked(here, descriptor)))
                else:
                    os.close(descriptor)
            except OSError:
                denied += 1
            except ApplyError:  # another program changes or deletes the namespace
                continue
    # A namespace without a link to this namespace belongs to another node on this machine, or to a deleted pod.
    chosen = [one for one, linked in holders if linked] or [one for one, _ in holders]
    if len(chosen) == 1:
        _move(chosen[0])
        return
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
