"""Reads the lists of the match `recent` (net/netfilter/xt_recent.c)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import pack

_LISTS: Final = Path("/proc/thread-self/net/xt_recent")
_ENTRY: Final = re.compile(r"src=(\S+) .*?last_seen: (\d+)")
_BOOTED: Final = 300  # seconds from the start of the kernel's counter of ticks to its overflow at 32 bits


def seen_ago(name: str, address: bytes) -> float | None:
    """Return the seconds since the last packet of an address in a list; None without an entry. Raises ApplyError."""
    try:
        text = (_LISTS / name).read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ApplyError(f"{_LISTS / name}: {error.strerror}") from error
    ticks = {pack(each): int(at) for each, at in _ENTRY.findall(text)}
    hertz = round(1 / time.clock_getres(_COARSE))
    seen = ticks.get(address)
    return None if seen is None else time.monotonic() + ((1 << 32) - seen) / hertz - _BOOTED


_COARSE: Final = 6  # CLOCK_MONOTONIC_COARSE, with a resolution of one tick
