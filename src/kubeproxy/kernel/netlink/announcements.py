"""Receives the kernel's netlink multicast messages in the caller's network namespace, with filters in classic BPF. The
kernel applies the filters before it queues a message. Sources: netlink(7); linux/filter.h, linux/bpf_common.h,
net/core/filter.c of Linux 6.18."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Self

from kubeproxy.kernel.netlink import protocol as nl

_ADD_MEMBERSHIP: Final = 1
_DROP_MEMBERSHIP: Final = 2

_ATTACH_FILTER: Final = 26  # SO_ATTACH_FILTER
_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter
_PROGRAM: Final = struct.Struct("@HP")  # struct sock_fprog
# Instructions: LD W ABS, JMP JEQ K, RET K.
LOAD_WORD: Final = 0x20
IF_EQUAL: Final = 0x15
_RETURN: Final = 0x06
_SENDER: Final = 12  # nlmsg_pid of struct nlmsghdr
_KEEP: Final = _INSTRUCTION.pack(_RETURN, 0, 0, 0xFFFFFFFF)
_DROP: Final = _INSTRUCTION.pack(_RETURN, 0, 0, 0)
_LOAD_INDEXED: Final = {2: 0x48, 4: 0x40}
"""Opcodes of LD IND, by the number of bytes that the instruction loads from offset X + operand."""
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (3, 2)  # the two low bytes of nlmsg_len: enough below 64 KiB
_NEXT_MESSAGE: Final = b"".join(
    _INSTRUCTION.pack(code, 0, 0, operand)
    for code, operand in (
        (0x03, 1),  # M[1] = X
        (0x50, _HIGH),  # A = the byte at X + operand
        (0x64, 8),  # A <<= 8
        (0x02, 0),  # M[0] = A
        (0x50, _LOW),
        (0x61, 0),  # X = M[0]
        (0x4C, 0),  # A |= X
        (0x04, 3),  # A += 3
        (0x54, 0xFFFFFFFC),  # A &= operand
        (0x61, 1),  # X = M[1]
        (0x0C, 0),  # A += X
        (0x07, 0),  # X = A
    )
)
"""Instructions that add the padded length of the message at X to X."""
_MOST_MESSAGES: Final = 80
"""The filter examines at most this number of messages of a buffer, and accepts a buffer with more messages."""


class Announcements(nl.Closing):
    """A socket that receives multicast messages. `lost` counts the times when the kernel dropped messages because the
    receive buffer was full. `subject` completes the error text "cannot listen to ..."."""

    def __init__(self, sock: socket.socket, subject: str) -> None:
        self._socket = sock
        self._subject = subject
        self.lost = 0

    @classmethod
    def open(
        cls,
        subject: str,
        groups: Sequence[int],
        receive_buffer: int,
        protocol: int = nl.NETLINK_NETFILTER,
        program: bytes = b"",
    ) -> Self:
        """Open a socket that has joined these groups; `program` is its filter, b'' for none. Raises NetlinkError."""
        opened = cls(nl.open_socket(protocol, receive_buffer), subject)
        try:
            opened._socket.setblocking(False)
            if program:
                opened.attach(program)
            opened.join(*groups)
        except OSError as error:
            opened.close()
            raise opened._failure(error) from error
        return opened

    def close(self) -> None:
        """Close the socket, which the caller has removed from any event loop."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the file descriptor that is readable when messages are available."""
        return self._socket.fileno()

    def join(self, *groups: int) -> None:
        """Start to receive the messages of groups. Raises OSError."""
        for group in groups:
            self._socket.setsockopt(nl.SOL_NETLINK, _ADD_MEMBERSHIP, group)

    def leave(self, group: int) -> None:
        """Stop receiving the messages of a group; messages that have arrived can still be read. Raises OSError."""
        self._socket.setsockopt(nl.SOL_NETLINK, _DROP_MEMBERSHIP, group)

    def attach(self, program: bytes) -> None:
        """Attach a BPF filter program in place of the earlier program. Raises OSError."""
        code = ctypes.create_string_buffer(program, len(program))
        where = _PROGRAM.pack(len(program) // _INSTRUCTION.size, ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, where)

    def waiting(self) -> Iterator[bytes]:
        """Yield the available buffers, without blocking. Raises NetlinkError."""
        while True:
            try:
                data = self._receive()
            except BlockingIOError:
                return
            if data is not None:
                yield data

    def until(self, end: float) -> Iterator[bytes]:
        """Yield buffers until the time `end` of time.monotonic(); blocks. Raises NetlinkError."""
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._receive()
            except TimeoutError:
                return
            if data is not None:
                yield data

    def changed(self, matters: Callable[[bytes], bool] = lambda _: True) -> bool:
        """Read all available buffers, without blocking. Raises NetlinkError. Return whether `matters` is true for a
        buffer, or messages were lost. After `matters` has returned True, the method does not call `matters` again."""
        before, found = self.lost, False
        for data in self.waiting():
            found = found or matters(data)
        return found or self.lost != before

    def _receive(self) -> bytes | None:
        try:
            return self._socket.recv(nl.READ_SIZE)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise self._failure(error) from error
            self.lost += 1
            return None

    def _failure(self, error: OSError) -> nl.NetlinkError:
        return nl.NetlinkError(error.errno or errno.EIO, f"cannot listen to {self._subject}")


def keeping(steps: Sequence[tuple[int, int]]) -> bytes:
    """Return a filter program of steps (instruction, operand), which accepts a message if all comparisons are true."""
    # A false comparison jumps to the last instruction, which drops the message.
    packed = b""
    for at, (code, operand) in enumerate(steps):
        packed += _INSTRUCTION.pack(code, 0, len(steps) - at if code == IF_EQUAL else 0, operand)
    return packed + _KEEP + _DROP


def without_senders(ports: Collection[int], wanted: bytes = _KEEP) -> bytes:
    """Return a filter that drops messages caused by requests from these netlink ports; `wanted` filters the rest."""
    packed = [_INSTRUCTION.pack(LOAD_WORD, 0, 0, _SENDER)]
    for port in ports:
        packed += [_INSTRUCTION.pack(IF_EQUAL, 0, 1, loaded(port.to_bytes(4, sys.byteorder))), _DROP]
    return b"".join((*packed, wanted))


def loaded(field: bytes) -> int:
    """Return these bytes as a filter loads them: a number in network byte order."""
    return int.from_bytes(field, "big")


def keeping_any(*alternatives: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a filter that accepts a buffer if a message in it has all the fields of one alternative. A field is its
    offset in the message and its contents, of 2 or 4 bytes. The kernel puts several messages of a transaction into a
    buffer. A buffer is dropped if the filter loads bytes beyond the buffer's end."""
    test = b""
    for fields in alternatives:
        for left, (offset, contents) in zip(range(len(fields) - 1, -1, -1), fields, strict=True):
            test += _INSTRUCTION.pack(_LOAD_INDEXED[len(contents)], 0, 0, offset)
            test += _INSTRUCTION.pack(IF_EQUAL, 0, 2 * left + 1, loaded(contents))
        test += _KEEP
    return _INSTRUCTION.pack(0x01, 0, 0, 0) + (test + _NEXT_MESSAGE) * _MOST_MESSAGES + _KEEP
