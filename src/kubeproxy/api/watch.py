"""Lists and watches the resources of an API server, and delivers events to a sink. The protocol is that of client-go's
reflector: WatchList if the server supports it, else paged lists; bookmarks; a new list after 410. Reactions to failures
and deadlines are in recovery.py."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from urllib.parse import quote, urlencode

from kubeproxy.api.decode import WatchChanges, WatchDecoder, decode_page, identity, kept_identities
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import Recovery, StreamClock, WatchListSupport
from kubeproxy.api.relists import Relists
from kubeproxy.api.source import BOOKMARKED, ListPace, ResourceStatus, WatchTarget, targets
from kubeproxy.api.status import ConnectionFailed, MalformedAnswer, NoInitialEnd, OutOfStep, StatusError
from kubeproxy.errors import SourceError
from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.events import Deleted, Event, Rejected, Replaced, Sink, Upserted, kept
from kubeproxy.model.objects import NAMESPACED, Object, Resource

log = logging.getLogger("kubeproxy.api")

_IDLE_GRACE = 30.0  # seconds a server may take to end a watch after the requested time


class ApiSource:
    """Lists and watches all resources that one node needs, and delivers their events to one sink."""

    def __init__(
        self,
        client: HttpClient,
        node_name: str,
        sink: Sink,
        *,
        proxy_name: str = "",
        pace: ListPace | None = None,
        support: WatchListSupport | None = None,
    ) -> None:
        support, pace = support or WatchListSupport(), pace or ListPace()
        self._relists = Relists(sink, lambda resource: self.statuses[resource])
        sinks: dict[Resource, Sink] = dict.fromkeys(NAMESPACED, self._relists.take)
        self.reflectors = [
            Reflector(client, target, sinks.get(target.resource, sink), support=support, pace=pace)
            for target in targets(node_name, proxy_name)
        ]
        self.statuses: dict[Resource, ResourceStatus] = {
            reflector.target.resource: reflector.status for reflector in self.reflectors
        }

    async def run(self) -> None:
        """List and watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self.reflectors:
                    group.create_task(reflector.run(), name=f"watch {reflector.target.resource}")
        finally:
            self._relists.close()


class _Initial:
    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object | PackedSlice] = {}
        self.rejected: list[Rejected] = []
        self.length = 0

    def take(self, events: Iterable[Event]) -> None:
        """Apply events in their order."""
        for event in events:
            match event:
                case Upserted(_, found):
                    self.objects[identity(found)] = kept(found)
                case Deleted(_, namespace, name):
                    self.objects.pop((namespace, name), None)
                case Rejected():
                    self.rejected.append(event)


