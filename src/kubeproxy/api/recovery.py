"""What a failure changes about how one resource is asked for next, and how long that waits. Asks nothing itself.

The reactions are client-go's reflector's where it has one; watch.py asks, and says here how that went.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from kubeproxy.api.http import HttpClient
from kubeproxy.api.source import ListPace, ResourceStatus, Trouble, WatchTarget
from kubeproxy.api.status import (
    BadRequest,
    ConnectionFailed,
    Forbidden,
    Gone,
    MalformedAnswer,
    NoInitialEnd,
    NotFound,
    OutOfStep,
    StatusError,
    TooManyRequests,
    Unauthorized,
    VersionTooLarge,
    waiting_wished,
)
from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import SourceError

log = logging.getLogger("kubeproxy.api")

_RESUMES: Final = 3  # watches refused in a row before a new list; two are enough for one that was garbage


class WatchListSupport:
    """Whether the server streams its lists (KEP-3157); learnt once in a process, by the first refusal."""

    def __init__(self) -> None:
        self.supported = True

    def refused(self, reason: str) -> None:
        """Use paged lists from now on."""
        if self.supported:
            log.info("Using paged lists, not streamed ones: %s", reason)
        self.supported = False


class Asking:
    """How a resource is asked for next.

    `list_from` is the version that a list must not be older than. As client-go: the first list may come from the
    server's cache ("0"), later ones must not be older than what is known, and "" asks for the newest.
    """

    def __init__(self, target: WatchTarget, support: WatchListSupport) -> None:
        self.fields = target.fields
        self.list_needed = True
        self.list_from = "0"
        self.list_plainly = False
        self._support = support

    @property
    def streamed(self) -> bool:
        """Whether the next list is a WatchList."""
        return self._support.supported and not self.list_plainly

    def list_newest(self) -> None:
        """Have the newest state listed, whatever version is known."""
        self.list_needed = True
        self.list_from = ""


class Recovery:
    """The reactions of one reflector. `absent` is called when there is nothing to list and nobody shall wait for it."""

    def __init__(
        self,
        target: WatchTarget,
        status: ResourceStatus,
        client: HttpClient,
        support: WatchListSupport,
        pace: ListPace,
        absent: Callable[[], None],
    ) -> None:
        self.asking = Asking(target, support)
        self.trouble = Trouble(lambda text: log.warning("Cannot watch: %s", text))
        self._target = target
        self._status = status
        self._contact = client.contact
        self._cluster = client.cluster
        self._support = support
        self._pace = pace
        self._absent = absent
        self._listing = pace.backoff(pace.first)
        # Apart: junk in watches says nothing of lists, which succeed in between.
        self._watching = pace.backoff(pace.first)
        # Apart as well: however long the server was away, what it says when it is back is its first word.
        self._connecting = pace.backoff(pace.first_connect)
        self._listed_at = float("-inf")
        self._failures = 0
        self._unauthorized = False
        self._unreachable = False
        self._absence_told = False

    def listed(self) -> None:
        """Take note that a list was delivered."""
        self.asking.list_needed = False
        self._listed_at = time.monotonic()
        self._listing.succeeded()
        self._working()

    def heard(self) -> None:
        """Take note that a watch said something that makes sense."""
        self._watching.succeeded()
        self._working()

    def _working(self) -> None:
        self._failures = 0
        self._unauthorized = self._absence_told = False
        if self.trouble.over():
            log.info("Watching %s again", self._target.resource)
        self._status.trouble = ""

    async def pause(self, delay: float) -> None:
        """Wait before the next attempt; for less when the server was out of reach and somebody else got an answer."""
        if self._unreachable:
            self._unreachable = False
            await self._contact.pause(delay)
        else:
            await asyncio.sleep(delay)

    def ended_at_once(self) -> float:
        """Return the seconds to wait after a watch that said nothing and ended soon."""
        self._met(f"the server ends the watch of {self._target.resource} at once")
        return self._watching.failed()

    def internal_error(self) -> float:
        """Have everything listed; return the seconds to wait after an error of our own."""
        self.asking.list_needed = True
        return self._listing.failed()

    def react(self, error: SourceError, *, listing: bool, streamed: bool) -> float:
        """Decide what is done about `error`; return the seconds until then.

        `listing` says that no list was delivered since the last step, `streamed` that a WatchList was asked for.
        """
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
                self.asking.list_newest()
                return self._spread()
        self._met(str(error))
        if isinstance(error, MalformedAnswer) and self._failures >= _RESUMES - 1:
            self.asking.list_needed = self.asking.list_plainly = True
        return backoff.failed()

    def _react_to_status(self, error: StatusError, backoff: Backoff, *, listing: bool, streamed: bool) -> float:
        resource, asking = self._target.resource, self.asking
        match error:
            case Unauthorized() if not self._unauthorized:
                self._unauthorized = True  # the credentials were invalidated: once more with fresh ones
                return 0.0
            case Unauthorized():
                who = self._cluster.identity
                self._met(f"{resource}: the API server does not accept our credentials ({who}): {error}")
            case Forbidden() if self._target.optional:
                self._missing(self._permission(error))
            case Forbidden():
                self._met(self._permission(error))
            case NotFound() if self._target.optional:
                self._missing(f"the API server has no {resource}, looking again from time to time")
                return self._pace.absent * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load only
            case Gone():
                return self._expired(backoff, listing=listing)
            case VersionTooLarge():
                asking.list_newest()
                self._met(f"{resource}: {error}")
            case _ if listing and self._give_way(error, streamed=streamed):
                return 0.0
            case _:
                self._met(f"{resource}: {error}")
                if self._failures >= _RESUMES and not isinstance(error, TooManyRequests):
                    asking.list_newest()
        return max(backoff.failed(), waiting_wished(error))

    def _expired(self, backoff: Backoff, *, listing: bool) -> float:
        """List again, soon if this is the first time in a while."""
        recent = time.monotonic() - self._listed_at < self._pace.healthy
        self.asking.list_needed = True
        if listing:
            self.asking.list_from = ""
        log.info("Listing %s again, the version known is too old for the API server", self._target.resource)
        return backoff.failed() if listing or recent else self._spread()

    def _spread(self) -> float:
        return random.uniform(0.0, self._pace.relist)  # noqa: S311 - spreads load only

    def _give_way(self, error: StatusError, *, streamed: bool) -> bool:
        """Ask for less when the server refused a list for what was asked; return whether anything was left out."""
        about_fields = "field label" in str(error) or "field selector" in str(error) or not streamed
        if isinstance(error, BadRequest) and self.asking.fields and not self._target.fields_needed and about_fields:
            log.info("Listing %s without the field selector: %s", self._target.resource, error)
            self.asking.fields = ""
            return True
        if not streamed or isinstance(error, TooManyRequests):
            return False
        # The second is what an API server says whose etcd cannot tell its progress, as an ERROR event of code 500.
        if isinstance(error, BadRequest | NotFound) or error.code == 405 or "RequestWatchProgress" in str(error):
            self._support.refused(str(error))
            return True
        self.asking.list_plainly = True
        return self._failures <= 1 and error.retry_after is None

    def _permission(self, error: StatusError) -> str:
        target = self._target
        return (
            f"{error}; allow the verbs list and watch of {target.resource} in the API group {target.api_group!r}, as"
            " the ClusterRole kube-proxy-py of deploy/ does, and system:node-proxier"
        )

    def _missing(self, why: str) -> None:
        """Have nobody wait for what is not there; that is no trouble, and is said once."""
        if not self._absence_told:
            self._absence_told = True
            log.warning("Cannot watch: %s", why)
        self.asking.list_needed = True
        self._absent()

    def _met(self, trouble: str) -> None:
        self.trouble.met(trouble)
        self._status.trouble = trouble
