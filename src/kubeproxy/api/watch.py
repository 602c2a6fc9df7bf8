"""Lists and watches one resource for ever, and delivers what it finds as events; four of them make the ApiSource.

The protocol is client-go's reflector (WatchList where the server has it, else paged lists; bookmarks; 410 means
list again), the reactions to failure are `_react`. Bytes are decoded elsewhere (decode.py), sent by http.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from urllib.parse import quote, urlencode

from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.decode import Changes, WatchDecoder, decode_page, identity, kept_identities
from kubeproxy.api.source import Backoff, Pace, ResourceStatus
from kubeproxy.api.status import (
    BadRequest,
    ConnectionFailed,
    Forbidden,
    Gone,
    MalformedAnswer,
    NotFound,
    StatusError,
    TooManyRequests,
    Unauthorized,
    VersionTooLarge,
)
from kubeproxy.errors import SourceError
from kubeproxy.model.events import Deleted, Event, Rejected, Replaced, Sink, Upserted
from kubeproxy.model.objects import Object, Resource

log = logging.getLogger("kubeproxy.api")

NO_PROXY_NAME = "!service.kubernetes.io/service-proxy-name"
NO_HEADLESS = "!service.kubernetes.io/headless"
NO_CLUSTER_IP_NONE = "spec.clusterIP!=None"

_IDLE_GRACE = 30.0  # seconds a server may take to end a watch after the time that was asked for
_MAX_RETRY_AFTER = 120.0
_RESUMES = 3  # watches refused in a row before a new list; two are enough for one that was garbage


class Target(Struct, frozen=True, kw_only=True):
    """What one reflector watches. `optional`: the server may lack it (404). `api_group` is for RBAC messages."""

    resource: Resource
    path: str
    api_group: str
    labels: str = ""
    fields: str = ""
    fields_needed: bool = False
    optional: bool = False


def targets(node_name: str) -> tuple[Target, ...]:
    """Return what kube-proxy v1.36 watches (cmd/kube-proxy/app/server.go)."""
    return (
        Target(
            resource="services",
            path="/api/v1/services",
            api_group="",
            labels=NO_PROXY_NAME,
            fields=NO_CLUSTER_IP_NONE,
        ),
        Target(
            resource="endpointslices",
            path="/apis/discovery.k8s.io/v1/endpointslices",
            api_group="discovery.k8s.io",
            labels=NO_HEADLESS,
        ),
        Target(
            resource="nodes",
            path="/api/v1/nodes",
            api_group="",
            fields=f"metadata.name={node_name}",
            fields_needed=True,
        ),
        Target(
            resource="servicecidrs",
            path="/apis/networking.k8s.io/v1/servicecidrs",
            api_group="networking.k8s.io",
            optional=True,
        ),
    )


class ApiSource:
    """All resources of one node from an API server, to one sink."""

    def __init__(
        self,
        client: ApiClient,
        node_name: str,
        sink: Sink,
        *,
        pace: Pace | None = None,
        support: WatchListSupport | None = None,
    ) -> None:
        support = support or WatchListSupport()
        self.reflectors = [
            Reflector(client, target, sink, support=support, pace=pace or Pace()) for target in targets(node_name)
        ]
        self.statuses: dict[Resource, ResourceStatus] = {
            reflector.target.resource: reflector.status for reflector in self.reflectors
        }

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self.reflectors:
                group.create_task(reflector.run(), name=f"watch {reflector.target.resource}")


class WatchListSupport:
    """Whether the server streams its lists (KEP-3157); learnt once in a process, by the first refusal."""

    def __init__(self) -> None:
        self.supported = True

    def refused(self, reason: str) -> None:
        """Use paged lists from now on."""
        if self.supported:
            log.info("Using paged lists, not streamed ones: %s", reason)
        self.supported = False


class _NoInitialEnd(SourceError):  # noqa: N818 - it states what is missing
    """A WatchList went quiet, or ended, without the bookmark that completes it."""


class _Initial:
    """The objects of a WatchList until it is complete."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._rejected: list[Rejected] = []

    def take(self, events: Iterable[Event]) -> None:
        """Apply events in their order."""
        for event in events:
            match event:
                case Upserted(_, found):
                    self._objects[identity(found)] = found
                case Deleted(_, namespace, name):
                    self._objects.pop((namespace, name), None)
                case Rejected():
                    self._rejected.append(event)

    def result(self) -> tuple[list[Object], list[Rejected]]:
        """Return the objects, and what was rejected."""
        return list(self._objects.values()), self._rejected


