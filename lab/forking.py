"""Functions for a process that imports all modules once, and then forks a child for each start."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

_DEATH_OF_PARENT, _NAME = 1, 15  # PR_SET_PDEATHSIG and PR_SET_NAME, linux/prctl.h


def import_all(left_out: Iterable[str] = ()) -> None:
    """Import all modules of the proxy, except those whose name contains one of these texts."""
    import kubeproxy  # noqa: PLC0415 - a caller may apply a mutation before the first import

    for module in pkgutil.walk_packages(kubeproxy.__path__, "kubeproxy."):
        if not any(part in module.name for part in left_out):
            importlib.import_module(module.name)


def wake_for_children() -> tuple[int, int]:
    """Return the two ends of a pipe: the first one becomes readable when a child ends."""
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake, woken


def ended_children() -> Iterator[tuple[int, int]]:
    """Yield the pid and the exit status, negative after a signal, of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def begin_anew(
    output: int, errors: int | None, unused: Iterable[int], name: str = "", orphaned: int = signal.SIGKILL
) -> None:
    """Reset a forked process to the state of a new process, with these descriptors as its outputs (None: the present
    standard error). Closes the `unused` descriptors. The process gets the signal `orphaned` when its parent dies.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_DEATH_OF_PARENT, orphaned)
    if name:
        libc.prctl(_NAME, name.encode())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell ignores this signal in background processes.
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for number, place in ((nothing, 0), (output, 1), (errors, 2)):
        if number is not None:
            os.dup2(number, place)
    for number in {nothing, output, *(() if errors is None else (errors,)), *unused}:
        os.close(number)
    random.seed()


def end_with(work: Callable[[], int]) -> NoReturn:
    """End this process, a fork, with the exit status that `work` returns, without the clean-up of an interpreter."""
    status = 1
    try:
        status = work()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # The interpreter flushes these at its end.
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
