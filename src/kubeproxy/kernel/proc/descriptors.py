"""The limit of open files, and its division, so that clients cannot use all descriptors.

Each connection takes a descriptor. The proxy itself needs some for the API server, netlink, pipes and files, however
many clients connect: without them it cannot restore a table that another program deletes.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final, NamedTuple

_RESERVED: Final = 512
_MOST_CLIENTS: Final = 1024
_MOST_RELAYED: Final = 1 << 18  # some systems set no limit, but connections need memory as well


class Shares(NamedTuple):
    """Numbers of descriptors for clients of the HTTP servers, for listening sockets, and for relayed traffic."""

    clients: int
    listeners: int
    relayed: int


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, as Go programs do; return it.

    The default soft limit of 1,024 is for programs with select(), which supports no higher numbers. Child processes of
    the proxy open few files, so their numbers stay low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft


def shares() -> Shares:
    """Return the division of the current limit; at least an eighth of it is left for the proxy itself."""
    return shares_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def shares_of(limit: int) -> Shares:
    """Return the division of a limit."""
    if limit < 0:  # RLIM_INFINITY
        limit = 1 << 30
    clients, listeners = min(_MOST_CLIENTS, limit // 8), limit // 8
    rest = limit - clients - listeners - min(_RESERVED, limit // 4)
    return Shares(clients, listeners, min(rest, _MOST_RELAYED))