class Reflector:
    """Keeps a sink up to date with one resource. `run` ends only when cancelled; `status` tells how it goes."""

    def __init__(self, client: ApiClient, target: Target, sink: Sink, *, support: WatchListSupport, pace: Pace) -> None:
        self.target = target
        self.status = ResourceStatus(target.resource)
        self._http = client.http
        self._contact = client.contact
        self._sink = sink
        self._support = support
        self._pace = pace
        self._backoff = Backoff(pace, time.monotonic)
        # Apart: however long the server was away, what it says when it is back is its first word.
        self._connecting = Backoff(pace, time.monotonic)
        self._fields = target.fields
        self._list_needed = True
        # As client-go: the first list may come from the server's cache (0), later ones must not be older than
        # what is known, and '' asks for the newest when the server does not know that version.
        self._list_from = "0"
        self._list_plainly = False
        self._streamed = False  # the list asked for last was: another reflector may have learnt better meanwhile
        self._initial: _Initial | None = None
        self._listed_at = float("-inf")
        self._failures = 0
        self._unauthorized = False
        self._unreachable = False
        self._trouble = ""

    async def run(self) -> None:
        """List and watch until cancelled. Failures are logged once for each change and retried."""
        while True:
            delay = await self._step()
            if self.status.connected:
                # Until now changes arrived: TCP keepalive would have told otherwise within half a minute.
                self.status.connected = False
                self.status.last_contact = time.monotonic()
            if self._unreachable:
                await self._contact.pause(delay)
            else:
                await asyncio.sleep(delay)

    async def _step(self) -> float:
        """List, or watch until that ends; return the seconds to wait before the next step."""
        started, version = time.monotonic(), self.status.resource_version
        listing = self._list_needed
        self._unreachable = False
        try:
            if not listing:
                await self._watch()
            elif self._support.supported and not self._list_plainly:
                await self._watch_list()
            else:
                await self._list()
                return 0.0
        except SourceError as error:
            # A WatchList that was completed has become a watch.
            return self._react(error, listing=listing and self._list_needed)
        except Exception:
            log.exception("Listing %s anew after an internal error", self.target.resource)
            self._list_needed = True
            return self._backoff.next(self._pace.first)
        if time.monotonic() - started < self._pace.short_watch and self.status.resource_version == version:
            self._say(f"the server ends the watch of {self.target.resource} at once")
            return self._backoff.next(self._pace.first)
        return 0.0

    # Three ways to ask.

    async def _list(self) -> None:
        """List page by page, decoding each before the next is fetched."""
        self._streamed = False
        objects: list[Object] = []
        rejected: list[Rejected] = []
        version, token, limit = "", "", self._pace.page
        while True:
            try:
                data = await self._fetch_page(token, limit)
            except Gone:
                if not token:
                    raise
                # The continue token expired (5 minutes by default): in one piece then, as client-go's pager.
                objects, rejected, version, token, limit = [], [], "", "", 0
                self._list_from = ""
                continue
            page = decode_page(self.target.resource, data)
            del data
            objects += page.objects
            rejected += page.rejected
            version = version or page.version
            if page.continue_token == token:
                break
            token = page.continue_token
            if not token:
                break
        if token:
            raise MalformedAnswer(f"the list of {self.target.resource} continues with the same token")
        self._list_plainly = False
        self._deliver(objects, rejected, version)

    async def _fetch_page(self, token: str, limit: int) -> bytearray:
        query = {"limit": str(limit)} if limit else {}
        if token:
            query["continue"] = token
        elif self._list_from:
            query["resourceVersion"] = self._list_from
            if self._list_from != "0":
                query["resourceVersionMatch"] = "NotOlderThan"
        response = await self._http.request("GET", self._path(query))
        self._contact.answered()
        self.status.last_contact = time.monotonic()
        return response.body

    async def _watch(self) -> None:
        await self._stream({"resourceVersion": self.status.resource_version}, asyncio.timeout(None))

    async def _watch_list(self) -> None:
        """Watch with initial events. Raises _NoInitialEnd when the server does not mark their end."""
        self._streamed = True
        self._initial = _Initial()
        query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        try:
            await self._stream(query, asyncio.timeout(None))
        except TimeoutError:
            raise _NoInitialEnd(f"no end of the initial events within {self._pace.quiet:.0f} s of silence") from None
        finally:
            unfinished, self._initial = self._initial is not None, None
        if unfinished:
            raise _NoInitialEnd("the stream ended before its initial events did")

    async def _stream(self, query: dict[str, str], deadline: asyncio.Timeout) -> None:
        decoder = WatchDecoder(self.target.resource)
        seconds = random.uniform(self._pace.watch_min, self._pace.watch_max)  # noqa: S311 - spreads load only
        loop = asyncio.get_running_loop()

        def on_open() -> None:
            self._contact.answered()
            self.status.last_contact = time.monotonic()
            if self._initial is not None:
                deadline.reschedule(loop.time() + self._pace.quiet)
            else:
                self.status.connected = True

        def on_bytes(data: bytes) -> None:
            self.status.last_contact = time.monotonic()
            waiting = self._initial is not None
            self._take(decoder.feed(data))
            if waiting:
                deadline.reschedule(loop.time() + self._pace.quiet if self._initial is not None else None)

        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(max(1, round(seconds)))}
        async with deadline:
            await self._http.stream(self._path(query), on_bytes, on_open=on_open, idle_timeout=seconds + _IDLE_GRACE)
        self._take(decoder.finish())

    # What was received.

    def _take(self, changes: Changes) -> None:
        """Deliver what the watch said, then remember how far that is, then raise its error if it has one."""
        initial = self._initial
        if initial is not None:
            initial.take(changes.events)
            if changes.initial_end:
                self._initial = None
                self._deliver(*initial.result(), changes.version)
                self.status.connected = True
        else:
            if changes.events:
                self._sink(changes.events)
            if changes.version:
                self.status.resource_version = changes.version
        if changes.events or changes.version:
            self._working()
        if changes.error is not None:
            raise changes.error

    def _deliver(self, objects: list[Object], rejected: list[Rejected], version: str) -> None:
        """Deliver a complete list."""
        resource = self.target.resource
        self._sink([Replaced(resource, objects, kept_identities(objects, rejected)), *rejected])
        self.status.synced = True
        self.status.absent = False
        self.status.resource_version = self._list_from = version
        self._list_needed = False
        self._listed_at = time.monotonic()
        self._working()

    def _working(self) -> None:
        self._failures = 0
        self._unauthorized = False
        if self._trouble:
            log.info("Watching %s again", self.target.resource)
            self._trouble = ""

    # What went wrong.

    def _react(self, error: SourceError, *, listing: bool) -> float:
        """Decide what is done about `error`; return the seconds until then."""
        if isinstance(error, ConnectionFailed):
            self._contact.failed(str(error))
            self._unreachable = True
            return self._connecting.next(self._pace.first_connect)
        self._failures += 1
        if isinstance(error, StatusError):
            self._contact.answered()
            return self._react_to_status(error, listing=listing)
        if isinstance(error, _NoInitialEnd):
            self._support.refused(str(error))
            return 0.0
        self._say(str(error))
        if isinstance(error, MalformedAnswer) and self._failures >= _RESUMES - 1:
            self._list_needed = self._list_plainly = True
        return self._backoff.next(self._pace.first)

    def _react_to_status(self, error: StatusError, *, listing: bool) -> float:
        resource = self.target.resource
        match error:
            case Unauthorized() if not self._unauthorized:
                self._unauthorized = True  # the credentials were invalidated: once more with fresh ones
                return 0.0
            case Unauthorized():
                self._say(f"{resource}: the API server does not accept our credentials: {error}")
            case Forbidden():
                self._forbidden(error)
            case NotFound() if self.target.optional:
                self._absent(f"the API server has no {resource}, looking again from time to time")
                return self._pace.absent * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load only
            case Gone():
                return self._expired(listing=listing)
            case VersionTooLarge():
                self._list_needed = True
                self._list_from = ""
                self._say(f"{resource}: {error}")
            case _ if listing and self._give_way(error):
                return 0.0
            case _:
                self._say(f"{resource}: {error}")
                if self._failures >= _RESUMES and not isinstance(error, TooManyRequests):
                    self._list_needed = True
                    self._list_from = ""
        return max(self._backoff.next(self._pace.first), min(error.retry_after or 0.0, _MAX_RETRY_AFTER))

    def _expired(self, *, listing: bool) -> float:
        """Gone: list again, soon if this is the first time in a while."""
        recent = time.monotonic() - self._listed_at < self._pace.healthy
        self._list_needed = True
        if listing:
            self._list_from = ""
        log.info("Listing %s again, the version known is too old for the API server", self.target.resource)
        if listing or recent:
            return self._backoff.next(self._pace.first)
        return random.uniform(0.0, self._pace.relist)  # noqa: S311 - spreads load only

    def _give_way(self, error: StatusError) -> bool:
        """Ask for less when the server refused a list for what was asked; return whether anything was left out."""
        streamed = self._streamed
        about_fields = "field label" in str(error) or "field selector" in str(error) or not streamed
        if isinstance(error, BadRequest) and self._fields and not self.target.fields_needed and about_fields:
            log.info("Listing %s without the field selector: %s", self.target.resource, error)
            self._fields = ""
            return True
        if not streamed or isinstance(error, TooManyRequests):
            return False
        # The second is what an API server says whose etcd cannot tell its progress, as an ERROR event of code 500.
        if isinstance(error, BadRequest | NotFound) or error.code == 405 or "RequestWatchProgress" in str(error):
            self._support.refused(str(error))
            return True
        self._list_plainly = True
        return self._failures <= 1 and error.retry_after is None

    def _forbidden(self, error: StatusError) -> None:
        target = self.target
        message = (
            f"{error}; allow the verbs list and watch of {target.resource} in the API group {target.api_group!r}, as"
            " the ClusterRole system:node-proxier does"
        )
        if target.optional:
            self._absent(message)
        else:
            self._say(message)

    def _absent(self, message: str) -> None:
        """Nobody shall wait for what is not there."""
        self._say(message)
        self._list_needed = True
        self.status.absent = True
        self.status.last_contact = time.monotonic()
        if not self.status.synced:
            self._sink([Replaced(self.target.resource, [])])
            self.status.synced = True

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("Cannot watch: %s", trouble)
        self._trouble = trouble

    def _path(self, query: dict[str, str]) -> str:
        if self.target.labels:
            query["labelSelector"] = self.target.labels
        if self._fields:
            query["fieldSelector"] = self._fields
        return f"{self.target.path}?{urlencode(query, quote_via=quote, safe='')}"
