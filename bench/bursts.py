"""Bursts of TCP SYNs from a raw socket measure the cost of forwarding one packet to some 10 ns.

The latency of a connection is two hundred times as long, and hides this cost.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

LENGTH: Final = 100
"""Packets of a burst, which is short compared with a time slice, so that few bursts are interrupted."""

_SYN = 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))  # struct iovec


class _Message(ctypes.Structure):
    """`struct mmsghdr`."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("_", ctypes.c_int),
        ("sent", ctypes.c_uint),
    )


class Burst:
    """SYNs to random addresses of a list, each from a different port, so that each begins a new connection."""

    def __init__(self, source: str, addresses: Sequence[str], port: int) -> None:
        choose = random.Random(1).choice
        self._kept: list[object] = []  # the buffers of the messages
        self._messages = (_Message * LENGTH)()
        for number, message in enumerate(self._messages):
            target = choose(addresses)
            segment = ctypes.create_string_buffer(syn(source, target, 20_000 + number, port), 20)
            name = ctypes.create_string_buffer(struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(target)), 16)
            piece = _Piece(ctypes.addressof(segment), 20)
            self._kept += [segment, name, piece]
            message.name, message.name_length = ctypes.addressof(name), 16
            message.pieces, message.piece_count = ctypes.addressof(piece), 1

    def send(self, link: socket.socket) -> float:
        """Send all packets; return the seconds per packet. Raises OSError."""
        began = time.perf_counter()
        sent = _libc.sendmmsg(link.fileno(), self._messages, LENGTH, 0)
        taken = time.perf_counter() - began
        if sent != LENGTH:
            raise OSError(ctypes.get_errno(), f"sent {sent} of {LENGTH} packets: {os.strerror(ctypes.get_errno())}")
        return taken / LENGTH


def syn(source: str, target: str, source_port: int, port: int) -> bytes:
    """Return a SYN segment with its checksum, which connection tracking verifies."""
    head, tail = struct.pack("!HHIIBBH", source_port, port, 1, 0, 5 << 4, _SYN, 65535), bytes(2)
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    summed = addresses + struct.pack("!HH", socket.IPPROTO_TCP, 20) + head + bytes(2) + tail
    total: int = sum(struct.unpack(f"!{len(summed) // 2}H", summed))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head + (~total & 0xFFFF).to_bytes(2, "big") + tail


def alternating(source: str, groups: Sequence[Sequence[str]], ports: Sequence[int], count: int) -> list[list[float]]:
    """Return the seconds per packet of each burst, to several groups of addresses in turn."""
    bursts = [Burst(source, addresses, port) for addresses, port in zip(groups, ports, strict=True)]
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)
        turns = [[burst.send(link) for burst in bursts] for _ in range(count)]
    return [list(taken) for taken in zip(*turns, strict=True)]
