"""A network namespace with nothing in it: where a process may write rules to see how the kernel lists them.

What is written there touches nobody, and ends with the last socket that was opened there. Source: unshare(2).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kubeproxy.errors import Unsupported

T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000


def in_empty_network(work: Callable[[], T]) -> T:
    """Return what `work` returns, called by a thread that is alone in a new network namespace.

    Its sockets and child processes are in there as well. Raises Unsupported when this process may not make one.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_alone, work).result()


def _alone(work: Callable[[], T]) -> T:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise Unsupported(f"no network namespace can be made ({why}): give the process the capability CAP_SYS_ADMIN")
    return work()
