"""The kernel's answers to a transaction: for any errno, an unfinished transaction is an error."""

from __future__ import annotations

import errno
import struct

import pytest

from kubeproxy.kernel.netlink.protocol import HEADER, NLMSG_ERROR, NetlinkError, message, messages
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.kernel.nftables.nfnetlink import Transactions

PARTS = [chain_message(2, "table", "chain")] * 3


class Kernel:
    """A socket whose kernel gives these answers."""

    def __init__(self, codes: tuple[tuple[str, int], ...]) -> None:
        self._codes = codes
        self._answers: list[bytes] = []

    def sendto(self, data: bytes, _: object) -> None:
        begin, *_, last, _ = [at.sequence for at in messages(data)]
        numbers = {"begin": begin, "inner": 0, "last": last}
        for where, code in self._codes:
            answer = struct.pack("=i", -code) + bytes(HEADER.size)
            self._answers.append(message(NLMSG_ERROR, 0, numbers[where], answer))

    def recvmsg(self, _: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        return self._answers.pop(0), [], 0, (0, 0)

    def gettimeout(self) -> None:
        pass

    def recv(self, _: int) -> bytes:
        raise BlockingIOError

    setblocking = settimeout = lambda *_: None


def answered(*codes: tuple[str, int]) -> None:
    """Commit, and return these errnos for messages by their position."""
    Transactions(0, Kernel(codes)).commit(PARTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.EPERM, errno.EINTR, errno.ENOENT, errno.EEXIST])
@pytest.mark.parametrize("codes", ["begin", "inner last", "last"])
def test_a_transaction_that_was_not_done_is_an_error(codes: str, code: int) -> None:
    first, *others = codes.split()
    with pytest.raises(NetlinkError) as caught:
        answered((first, code), *((where, 0) for where in others))
    assert caught.value.code == code


def test_one_that_was_done_is_none() -> None:
    answered(("last", 0))
