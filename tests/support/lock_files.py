"""Locks the iptables lock file like another program."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_free(path: Path) -> bool:
    """Return whether another program could take the lock without waiting (without -w)."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
