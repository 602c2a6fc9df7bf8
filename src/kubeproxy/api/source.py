"""What both sources of objects (watch.py, manifests.py) share: how far each resource is, how to pace retries."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from kubeproxy.api.x509 import Validity
from kubeproxy.engine.pacing import Backoff
from kubeproxy.model.objects import Resource


class ResourceStatus:
    """How far the source of one resource is; read by health checks and metrics, written by the source.

    `synced`: a complete list was delivered at least once. `connected`: changes are arriving as they happen.
    `absent`: there is no such resource, or we may not see it, and that is no harm; an empty list was delivered.
    `last_contact`: when the server last sent something, seconds on time.monotonic(); at first the beginning.
    `trouble`: why lists and watches fail at the moment, '' when they do not, or the server is out of reach.
    """

    __slots__ = ("absent", "connected", "last_contact", "resource", "resource_version", "synced", "trouble")

    def __init__(self, resource: Resource) -> None:
        self.resource: Resource = resource
        self.synced = False
        self.connected = False
        self.absent = False
        self.last_contact = time.monotonic()
        self.resource_version = ""
        self.trouble = ""

    def staleness(self, now: float) -> float:
        """Return how many seconds old the delivered state may be at `now`: 0.0 while changes arrive or none can."""
        return 0.0 if self.connected or self.absent else max(0.0, now - self.last_contact)


class WatchStanding(Struct, frozen=True, kw_only=True):
    """How the source of one resource stands, for who asks: as ResourceStatus, with its staleness in seconds."""

    resource: str
    synced: bool
    connected: bool
    stale: float
    trouble: str = ""


class Reach(Struct, frozen=True, kw_only=True):
    """How an API server is reached: its URL, why it cannot be at the moment ('' when it can), each resource, and for
    when certificates are good, by the names of cluster.Trust.validities.
    """

    server: str
    trouble: str
    watched: tuple[WatchStanding, ...]
    certificates: Mapping[str, Validity]


def watched(status: ResourceStatus, now: float) -> WatchStanding:
    """Return how a source stands at `now`, of time.monotonic()."""
    return WatchStanding(
        resource=status.resource,
        synced=status.synced,
        connected=status.connected or status.absent,
        stale=status.staleness(now),
        trouble=status.trouble,
    )


STALE: Final = 300.0
"""Seconds without a word of a resource after which readiness says so."""


def why_stale(statuses: Iterable[ResourceStatus], unreachable: str, now: float) -> str | None:
    """Return why what is known may be old or nothing at all, None when it is not.

    `unreachable` is why the server cannot be reached, '' when it can; `now` is of time.monotonic().
    """
    for status in statuses:
        age = status.staleness(now)
        if status.synced and age <= STALE:
            continue
        what = "nothing heard of" if status.synced else "no list yet of"
        why = f"cannot reach the API server at {unreachable}" if unreachable else status.trouble
        return f"{what} {status.resource} from the API server for {age:.0f} s" + (f": {why}" if why else "")
    return None


class ListPace(Struct, frozen=True, kw_only=True):
    """Times in seconds, and the page size, of listing and watching. The defaults are for clusters."""

    page: int = 500
    """client-go's page size."""
    watch_min: float = 300.0
    watch_max: float = 600.0
    """A watch is asked for between these (client-go: 5 to 10 minutes), so that nodes do not renew together."""
    short_watch: float = 1.0
    """A watch that says nothing and ends sooner counts as a failure, or a broken server would make us spin."""
    quiet: float = 5.0
    """Silence in a WatchList before its end mark that means: this server ignores sendInitialEvents."""
    trickle: float = 30.0
    """A list that has not got on by some kilobytes in this time is given up (connection.Progress)."""
    silence: float = 240.0
    longest_silence: float = 3600.0
    """An open watch that says nothing for so long is not believed; see watch.Silence for the longer one."""
    absent: float = 300.0
    """Between looks for a resource that the server does not have."""
    first: float = 0.8
    first_connect: float = 0.05
    cap: float = 30.0
    """First and last delay of the backoff; it doubles (client-go: 0.8 to 30). Connecting starts sooner, for boot."""
    healthy: float = 60.0
    """Time without a failure after which the backoff starts anew."""
    relist: float = 0.5
    """Most that a new list after 410 Gone is put off: all nodes get theirs at once."""

    def backoff(self, first: float) -> Backoff:
        """Return delays that begin with `first` seconds."""
        return Backoff(first, self.cap, spread=0.5, healthy=self.healthy)
