"""What a reader of others' bytes may do with any of them: answer, or raise an error that is declared; within bounds.

A hang is seen by whoever calls, by a limit on the time of one input.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kubeproxy.errors import KubeProxyError

Target = Callable[[bytes], object]

TIMES: Final = 20
"""Bytes of memory that one byte of input may take while it is being read."""
CONSTANT: Final = 2 << 20
"""Bytes that may be taken besides: caches, tables of regular expressions, a module that is imported by then."""


class TooMuchMemoryError(Exception):
    """An input took more memory than its size allows."""


def judge(target: Target, data: bytes) -> None:
    """Read the input; raise what the target raises that is no error of this program's."""
    with suppress(KubeProxyError):
        target(data)


def weigh(target: Target, data: bytes) -> int:
    """Judge the input and return the most bytes that Python had at a time meanwhile. Raises TooMuchMemoryError."""
    tracemalloc.start()
    try:
        judge(target, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > TIMES * len(data) + CONSTANT:
        raise TooMuchMemoryError(f"{len(data)} bytes took {peak}")
    return peak
