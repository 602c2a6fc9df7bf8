"""Reactions to failed lists and watches of one resource: the next request, its delay, and limits for streams without
data. For each failure to which client-go's reflector reacts, the reaction here is the same. watch.py sends the
requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from kubeproxy.api.connection import LEAST_PROGRESS, AnswerProgress
from kubeproxy.api.decode import WatchChanges
from kubeproxy.api.http import HttpClient
from kubeproxy.api.source import ListPace, ResourceStatus, Trouble, WatchTarget
from kubeproxy.api.status import LONGEST_WAIT, ConnectionFailed, MalformedAnswer, NoInitialEnd, OutOfStep, StatusError
from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import SourceError

log = logging.getLogger("kubeproxy.api")

_BAD_REQUEST: Final = frozenset((400, 422))
_RESUMES: Final = 3  # consecutive failures after which the next request is a list; 2 malformed answers are enough


class WatchListSupport:
    """Records whether the server streams its lists (KEP-3157); a refusal disables streaming for all resources."""

    def __init__(self) -> None:
        self.supported = True

    def refused(self, reason: str) -> None:
        """Use paged lists from now on, because the server does not stream lists."""
        if self.supported:
            log.info("Using paged lists instead of streamed lists: %s", reason)
        self.supported = False


class Recovery:
    """Decides the next request of one reflector and its delay. Calls `absent` if the resource does not exist."""

    def __init__(
        self,
        target: WatchTarget,
        status: ResourceStatus,
        client: HttpClient,
        support: WatchListSupport,
        pace: ListPace,
        absent: Callable[[], None],
    ) -> None:
        self.fields = target.fields  # the field selector
        self.list_needed = True  # the next request is a list
        # The minimum version of the list, as in client-go: first "0" (any version in the server's cache), then the last
        # known version; "" requests the newest version.
        self.list_from = "0"
        self.list_in_pages = False  # whether the next list is paged
        self.trouble = Trouble(lambda text: log.warning("Cannot watch: %s", text))
        self._target = target
        self._status = status
        self._contact = client.contact
        self._cluster = client.cluster
        self._support = support
        self._pace = pace
        self._absent = absent
        self._listing = pace.backoff(pace.first)
        # Each kind of failure has its own backoff, because lists can succeed between malformed watches, and because the
        # first connection after an outage should be fast.
        self._watching = pace.backoff(pace.first)
        self._connecting = pace.backoff(pace.first_connect)
        self._listed_at = float("-inf")
        self._failures = 0
        self._unauthorized = False
        self._unreachable = False
        self._absence_logged = False

    @property
    def streamed(self) -> bool:
        """Whether the next list is a WatchList."""
        return self._support.supported and not self.list_in_pages

    def listed(self, version: str) -> None:
        """Record that a list with this resourceVersion was delivered."""
        self.list_needed = False
        self.list_from = version
        self._listed_at = time.monotonic()
        self._listing.succeeded()
        self._working()

    def received(self) -> None:
        """Record that a watch delivered a valid event."""
        self._watching.succeeded()
        self._working()

    def _working(self) -> None:
        self._failures = 0
        self._unauthorized = self._absence_logged = False
        if self.trouble.over():
            log.info("Watching %s again", self._target.resource)
        self._status.trouble = ""

    async def pause(self, delay: float) -> None:
        """Wait `delay` seconds before the next attempt; after a lost connection, at most until another request gets
        an answer."""
        if self._unreachable:
            self._unreachable = False
            await self._contact.pause(delay)
        else:
            await asyncio.sleep(delay)

    def ended_at_once(self) -> float:
        """Return the seconds to wait after a short watch without an event."""
        self._met(f"the server ends the watch of {self._target.resource} immediately")
        return self._watching.failed()

    def internal_error(self) -> float:
        """Handle an internal error: the next request is a list; return the seconds until this request."""
        self.list_needed = True
        return self._listing.failed()

    def react(self, error: SourceError, *, listing: bool, streamed: bool) -> float:
        """Choose the next request after `error`; return the seconds to wait before the request. `listing`: the failed
        request was an incomplete list; `streamed`: the failed request was a WatchList."""
        if isinstance(error, ConnectionFailed):
            self._contact.failed(str(error))
            self._unreachable = True
            return self._connecting.failed()
        self._failures += 1
        backoff = self._listing if listing else self._watching
        match error:
            case StatusError():
                self._contact.answered()
                return self._react_to_status(error, backoff, listing=listing, streamed=streamed)
            case NoInitialEnd():
                self._support.refused(str(error))
                return 0.0
            case OutOfStep():
                log.warning("Listing %s again: %s", self._target.resource, error)
                self._list_newest()
                return self._spread()
        self._met(str(error))
        if isinstance(error, MalformedAnswer) and self._failures >= _RESUMES - 1:
            self.list_needed = self.list_in_pages = True
        return backoff.failed()

    def _react_to_status(self, error: StatusError, backoff: Backoff, *, listing: bool, streamed: bool) -> float:
        resource = self._target.resource
        match error:
            case StatusError(too_large=True):
                self._list_newest()
                self._met(f"{resource}: {error}")
            case StatusError(code=401) if not self._unauthorized:
                self._unauthorized = True  # the client has discarded the refused credentials: try new credentials once
                return 0.0
            case StatusError(code=401):
                identity = self._cluster.identity
                self._met(f"{resource}: the API server does not accept our credentials ({identity}): {error}")
            case StatusError(code=403) if self._target.optional:
                self._missing(self._permission(error))
                self._status.trouble = str(error)
            case StatusError(code=403):
                self._met(self._permission(error))
            case StatusError(code=404) if self._target.optional:
                self._missing(f"the API server has no {resource}; the proxy asks again later")
                return self._pace.absent * random.uniform(0.8, 1.2)  # noqa: S311 - randomness only to spread load
            case StatusError(expired=True):
                return self._expired(backoff, listing=listing)
            case _ if listing and self._give_way(error, streamed=streamed):
                return 0.0
            case _:
                self._met(f"{resource}: {error}")
                if self._failures >= _RESUMES and error.code != 429:
                    self._list_newest()
        return max(backoff.failed(), min(error.retry_after or 0.0, LONGEST_WAIT))

    def _list_newest(self) -> None:
        self.list_needed = True
        self.list_from = ""

    def _expired(self, backoff: Backoff, *, listing: bool) -> float:
        """Make the next request a list; return the seconds until this request: a backoff if a list failed or was
        delivered recently, else a short random time."""
        recent = time.monotonic() - self._listed_at < self._pace.healthy
        self.list_needed = True
        if listing:
            self.list_from = ""
        log.info("Listing %s again, the known version is too old for the API server", self._target.resource)
        return backoff.failed() if listing or recent else self._spread()

    def _spread(self) -> float:
        return random.uniform(0.0, self._pace.relist)  # noqa: S311 - randomness only to spread load

    def _give_way(self, error: StatusError, *, streamed: bool) -> bool:
        """Omit the part of the request that the server may have refused; return whether there was such a part."""
        about_fields = "field label" in str(error) or "field selector" in str(error) or not streamed
        if error.code in _BAD_REQUEST and self.fields and not self._target.fields_needed and about_fields:
            log.info("Listing %s without the field selector: %s", self._target.resource, error)
            self.fields = ""
            return True
        if not streamed or error.code == 429:
            return False
        # RequestWatchProgress: an ERROR event of code 500 from a server with an etcd that cannot report its progress.
        if error.code in {*_BAD_REQUEST, 404, 405} or "RequestWatchProgress" in str(error):
            self._support.refused(str(error))
            return True
        self.list_in_pages = True
        return self._failures <= 1 and error.retry_after is None

    def _permission(self, error: StatusError) -> str:
        target = self._target
        return (
            f"{error}; allow the verbs list and watch of {target.resource} in the API group {target.api_group!r}, as"
            " the ClusterRole kube-proxy-py of deploy/ does, and system:node-proxier"
        )

    def _missing(self, why: str) -> None:
        if not self._absence_logged:
            self._absence_logged = True
            log.warning("Cannot watch: %s", why)
        self.list_needed = True
        self._absent()

    def _met(self, trouble: str) -> None:
        self.trouble.met(trouble)
        self._status.trouble = trouble


class StreamClock:
    """The deadlines of one resource's streams, one stream at a time. A deadline passes if a list is silent or slow, or
    if watches are silent.

    `left` is the number of seconds in which watches may receive no data before the resource is listed again. An API
    server sends a bookmark each minute. If bookmarks are missing for minutes, the watch is dead although its connection
    is open, or the server was restored from a backup and has not reached the watched version. Some servers send no
    bookmarks, so the limit doubles with each list that silence causes, until a bookmark arrives."""

    left: float

    def __init__(self, pace: ListPace) -> None:
        self._pace = pace
        self._limit = pace.silence
        self._renew()

    def begin(self) -> asyncio.Timeout:
        """Return the deadline of a new stream, which `opened` starts."""
        self._loop = asyncio.get_running_loop()
        self._progress = AnswerProgress(self._pace.trickle, self._loop.time())
        self._silent_since: float | None = None
        self._deadline = asyncio.timeout(None)
        return self._deadline

    def opened(self, *, listing: bool) -> None:
        """Start the deadline after the server has accepted the request."""
        if listing:
            self._deadline.reschedule(self._loop.time() + self._pace.quiet)
        else:
            self._watch_on()

    def received(self, count: int, changes: WatchChanges, *, listing: bool) -> None:
        """Move the deadline after `count` bytes that complete `changes`; `listing`: the list is not complete yet."""
        now = self._loop.time()
        if listing:
            self._progress.received(count, now)
            self._deadline.reschedule(min(now + self._pace.quiet, self._progress.until))
            return
        is_event = changes.events or self._silent_since is None  # an event of a watch, or the end of the list
        if is_event or changes.version:
            self._limit = self._limit if is_event else self._pace.silence  # a bookmark resets the limit
            self._renew()
            self._watch_on()

    def ended(self) -> None:
        """At the end of a watch, subtract the silence since its last data from `left`, which limits the next watch."""
        if self._silent_since is not None:
            self.left = max(0.0, self.left - (self._loop.time() - self._silent_since))

    def error(self) -> SourceError:
        """Return the error of a deadline that has passed."""
        if self._silent_since is not None:
            silent = self._loop.time() - self._silent_since
            self._limit = min(2 * self._limit, self._pace.longest_silence)
            self._renew()
            self._silent_since = None
            return OutOfStep(f"the watch is open, but was silent for {silent:.0f} s")
        if self._loop.time() >= self._progress.until:
            rate = f"less than {LEAST_PROGRESS} bytes in {self._progress.timeout:.0f} s"
            return SourceError(f"the list arrives too slowly: {rate}")
        return NoInitialEnd(f"no end of the initial events within {self._pace.quiet:.0f} s of silence")

    def _renew(self) -> None:
        self.left = self._limit * random.uniform(1.0, 1.25)  # noqa: S311 - nodes must not list at the same time

    def _watch_on(self) -> None:
        self._silent_since = self._loop.time()
        self._deadline.reschedule(self._silent_since + self.left)
