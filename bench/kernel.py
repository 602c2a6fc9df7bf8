"""The physical limit: a run's transactions, recorded and replayed pre-encoded into an empty table."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from kubeproxy.kernel.netlink.protocol import (
    HEADER,
    NETLINK_CAP_ACK,
    NETLINK_NETFILTER,
    NLM_F_ACK,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    SOL_NETLINK,
)
from kubeproxy.kernel.netlink.protocol import messages as split
from kubeproxy.kernel.nftables import nfnetlink

_EDGE = 20  # nlmsghdr and nfgenmsg
_BEGIN, _END = 16, 17  # NFNL_MSG_BATCH_BEGIN, NFNL_MSG_BATCH_END
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


class Batch(Struct):
    """One transaction: its messages, and its duration in seconds (0.0 while it runs)."""

    parts: Sequence[bytes]
    seconds: float = 0.0


class Recording:
    """All messages to the kernel, in order."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def seconds(self) -> float:
        """Return the duration of all transactions."""
        return sum(batch.seconds for batch in self.batches)

    def bytes(self) -> int:
        """Return the length of all transactions."""
        return sum(len(part) for batch in self.batches for part in batch.parts)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the messages to the kernel, and their times."""
    recording = Recording()
    commit = nfnetlink.Transactions.commit

    def recording_commit(self: nfnetlink.Transactions, parts: Sequence[bytes]) -> None:
        batch = Batch(parts)
        recording.batches.append(batch)
        began = time.perf_counter()
        commit(self, parts)
        batch.seconds = time.perf_counter() - began

    patched: Any = nfnetlink.Transactions
    patched.commit = recording_commit
    try:
        yield recording
    finally:
        patched.commit = commit


def encoded(parts: Sequence[bytes]) -> bytes:
    """Return the bytes of a transaction for the socket; only its last message requests an acknowledgement."""
    begin = HEADER.pack(_EDGE, _BEGIN, NLM_F_REQUEST, 1, 0) + _generic()
    end = HEADER.pack(_EDGE, _END, NLM_F_REQUEST, 1, 0) + _generic()
    length, kind, flags, _, _ = HEADER.unpack_from(parts[-1])
    last = HEADER.pack(length, kind, flags | NLM_F_ACK, 2, 0) + parts[-1][HEADER.size :]
    return b"".join((begin, *parts[:-1], last, end))


def _generic() -> bytes:
    return b"\0\0" + nfnetlink.SUBSYSTEM.to_bytes(2, "big")


class Replayer:
    """Sends encoded transactions and waits for the kernel's acknowledgement; does nothing else."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 512 << 20)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 16 << 20)
        self._socket.settimeout(60)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(self, data: bytes) -> float:
        """Commit one transaction; return the seconds to its acknowledgement.

        Raises RuntimeError if the kernel refuses it.
        """
        began = time.perf_counter()
        self._socket.send(data)
        answer = self._socket.recv(1 << 16)
        seconds = time.perf_counter() - began
        for at in split(answer):
            if at.kind == NLMSG_ERROR and (code := int.from_bytes(answer[at.start : at.start + 4], "little")):
                raise RuntimeError(f"the kernel refused a replayed transaction: errno {(1 << 32) - code}")
        return seconds


def replay(recording: Recording) -> tuple[float, float]:
    """Replay a recording in this namespace, which has no such table yet.

    Returns the seconds of its transactions, and the CPU seconds of this process.
    """
    encodings = [encoded(batch.parts) for batch in recording.batches]
    replayer = Replayer()
    try:
        seconds = cpu = 0.0
        for data in encodings:
            spent = time.process_time()
            seconds += replayer.send(data)
            cpu += time.process_time() - spent
        return seconds, cpu
    finally:
        replayer.close()


def replay_side_by_side(recording: Recording) -> float:
    """Replay a recording in this namespace, with a thread per family; return the duration in seconds."""
    families: dict[int, list[bytes]] = {}
    for batch in recording.batches:
        families.setdefault(batch.parts[0][HEADER.size], []).append(encoded(batch.parts))
    replayers = [Replayer() for _ in families]
    with ThreadPoolExecutor(len(families)) as threads:
        began = time.perf_counter()
        list(threads.map(_send_all, replayers, families.values()))
        seconds = time.perf_counter() - began
    for replayer in replayers:
        replayer.close()
    return seconds


def _send_all(replayer: Replayer, transactions: Sequence[bytes]) -> None:
    for data in transactions:
        replayer.send(data)
