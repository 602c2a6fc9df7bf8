"""Filters of sockets in classic BPF: what the kernel leaves out costs the process that listens nothing.

Sources: linux/filter.h, linux/bpf_common.h; net/core/filter.c of Linux 6.18.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from typing import Final

_ATTACH_FILTER: Final = 26  # SO_ATTACH_FILTER
_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter
_PROGRAM: Final = struct.Struct("@HP")  # struct sock_fprog
# What an instruction does: LD W ABS, JMP JEQ K, RET K.
LOAD_WORD: Final = 0x20
IF_EQUAL: Final = 0x15
RETURN: Final = 0x06
_ALL: Final = 0xFFFFFFFF
_SENDER: Final = 12  # nlmsg_pid of struct nlmsghdr

KEEP: Final = _INSTRUCTION.pack(RETURN, 0, 0, _ALL)
DROP: Final = _INSTRUCTION.pack(RETURN, 0, 0, 0)


def keeping(steps: Sequence[tuple[int, int]]) -> bytes:
    """Return a program of steps, each an instruction and its operand, that keeps what all comparisons hold for."""
    # A comparison that fails jumps to the last instruction, which drops; one that holds goes on.
    packed = b""
    for at, (code, operand) in enumerate(steps):
        packed += _INSTRUCTION.pack(code, 0, len(steps) - at if code == IF_EQUAL else 0, operand)
    return packed + KEEP + DROP


def without_senders(ports: Collection[int]) -> bytes:
    """Return a program that drops netlink messages which answer, or tell of, what came from one of these ports."""
    packed = [_INSTRUCTION.pack(LOAD_WORD, 0, 0, _SENDER)]
    for at, port in enumerate(ports):  # one that is equal jumps to the last instruction
        operand = int.from_bytes(port.to_bytes(4, sys.byteorder), "big")  # words are loaded as of the network
        packed.append(_INSTRUCTION.pack(IF_EQUAL, len(ports) - at, 0, operand))
    return b"".join(packed) + KEEP + DROP


def attach(sock: socket.socket, program: bytes) -> None:
    """Have the kernel filter what a socket hears, in place of its last filter. Raises OSError."""
    code = ctypes.create_string_buffer(program, len(program))
    where = _PROGRAM.pack(len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, where)
