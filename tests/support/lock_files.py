"""The lock file of iptables, as another program sees it."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_free(path: Path) -> bool:
    """Whether another program could take the lock, as it does without -w."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
