"""Starts the proxy with a fault at one of its calls: the process dies there, or the call fails.

`python -m prove.launcher FAULT NUMBER COUNT BATCH -- ARGUMENTS`; NUMBER counts from 1 the calls into the kernel, which
are netlink messages and started programs (nft, iptables): the proxy dies before a call (`die-before`) or after the
kernel has processed it (`die-after`), gets the errno that FAULT names, has no memory for it (`no-memory`), or its clock
jumps an hour back or ten years ahead (`clock-back`, `clock-ahead`). `die-turn` counts turns of its event loop's
callbacks instead, so that it dies at any await, and `short-reads` makes it read at most NUMBER bytes at a time from the
API server. `answer-` before an errno counts transactions and other changes by netlink: one is not sent, and gets this
errno as its answer. The proxy's code is unchanged. COUNT is a file that gets a byte for each call ('.'), turn ('t') and
change ('a'), '' for none. BATCH is the number of elements from which nftables mode commits a transaction, 0 for its own
number.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MUTATION = "PROVE_MUTATION"
"""The environment variable with the mutation (mutating.py) of all proxies."""


CLOCKS = {"clock-back": -3600.0, "clock-ahead": 10 * 365 * 86400.0}
"""Seconds by which the wall clock steps."""
COMMAND = [sys.executable, "-m", "prove.launcher"]


def command(word: str = "none", number: int = 0, count: Path | str = "", batch: int = 0) -> list[str]:
    """Return the command that starts a proxy with a fault; `none` is the command without a fault."""
    return [*COMMAND, word, str(number), str(count), str(batch), "--"]


ANSWER = "answer-"
SECOND_LOOK = 4.0
"""Seconds until the proxy searches again for stale UDP flows; on a busy machine a flow begins within this time."""


def asks_for_change(data: bytes) -> bool:
    """Return whether netlink messages request a change, as a transaction does."""
    from kubeproxy.kernel.netlink import protocol  # noqa: PLC0415 - see _interpose

    return any(
        at.flags & (protocol.NLM_F_ACK | protocol.NLM_F_DUMP) == protocol.NLM_F_ACK for at in protocol.messages(data)
    )


def refusal(data: bytes, code: int) -> bytes:
    """Return the kernel's answer to netlink messages if it refuses all of them: the same errno to each request.

    The last message of a transaction requests an acknowledgement and gets a success, as if only others were wrong.
    """
    from kubeproxy.kernel.netlink import protocol  # noqa: PLC0415 - see _interpose
    from kubeproxy.kernel.nftables import nfnetlink  # noqa: PLC0415 - see _interpose

    edges = {nfnetlink._BATCH_BEGIN, nfnetlink._BATCH_END}
    found = list(protocol.messages(data))
    inner = [at for at in found if at.kind not in edges]
    codes = [(at.sequence, code) for at in inner]
    if len(inner) < len(found) and len(inner) > 1:
        codes = [(inner[0].sequence, code), (inner[-1].sequence, 0)]
    return b"".join(
        protocol.message(protocol.NLMSG_ERROR, 0, sequence, struct.pack("=i", -errno_) + bytes(16))
        for sequence, errno_ in codes
    )


class Answering:
    """A socket that returns given bytes, which no peer sent, before all others."""

    def __init__(self, opened: Any, answer: bytes) -> None:
        self._opened = opened
        self._answer = answer

    def recvmsg(self, size: int) -> Any:
        """Receive as a socket does; the kernel is the sender."""
        answer, self._answer = self._answer, b""
        return (answer, [], 0, (0, 0)) if answer else self._opened.recvmsg(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)


class Fault:
    """The fault at one of the calls, or turns; all of them are counted."""

    def __init__(self, word: str, number: int, path: str = "") -> None:
        self.word = word
        self.number = number
        self._calls = itertools.count(1)
        self._turns = itertools.count(1)
        self._changes = itertools.count(1)
        self._counted = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC) if path else -1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, wrapped with the fault."""

        def faulty(*given: Any, **named: Any) -> Any:
            number = next(self._calls)
            self._count(b".")
            if call is not _popen and asks_for_change(given[1]):
                self._count(b"a")
                if next(self._changes) == self.number and self.word.startswith(ANSWER):
                    code = getattr(errno, self.word.removeprefix(ANSWER))
                    given[0]._socket = Answering(given[0]._socket, refusal(given[1], code))
                    return None
            if self.word.startswith(ANSWER):
                return call(*given, **named)
            if number != self.number or self.word in {"none", "die-turn", "short-reads"}:
                return call(*given, **named)
            if self.word == "die-before":
                die()
            if self.word == "die-after":
                call(*given, **named)
                die()
            if self.word in CLOCKS:
                time.time = functools.partial(_shifted, time.time, CLOCKS[self.word])
                return call(*given, **named)
            if self.word == "no-memory":
                raise MemoryError("the test has no more")
            code = getattr(errno, self.word)
            if call is _popen:
                raise OSError(code, os.strerror(code))
            from kubeproxy.kernel.netlink.protocol import NetlinkError  # noqa: PLC0415 - see _interpose

            raise NetlinkError(code, "the test refuses this")

        return faulty

    def around_turn(self, turn: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        """Return the function that runs a callback of the event loop, after the fault."""

        def faulty(handle: asyncio.Handle) -> None:
            self._count(b"t")
            if next(self._turns) == self.number:
                die()
            turn(handle)

        return faulty

    @property
    def counts(self) -> bool:
        """Whether the number of calls is recorded."""
        return self._counted >= 0

    def _count(self, what: bytes) -> None:
        if self._counted >= 0:
            os.write(self._counted, what)


def _shifted(clock: Callable[[], float], by: float) -> float:
    return clock() + by


_popen = subprocess.Popen.__init__


def die() -> None:
    """End like by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Start the proxy; return its exit code."""
    word, number, path, batch, _, *arguments = argv
    _interpose(Fault(word, int(number), path))
    _hurry()
    if int(batch):
        from kubeproxy.backends.nftables import backend  # noqa: PLC0415 - see _interpose

        backend.BATCH = int(batch)
    from kubeproxy import cli  # noqa: PLC0415 - after the changes of its dependencies

    sys.argv = ["kube-proxy", *arguments]
    return cli.main()


def _interpose(fault: Fault) -> None:
    from kubeproxy.kernel.netlink import protocol  # noqa: PLC0415 - after a mutation

    protocol.Netlink._send = fault.around(protocol.Netlink._send)  # type: ignore[method-assign]
    subprocess.Popen.__init__ = fault.around(_popen)  # type: ignore[method-assign]
    if fault.word == "die-turn" or fault.counts:
        asyncio.Handle._run = fault.around_turn(asyncio.Handle._run)  # type: ignore[assignment,method-assign]
    if fault.word == "short-reads":
        asyncio.selector_events._SelectorSocketTransport.max_size = fault.number  # type: ignore[attr-defined]


def _hurry() -> None:
    """Shorten the proxy's first delays, so that an hour has more histories; lengthen the pause between two searches for
    stale UDP flows.
    """
    from kubeproxy.api import source, watch  # noqa: PLC0415
    from kubeproxy.engine import backlog  # noqa: PLC0415 - see _interpose
    from kubeproxy.report import flows  # noqa: PLC0415 - see _interpose

    # mypy: `watch` imports the name and does not export it.
    watch.ListPace = functools.partial(source.ListPace, first=0.05, cap=1.0, relist=0.05, healthy=3.0)  # type: ignore[assignment,attr-defined]
    backlog.INTERVAL = 0.2
    flows.SECOND_LOOK = SECOND_LOOK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
