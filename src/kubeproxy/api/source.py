"""The state of a source of objects (watch.py, manifests.py), its targets at the API server, and the pace of retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from kubeproxy.api.cluster import Validity
from kubeproxy.api.connection import LIST, OBJECT
from kubeproxy.engine.pacing import Backoff
from kubeproxy.model.objects import PROXY_LABEL, Resource

STALE: Final = 300.0  # seconds without an answer about a resource after which the proxy is not ready

BOOKMARKED: Final = 75.0
"""Seconds of silence after which the state counts as outdated, although the watch is open. The state's age is then the
time since the last bytes. An API server sends a bookmark each minute; without a bookmark, the connection may be dead,
although a device in between keeps it open."""

REPEAT: Final = 60.0
"""Seconds after which a continuing failure is logged again, so that it is visible at the end of a log."""

_MOST_PLACES: Final = 64
NO_HEADLESS: Final = "!service.kubernetes.io/headless"
NO_CLUSTER_IP_NONE: Final = "spec.clusterIP!=None"


def served(proxy_name: str) -> str:
    """Return the label selector of the Services of a proxy; the name is "" for a proxy without a name."""
    return f"{PROXY_LABEL}={proxy_name}" if proxy_name else f"!{PROXY_LABEL}"


class WatchTarget(Struct, frozen=True, kw_only=True):
    """The path and the selectors of one watched resource."""

    resource: Resource
    path: str
    api_group: str = ""  # for messages about permissions
    labels: str = ""
    fields: str = ""
    fields_needed: bool = False  # whether the field selector is mandatory
    optional: bool = False  # whether the server may lack the resource (404)
    most: int = LIST  # the maximum size of its list in bytes


def targets(node_name: str, proxy_name: str = "") -> tuple[WatchTarget, ...]:
    """Return the resources that kube-proxy v1.36 watches (cmd/kube-proxy/app/server.go)."""
    discovery, networking, node = "discovery.k8s.io", "networking.k8s.io", f"metadata.name={node_name}"
    return (
        WatchTarget(resource="services", path="/api/v1/services", labels=served(proxy_name), fields=NO_CLUSTER_IP_NONE),
        WatchTarget(
            resource="endpointslices",
            path=f"/apis/{discovery}/v1/endpointslices",
            api_group=discovery,
            labels=NO_HEADLESS,
        ),
        WatchTarget(resource="nodes", path="/api/v1/nodes", fields=node, fields_needed=True, most=OBJECT),
        WatchTarget(
            resource="servicecidrs", path=f"/apis/{networking}/v1/servicecidrs", api_group=networking, optional=True
        ),
    )


class Route:
    """The resolved addresses and ports of the API server, or of the HTTP proxy in front of it."""

    def __init__(self) -> None:
        self.places: frozenset[tuple[str, int]] = frozenset()
        self.changed: Callable[[], None] = lambda: None  # called before the first connection to a new address

    def take(self, places: frozenset[tuple[str, int]]) -> None:
        """Add addresses. Some earlier addresses are kept, because open connections may use them."""
        if not places <= self.places:
            self.places = places | (self.places if len(self.places) < _MOST_PLACES else frozenset())
            self.changed()


class Trouble(Struct):
    """The present failure of a source, or '' if there is none. The failure is logged when it changes, and every REPEAT
    seconds."""

    log: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    text: str = ""
    _since: float = 0.0
    _logged_at: float = 0.0

    def met(self, text: str) -> None:
        """Record the failure of an attempt."""
        now = self.clock()
        if text != self.text:
            if not self.text:
                self._since = now
            self.text = text
            self._logged_at = now
            self.log(text)
        elif now - self._logged_at >= REPEAT:
            self._logged_at = now
            self.log(f"{text} (for {now - self._since:.0f} s now)")

    def over(self) -> bool:
        """Clear the failure; return whether there was a failure."""
        was, self.text = bool(self.text), ""
        return was


class WatchStanding(Struct, frozen=True, kw_only=True):
    """The state of a resource's source, for answers: the fields of ResourceStatus, the age of the state in seconds, and
    the seconds since the server's last bytes."""

    resource: str
    synced: bool
    connected: bool
    stale: float
    silent: float = 0.0
    trouble: str = ""


