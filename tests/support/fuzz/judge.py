"""Checks a parser of external bytes: it returns an answer, or raises a declared error, within bounds of memory.

The caller detects a hang, by a limit on the time of one input.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kubeproxy.errors import KubeProxyError

Target = Callable[[bytes], object]

TIMES: Final = 20
"""Bytes of memory that the parser may use for one byte of input."""
CONSTANT: Final = 2 << 20
"""Bytes that the parser may use independent of the input: caches, compiled regular expressions, an imported module."""


class TooMuchMemoryError(Exception):
    """An input took more memory than its size allows."""


def judge(target: Target, data: bytes) -> None:
    """Parse the input; ignore the errors that the program declares, raise all others."""
    with suppress(KubeProxyError):
        target(data)


def weigh(target: Target, data: bytes) -> int:
    """Check the input and return the peak of Python's memory in bytes. Raises TooMuchMemoryError."""
    tracemalloc.start()
    try:
        judge(target, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > TIMES * len(data) + CONSTANT:
        raise TooMuchMemoryError(f"{len(data)} bytes took {peak}")
    return peak
