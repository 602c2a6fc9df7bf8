"""Network namespaces for tests: the calling thread moves into a new one, and returns.

Sockets and child processes of the body are in the namespace too; the namespace ends with the last of them, so no
clean-up is needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def own_network() -> Iterator[None]:
    """Run the body in a new, empty network namespace. Calls can be nested; each level has another namespace."""
    outer = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", outer, _CLONE_NEWNET)
    finally:
        os.close(outer)


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)} (these tests need root)")