class ResourceStatus(Struct):
    """The state of one resource's source. The source writes this state; health checks and metrics read it."""

    resource: Resource
    synced: bool = False  # a complete list was delivered at least once
    connected: bool = False  # changes are arriving as they happen
    absent: bool = False  # the resource does not exist or must not be listed; an empty list was delivered
    bookmarked: bool = False  # the server sends bookmarks, so an open watch is not silent for long
    last_contact: float = field(default_factory=time.monotonic)  # time of the last bytes; at first, time of the start
    resource_version: str = ""
    trouble: str = ""  # the reason why lists and watches fail; '' if they work or the server is unreachable

    def staleness(self, now: float) -> float:
        """Return the age of the state at `now` in seconds: 0.0 while changes can arrive, or for an absent resource."""
        age = max(0.0, now - self.last_contact)
        return 0.0 if self.absent or (self.connected and not (self.bookmarked and age > BOOKMARKED)) else age

    def standing(self, now: float) -> WatchStanding:
        """Return the state at `now`, a time of time.monotonic()."""
        return WatchStanding(
            resource=self.resource,
            synced=self.synced,
            connected=self.connected or self.absent,
            stale=self.staleness(now),
            silent=max(0.0, now - self.last_contact),
            trouble="" if self.connected else self.trouble,
        )


class Reach(Struct, frozen=True, kw_only=True):
    """The state of the connection to an API server."""

    server: str  # the URL of the server
    trouble: str  # the reason why the server cannot be reached; '' for a reachable server
    watched: tuple[WatchStanding, ...]
    certificates: Mapping[str, Validity]  # for the certificates in use; keys as in cluster.Trust.validities

    @property
    def nodes_listed(self) -> bool:
        """Whether a complete list of Nodes was read."""
        return any(one.resource == "nodes" and one.synced for one in self.watched)

    @property
    def failing(self) -> str:
        """A text with the names of resources that the proxy fails to list or watch, and the first reason; '' without
        such a resource."""
        failed = [one for one in self.watched if one.trouble and not one.connected]
        names = ", ".join(one.resource for one in failed)
        reason = failed[0].trouble.removeprefix(f"{failed[0].resource}: ") if failed else ""
        return f"the lists or watches of {names} fail: {reason}" if failed else ""

    @property
    def silent(self) -> float:
        """The seconds since the server's last bytes. Watches of an idle cluster are silent for up to a minute."""
        return min((one.silent for one in self.watched), default=0.0)

    def unanswered(self, trouble: str) -> Reach:
        """Return a copy of this state in which the server cannot be reached, for the reason `trouble`."""
        watched = tuple(replace(one, stale=max(one.stale, self.silent)) for one in self.watched)
        return replace(self, trouble=trouble, watched=watched)


def why_stale(statuses: Iterable[ResourceStatus], unreachable: str, now: float) -> str | None:
    """Return the reason why the state may be old or missing; None for a current state. `now` is a time of
    time.monotonic(). `unreachable` is the reason why the server cannot be reached, or '' if it can be reached."""
    for status in statuses:
        age = status.staleness(now)
        if status.synced and age <= STALE:
            continue
        resource = status.resource
        why = f"cannot reach the API server at {unreachable}" if unreachable else status.trouble
        what = f"nothing received about {resource}" if status.synced else f"no list of {resource} received"
        return f"{what} from the API server for {age:.0f} s" + (f": {why}" if why else "")
    return None


class ListPace(Struct, frozen=True, kw_only=True):
    """Durations of listing and watching in seconds, and the page size. The defaults are for real clusters."""

    page: int = 500  # client-go's page size
    watch_min: float = 300.0
    watch_max: float = 600.0
    """Shortest and longest duration of a watch, drawn at random to spread the load (client-go: 5 to 10 minutes)."""
    short_watch: float = 1.0
    """A watch that ends sooner, without an event, counts as a failure, so that a broken server causes no busy loop."""
    quiet: float = 5.0
    """Silence in an unfinished WatchList, after which the server is assumed to ignore sendInitialEvents."""
    trickle: float = 30.0  # time in which at least connection.LEAST_PROGRESS bytes of a list must arrive
    silence: float = 240.0
    longest_silence: float = 3600.0
    """Silence of an open watch after which the resource is listed again: first and longest value (see
    recovery.StreamClock)."""
    absent: float = 300.0  # time between lists of a resource that the server does not have
    first: float = 0.8
    first_connect: float = 0.05
    cap: float = 30.0
    """First and maximum delay of doubling backoffs, as in client-go. `first_connect` is shorter, for the boot of a
    node."""
    healthy: float = 60.0  # time without a failure after which the backoff starts again with its first delay
    relist: float = 0.5
    """Maximum random delay of a list after 410 Gone, because all nodes receive this answer at the same time."""

    def backoff(self, first: float) -> Backoff:
        """Return doubling delays that begin with `first` seconds."""
        return Backoff(first, self.cap, spread=0.5, healthy=self.healthy)
