"""An empty network namespace, to write rules and read how the kernel lists them.

The rules there affect no traffic, and disappear with the last socket that was opened there. Source: unshare(2).
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
    """Call `work` in a thread in a new network namespace, and return its result.

    Its sockets and child processes are in that namespace too. Raises Unsupported without the right to create one.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_alone, work).result()


def _alone(work: Callable[[], T]) -> T:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise Unsupported(f"cannot create a network namespace ({why}): give the process the capability CAP_SYS_ADMIN")
    return work()
