"""Calls functions inside named network namespaces of iproute2 (/run/netns) without a process for each call.

A new thread enters the namespace, calls the function and ends, so no other thread leaves its namespace. A socket stays
in the namespace in which it was created, so the function can return sockets.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kubeproxy.errors import KubeProxyError

NETNS = Path("/run/netns")
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000  # linux/sched.h
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2  # linux/mount.h, linux/fs.h

_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(KubeProxyError):
    """A network namespace is missing or cannot be entered."""


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise NamespaceError(f"{what}: {os.strerror(code)}")


def _enter(name: str) -> None:
    try:
        fd = os.open(NETNS / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise NamespaceError(f"network namespace {name}: {e.strerror}") from e
    try:
        _check(_libc.setns(fd, CLONE_NEWNET), f"entering network namespace {name}")
    finally:
        os.close(fd)


def settle_in(name: str) -> None:
    """Move this process, which must have one thread, into the namespace permanently; /sys then shows its devices.

    `ip netns exec` does the same. Raises NamespaceError.
    """
    _enter(name)
    _check(_libc.unshare(CLONE_NEWNS), "making a mount namespace")
    _check(_libc.mount(None, b"/", None, _MS_SLAVE | _MS_REC, None), "keeping mounts to this process")
    _libc.umount2(b"/sys", _MNT_DETACH)
    _check(_libc.mount(name.encode(), b"/sys", b"sysfs", 0, None), "mounting /sys")


def _in_thread(enter: Callable[[], None], work: Callable[[], _T]) -> _T:
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter()
            results.append(work())
        except BaseException as e:
            # The caller's thread raises the same exception.
            errors.append(e)

    thread = threading.Thread(target=run, name="netns")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def run_in(name: str, work: Callable[[], _T]) -> _T:
    """Call `work` inside the namespace and return its result; takes about 0.1 ms. Processes that `work` starts are in
    the namespace too.

    Raises NamespaceError, and the exceptions of `work`.
    """
    return _in_thread(lambda: _enter(name), work)


def run_in_new(work: Callable[[], _T]) -> _T:
    """Call `work` inside a temporary namespace without a name, to test the kernel's abilities."""
    return _in_thread(lambda: _check(_libc.unshare(CLONE_NEWNET), "making a network namespace"), work)


async def run_in_async(name: str, work: Callable[[], _T]) -> _T:
    """Call run_in() from an event loop, without blocking it."""
    return await asyncio.get_running_loop().run_in_executor(None, run_in, name, work)


def threads_in(name: str, most: int) -> ThreadPoolExecutor:
    """Return an executor with at most this number of threads, which stay in the namespace, for frequent calls. The
    caller shuts it down."""
    return ThreadPoolExecutor(most, name, _enter, (name,))


def open_socket_in(name: str, factory: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that belongs to the namespace; any thread can use it."""
    return run_in(name, factory)


def names(prefix: str) -> list[str]:
    """Return the named namespaces whose names start with a prefix."""
    try:
        return sorted(p.name for p in NETNS.iterdir() if p.name.startswith(prefix))
    except FileNotFoundError:
        return []
