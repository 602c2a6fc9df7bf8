"""Watches: each request gets a stream of events.

The watch begins in the same step in which its backlog is queued, so no event is lost or sent twice. Source: the watch
cache of kube-apiserver 1.36, KEP-3157 (streaming lists), KEP-956 (bookmarks) and the recordings.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
from aiohttp import web

from lab.apiserver.faults import GARBAGE, Faults
from lab.apiserver.kinds import NODE_INFO
from lab.apiserver.options import ListOptions
from lab.apiserver.resources import Resource
from lab.apiserver.rest import render
from lab.apiserver.status import ApiError, Json, too_old
from lab.apiserver.store import Change, EventType, Record, Store
from lab.apiserver.table import table

_BARE: dict[str, Json] = {
    "Service": {"spec": {}, "status": {"loadBalancer": {}}},
    "EndpointSlice": {"addressType": "", "endpoints": None, "ports": None},
    "Node": {
        "spec": {},
        "status": {
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
            "nodeInfo": dict.fromkeys(NODE_INFO, ""),
        },
    },
    "Pod": {"spec": {"containers": None}, "status": {}},
    "Namespace": {"spec": {}, "status": {}},
    "ServiceCIDR": {"spec": {}, "status": {}},
    "ReplicationController": {"spec": {}, "status": {"replicas": 0}},
}
STALL_CHECK = 0.02
"""Seconds between checks whether a stall has ended."""
_NO_WATCH_LIST = (
    "a watch stream was requested by the client but the required storage feature RequestWatchProgress is disabled"
)


def event_line(kind: str, body: bytes) -> bytes:
    """Return one line of a watch stream."""
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


def error_line(error: ApiError) -> bytes:
    """Return an ERROR event, after which the stream ends."""
    return event_line("ERROR", msgspec.json.encode(error.body))


def as_seen(change: Change, options: ListOptions, namespace: str | None) -> EventType | None:
    """Return the event for a watch with selectors: an object that begins to match is added, an object that no longer
    matches is deleted."""
    if namespace is not None and change.new.key[0] != namespace:
        return None
    if not options.selective:
        return change.type
    now = change.type != "DELETED" and options.selects(change.new)
    before = change.old is not None and options.selects(change.old)
    if now:
        return "MODIFIED" if before else "ADDED"
    return "DELETED" if before else None


class Watch:
    """One watch request. Call run() with the response after construction; `wake` ends the watch early."""

    def __init__(
        self, store: Store, faults: Faults, resource: Resource, namespace: str | None, options: ListOptions
    ) -> None:
        self._store = store
        self._faults = faults
        self._resource = resource
        self._namespace = namespace
        self._options = options
        self._include: str | None = None
        self._pending: list[bytes] = []
        self._woken = asyncio.Event()
        self._is_over = False
        self.is_cut = False
        self._unsubscribe: Callable[[], None] = lambda: None

    def as_table(self, include: str) -> None:
        """Whether to send rows instead of objects."""
        self._include = include

    def begin(self) -> None:
        """Queue the backlog, and every later change. Errors become an ERROR event."""
        try:
            self._pending.extend(self._backlog())
        except ApiError as e:
            self._end_with(error_line(e))
            return
        self._unsubscribe = self._store.subscribe(self._resource.storage, self._on_change)
        if self._pending:
            self._woken.set()

    def stop(self) -> None:
        """End the stream after the queued events."""
        self._is_over = True
        self._woken.set()

    def _end_with(self, line: bytes) -> None:
        self._pending.append(line)
        self.stop()

    def _backlog(self) -> list[bytes]:
        options, storage = self._options, self._resource.storage
        if options.initial_events and self._faults.fail_watch_list:
            raise ApiError(500, "InternalError", _NO_WATCH_LIST)
        if self._faults.hits(self._resource.plural) and self._faults.take("gone"):
            raise too_old(options.revision or 0, self._store.revision)
        lines: list[bytes] = []
        from_state = options.initial_events is True or (options.initial_events is None and not options.revision)
        if from_state:
            records = self._store.records(storage, self._namespace)
            lines.extend(self._line("ADDED", r) for r in records if options.selects(r))
        elif options.revision:
            changes = self._store.changes_since(storage, options.revision)
            if changes is None:
                raise too_old(options.revision, self._store.compacted(storage))
            seen = ((as_seen(change, options, self._namespace), change.new) for change in changes)
            lines.extend(self._line(kind, record) for kind, record in seen if kind is not None)
        if options.initial_events and options.bookmarks:
            lines.append(self._bookmark(ends_initial=True))
        return lines

    def _on_change(self, change: Change) -> None:
        kind = as_seen(change, self._options, self._namespace)
        if kind is not None:
            self._pending.append(self._line(kind, change.new))
            self._woken.set()

    def _line(self, kind: str, record: Record) -> bytes:
        if self._include is None:
            return event_line(kind, render(self._resource, record))
        resource = self._resource
        metadata = {"resourceVersion": str(record.revision)}
        rows = table(resource.kind, resource.api_version, [record.decode()], metadata, self._include)
        return event_line(kind, msgspec.json.encode(rows))

    def _bookmark(self, *, ends_initial: bool = False) -> bytes:
        metadata: Json = {"resourceVersion": str(self._store.revision)}
        if ends_initial:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        header = {"kind": self._resource.kind, "apiVersion": self._resource.api_version, "metadata": metadata}
        return event_line("BOOKMARK", msgspec.json.encode(header | _BARE.get(self._resource.kind, {})))

    async def run(self, response: web.StreamResponse, bookmark_period: float) -> None:
        """Write events until the timeout, stop() or an error ends it. The caller handles errors of the connection."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._options.timeout or random.uniform(1800, 3600))
        bookmark = loop.time() + bookmark_period
        while True:
            stall_check = loop.time() + STALL_CHECK if self._faults.stall_watch else deadline
            timer = loop.call_at(min(deadline, bookmark, stall_check), self._woken.set)
            await self._woken.wait()
            timer.cancel()
            self._woken.clear()
            if not await self._flush(response):
                return
            now = loop.time()
            if self._is_over or now >= deadline:
                if self._options.bookmarks and not self._is_over:
                    await response.write(self._bookmark())
                return
            if now >= bookmark:
                bookmark = now + bookmark_period
                if self._options.bookmarks and not self._faults.stall_watch:
                    await response.write(self._bookmark())

    def end(self) -> None:
        """Remove the watch's listener from the store."""
        self._unsubscribe()

    async def _flush(self, response: web.StreamResponse) -> bool:
        """Write the queued events; return whether the stream continues."""
        if self._faults.stall_watch and self._faults.hits(self._resource.plural) and not self._is_over:
            return True
        lines, self._pending = self._pending, []
        if not lines:
            return True
        if not self._faults.hits(self._resource.plural):
            await response.write(b"".join(lines))
            return True
        return await self._write_with_faults(response, lines)

    async def _write_with_faults(self, response: web.StreamResponse, lines: list[bytes]) -> bool:
        faults = self._faults
        for i, line in enumerate(lines):
            if faults.take("cut_watch"):
                await response.write(b"".join(lines[:i]) + line[: len(line) // 2])
                self.is_cut = True
                return False
            if faults.take("gone"):
                await response.write(b"".join(lines[:i]) + error_line(too_old(0, self._store.revision)))
                return False
            if faults.take("garbage_watch"):
                lines[i] = GARBAGE
        await response.write(b"".join(lines))
        return True
