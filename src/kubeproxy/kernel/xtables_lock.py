"""The lock that programs hold while they change legacy iptables: waiting for it so that one can tell who holds it.

The commands wait for it themselves (-w), but do not say for how long nor for whom. Source: iptables' xshared.c.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError

_POLL: Final = 0.02  # seconds
_VARIABLE: Final = "XTABLES_LOCKFILE"


class Waited(NamedTuple):
    """How many seconds the lock was another's, and whose, '' when that is not known."""

    seconds: float
    holder: str


NOT_WAITED: Final = Waited(0.0, "")


def path() -> Path:
    """Return the lock file that the commands use."""
    return Path(os.environ.get(_VARIABLE) or "/run/xtables.lock")


@contextmanager
def nobodys_lock() -> Iterator[None]:
    """Have the commands lock a file that means nothing to others: in a network namespace of one's own nobody changes
    anything beside them, and the lock knows no namespaces. Not for a process that changes the node's own tables.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def wait(patience: float) -> Waited:
    """Wait until nobody holds the lock, for so many seconds at most; it is not held afterwards.

    Raises ApplyError that names the holder when the time is over.
    """
    try:
        file = os.open(path(), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return NOT_WAITED  # the command says itself what is wrong with it
    try:
        began = time.monotonic()
        holder = ""
        while not _free(file):
            holder = holder or _holder(file)
            seconds = time.monotonic() - began
            if seconds >= patience:
                who = holder or "another program"
                raise ApplyError(f"{who} has held the iptables lock ({path()}) for more than {seconds:.0f} s")
            time.sleep(_POLL * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        return Waited(time.monotonic() - began if holder else 0.0, holder)
    finally:
        os.close(file)


def _free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _holder(file: int) -> str:
    """Return 'command (pid 42)' of the process that holds the lock, 'another program' when it cannot be seen."""
    inode = os.fstat(file).st_ino
    try:
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 42 00:19:1234 0 EOF
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode) and words[4] > "0":
                command = Path(f"/proc/{int(words[4])}/comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{command} (pid {words[4]})"
    except (OSError, ValueError):
        pass
    return "another program"
