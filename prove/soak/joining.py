"""Enters the network namespace of another process."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)


def join_network_of(pid: int) -> None:
    """Move this thread, and the threads that it starts later, into the network namespace of a process. Raises
    OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of process {pid}")
    finally:
        os.close(namespace)
