"""Starts the proxy with something wrong at one of the things that it says to the kernel: it dies there, or is refused.

`python -m prove.launcher FAULT NUMBER COUNT -- ARGUMENTS`: FAULT is `die-before`, `die-after` (the kernel has heard it,
nobody reads the answer) or the name of an errno; NUMBER counts netlink sends and programs started (nft, iptables)
from 1. The proxy itself knows nothing of it. COUNT is a file that gets a byte for each of them, '' for none.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prove import mutating

MUTATION = "PROVE_MUTATION"
"""Names a line to break, of mutating.py."""


COMMAND = [sys.executable, "-m", "prove.launcher"]


def command(word: str = "none", number: int = 0, count: Path | str = "") -> list[str]:
    """Return the command that starts a proxy with a fault; `none` is one without."""
    return [*COMMAND, word, str(number), str(count), "--"]


class Fault:
    """What happens at one of the calls; all of them are counted."""

    def __init__(self, word: str, number: int, path: str = "") -> None:
        self.word = word
        self.number = number
        self._calls = itertools.count(1)
        self._counted = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC) if path else -1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with the fault about it."""

        def faulty(*given: Any, **named: Any) -> Any:
            number = next(self._calls)
            if self._counted >= 0:
                os.write(self._counted, b".")
            if number != self.number:
                return call(*given, **named)
            if self.word == "die-before":
                die()
            if self.word == "die-after":
                call(*given, **named)
                die()
            code = getattr(errno, self.word)
            if call is _popen:
                raise OSError(code, os.strerror(code))
            from kubeproxy.kernel.netlink import NetlinkError  # noqa: PLC0415 - see _interpose

            raise NetlinkError(code, "the test refuses this")

        return faulty


_popen = subprocess.Popen.__init__


def die() -> None:
    """End as by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Start the proxy; return its exit code."""
    word, number, path, _, *arguments = argv
    if mutation := os.environ.get(MUTATION):
        mutating.apply(mutation)
    _interpose(Fault(word, int(number), path))
    _hurry()
    from kubeproxy import cli  # noqa: PLC0415 - after what it uses was changed

    sys.argv = ["kube-proxy", *arguments]
    return cli.main()


def _interpose(fault: Fault) -> None:
    from kubeproxy.kernel import netlink, nfnetlink  # noqa: PLC0415 - a mutation comes before any import

    nfnetlink.Transactions._send = fault.around(nfnetlink.Transactions._send)  # type: ignore[method-assign]
    netlink.Netlink._send = fault.around(netlink.Netlink._send)  # type: ignore[method-assign]
    subprocess.Popen.__init__ = fault.around(_popen)  # type: ignore[method-assign]


def _hurry() -> None:
    """Have it wait less where it waits for others' sake, so that an hour has more histories: its first delays."""
    from kubeproxy import inspection  # noqa: PLC0415 - see _interpose
    from kubeproxy.api import source, watch  # noqa: PLC0415

    watch.Pace = functools.partial(source.Pace, first=0.05, cap=1.0, relist=0.05, healthy=3.0)  # type: ignore[assignment,misc]
    inspection.INTERVAL = 0.2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