class Reflector:
    """Keeps a sink up to date with one resource; `status` is the state of this source. `run` ends only when
    cancelled."""

    def __init__(
        self,
        client: HttpClient,
        target: WatchTarget,
        sink: Sink,
        *,
        support: WatchListSupport,
        pace: ListPace,
    ) -> None:
        self.target = target
        self.status = ResourceStatus(target.resource)
        self._client = client
        self._sink = sink
        self._pace = pace
        self._recovery = Recovery(target, self.status, client, support, pace, self._deliver_absence)
        self._clock = StreamClock(pace)
        self._initial: _Initial | None = None
        self._silent = 0.0  # seconds without a packet of the server before the last failure
        self._failed = False  # the last request ended with an error

    async def run(self) -> None:
        """List and watch until cancelled. Failures are logged and retried."""
        while True:
            delay = await self._step()
            if self.status.connected:
                # The state was current until the connection's last packet, because TCP keepalive detects a dead
                # connection.
                self.status.connected = False
                now, last = time.monotonic(), self.status.last_contact
                if self._silent or now - last < BOOKMARKED or not self._failed:
                    self.status.last_contact = max(last, now - self._silent)
            await self._recovery.pause(delay)

    async def _step(self) -> float:
        started, version, self._silent, self._failed = time.monotonic(), self.status.resource_version, 0.0, False
        listing = self._recovery.list_needed
        # `streamed` is read before the list starts, because during the list another reflector may notice that the
        # server does not stream lists.
        streamed = listing and self._recovery.streamed
        try:
            if streamed:
                await self._watch_list()
            elif listing:
                await self._list()
                return 0.0
            else:
                await self._stream({"resourceVersion": self.status.resource_version})
        except SourceError as error:
            self._silent, self._failed = error.silent if isinstance(error, ConnectionFailed) else 0.0, True
            # A completed WatchList continues as a watch.
            return self._recovery.react(error, listing=listing and self._recovery.list_needed, streamed=streamed)
        except Exception:
            log.exception("Listing %s again after an internal error", self.target.resource)
            return self._recovery.internal_error()
        if time.monotonic() - started < self._pace.short_watch and self.status.resource_version == version:
            return self._recovery.ended_at_once()
        return 0.0

    async def _list(self) -> None:
        objects: list[Object | PackedSlice] = []
        rejected: list[Rejected] = []
        version, token, limit = "", "", self._pace.page
        while True:
            try:
                data = await self._fetch_page(token, limit)
            except StatusError as error:
                if not error.expired or not token:
                    raise
                # The continue token expired (5 minutes by default): request the list without pages, as client-go's
                # pager does.
                objects, rejected, version, token, limit = [], [], "", "", 0
                self._recovery.list_from = ""
                continue
            page = decode_page(self.target.resource, data)
            del data
            objects += map(kept, page.objects)
            rejected += page.rejected
            version = version or page.version
            if not page.continue_token:
                break
            if page.continue_token == token:
                raise MalformedAnswer(f"the list of {self.target.resource} continues with the same token")
            token = page.continue_token
        self._recovery.list_in_pages = False
        self._deliver(objects, rejected, version)

    async def _fetch_page(self, token: str, limit: int) -> bytearray:
        query = {"limit": str(limit)} if limit else {}
        if token:
            query["continue"] = token
        elif self._recovery.list_from:
            query["resourceVersion"] = self._recovery.list_from
            if self._recovery.list_from != "0":
                query["resourceVersionMatch"] = "NotOlderThan"
        response = await self._client.request("GET", self._path(query), most=self.target.most)
        self._client.contact.answered()
        self.status.last_contact = time.monotonic()
        return response.body

    async def _watch_list(self) -> None:
        """Watch with initial events (WatchList). Raises NoInitialEnd if the stream ends before these events do."""
        self._initial = _Initial()
        try:
            await self._stream({"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"})
        finally:
            unfinished, self._initial = self._initial is not None, None
        if unfinished:
            raise NoInitialEnd("the stream ended before its initial events did")

    async def _stream(self, query: dict[str, str]) -> None:
        decoder = WatchDecoder(self.target.resource)
        seconds = random.uniform(self._pace.watch_min, self._pace.watch_max)  # noqa: S311 - randomness only to spread load
        clock = self._clock

        def on_open() -> None:
            self._client.contact.answered()
            self.status.last_contact = time.monotonic()
            self.status.connected = self._initial is None
            clock.opened(listing=self._initial is not None)

        def on_bytes(data: bytes) -> None:
            self.status.last_contact = time.monotonic()
            if self._initial is not None:
                self._initial.length += len(data)
                if self._initial.length > self.target.most:
                    raise MalformedAnswer(f"the streamed list is longer than {self.target.most} bytes")
            changes = decoder.feed(data)
            self._take(changes)
            clock.received(len(data), changes, listing=self._initial is not None)

        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(max(1, round(seconds)))}
        try:
            async with clock.begin():
                await self._client.stream(
                    self._path(query), on_bytes, on_open=on_open, idle_timeout=seconds + _IDLE_GRACE
                )
        except TimeoutError:
            self.status.bookmarked = False
            raise clock.error() from None
        finally:
            clock.ended()
        self._take(decoder.finish())

    def _take(self, changes: WatchChanges) -> None:
        """Deliver the changes of a watch, store their version, then raise the error that ended the watch, if any."""
        initial, known = self._initial, self.status.resource_version
        if initial is not None:
            initial.take(changes.events)
            if changes.initial_end:
                self._initial = None
                self._deliver(list(initial.objects.values()), initial.rejected, changes.version)
                self.status.connected = True
        else:
            if changes.events:
                self._sink(changes.events)
            if changes.version:
                self.status.resource_version = changes.version
                self.status.bookmarked |= not changes.events
        if changes.events or changes.version:
            self._recovery.received()
        if changes.error is not None:
            raise changes.error
        if initial is None and _goes_back(known, changes.version):
            raise OutOfStep(f"the server went back from version {known} to {changes.version[:20]}, as after a restore")

    def _deliver(self, objects: list[Object | PackedSlice], rejected: list[Rejected], version: str) -> None:
        resource = self.target.resource
        self._sink([Replaced(resource, objects, kept_identities(objects, rejected)), *rejected])
        self.status.synced = True
        self.status.absent = False
        self.status.resource_version = version
        self._recovery.listed(version)

    def _deliver_absence(self) -> None:
        """Deliver an empty list once, because other parts of the program wait for a first list."""
        self.status.absent = True
        self.status.last_contact = time.monotonic()
        if not self.status.synced:
            self._sink([Replaced(self.target.resource, [])])
            self.status.synced = True

    def _path(self, query: dict[str, str]) -> str:
        if self.target.labels:
            query["labelSelector"] = self.target.labels
        if self._recovery.fields:
            query["fieldSelector"] = self._recovery.fields
        return f"{self.target.path}?{urlencode(query, quote_via=quote, safe='')}"


def _goes_back(known: str, seen: str) -> bool:
    """Return whether a resource version is older than the known version; False unless both are numbers (KEP-5504)."""
    numbers = seen.isascii() and known.isascii() and seen.isdigit() and known.isdigit()
    return numbers and (len(seen), seen) < (len(known), known)
