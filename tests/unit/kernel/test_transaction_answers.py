"""The kernel's answers to a transaction: for any errno, an unfinished transaction is an error."""

from __future__ import annotations

import errno
import socket
import struct
import threading

import pytest

from kubeproxy.kernel.netlink.protocol import HEADER, NLMSG_ERROR, NetlinkError, message, messages
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.kernel.nftables.nfnetlink import Transactions

PARTS = [chain_message(2, "table", "chain")] * 3


def answered(*codes: tuple[str, int]) -> None:
    """Commit, and return these errnos for messages by their position."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def answer() -> None:
        begin, *_, last, _ = [at.sequence for at in messages(theirs.recv(1 << 16))]
        numbers = {"begin": begin, "inner": 0, "last": last}
        for where, code in codes:
            theirs.send(message(NLMSG_ERROR, 0, numbers[where], struct.pack("=i", -code) + bytes(HEADER.size)))

    kernel = threading.Thread(target=answer)
    kernel.start()
    try:
        Transactions(ours).commit(PARTS)
    finally:
        kernel.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.EPERM, errno.EINTR, errno.ENOENT, errno.EEXIST])
@pytest.mark.parametrize("codes", ["begin", "inner last", "last"])
def test_a_transaction_that_was_not_done_is_an_error(codes: str, code: int) -> None:
    first, *others = codes.split()
    with pytest.raises(NetlinkError) as caught:
        answered((first, code), *((where, 0) for where in others))
    assert caught.value.code == code


def test_one_that_was_done_is_none() -> None:
    answered(("last", 0))
