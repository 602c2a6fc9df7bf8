"""How many files this process may have open, and how they are shared out, so that strangers cannot take all of them.

Whoever connects takes a descriptor. What the proxy itself needs (the API server, netlink, nft and its pipes, files)
must be left over however many connect, or a table that another program deletes stays away.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final, NamedTuple

_RESERVED: Final = 512
_MOST_CLIENTS: Final = 1024
_MOST_RELAYED: Final = 1 << 18  # some systems set no limit, but connections need memory as well


class Shares(NamedTuple):
    """Descriptors for clients of the HTTP servers, for sockets that listen for them, and for relayed traffic."""

    clients: int
    listeners: int
    relayed: int


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, as Go programs do; return it.

    The soft limit is 1,024 for the sake of select(), which knows no higher numbers. Our children have few files open,
    so that their numbers are low whatever the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def shares() -> Shares:
    """Return how the limit is shared out; at least an eighth of it belongs to the proxy itself."""
    return shares_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def shares_of(limit: int) -> Shares:
    """Return how so many descriptors are shared out."""
    if limit < 0:  # RLIM_INFINITY
        limit = 1 << 30
    clients, listeners = min(_MOST_CLIENTS, limit // 8), limit // 8
    rest = limit - clients - listeners - min(_RESERVED, limit // 4)
    return Shares(clients, listeners, min(rest, _MOST_RELAYED))
