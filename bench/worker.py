"""Runs measurements in separate processes, in network namespaces that always end with these processes.

The parent calls `measure`; the child (this module as a program) enters a namespace, calls the function and returns its
result. The kernel kills a child whose parent ends, and thereby removes the namespace.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from bench.report import ROOT

CLONE_NEWNET = 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


class BenchmarkFailed(Exception):  # noqa: N818 - the name is part of the message
    """A measurement failed; the message is for the user."""


def measure(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of a module in a new process and namespace; return its result, converted to JSON and back.

    Raises BenchmarkFailed with the process's standard error.
    """
    reader, writer = os.pipe()
    where = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "bench.worker", where, msgspec.json.encode(arguments).decode(), str(writer)]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, cwd=ROOT, pass_fds=(writer,), stdout=said, stderr=said)
        try:
            os.close(writer)
            with open(reader, "rb") as answers:
                answer = answers.read()
            if child.wait() != 0 or not answer:
                said.seek(0)
                raise BenchmarkFailed(f"{where} {arguments}:\n{said.read().decode(errors='replace')[-4000:]}")
            return msgspec.json.decode(answer)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_new_namespace() -> None:
    """Move this thread, and the processes that it starts afterwards, into a new network namespace with loopback up."""
    if _libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace: run as root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def enter_namespace(path: str) -> None:
    """Move this thread, and what it starts from here on, into an existing network namespace."""
    with open(path) as place:
        if _libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")


@contextmanager
def another_namespace() -> Iterator[None]:
    """Run the body in a new network namespace, and return to the previous one."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_new_namespace()
        yield
        if _libc.setns(home, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot go back to the network namespace")
    finally:
        os.close(home)


def main(where: str, arguments: str, answers: str) -> None:
    """Run one measurement."""
    die_with_parent()
    enter_new_namespace()
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name)(**msgspec.json.decode(arguments))
    with open(int(answers), "wb") as out:
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
