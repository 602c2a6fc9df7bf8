"""Builds, aggregates, limits and sends Kubernetes Events (events.k8s.io/v1) about users' objects, as client-go does
(tools/events, tools/record). `record` never fails and never waits, because `run` sends the Events. If there is no API
server, Events are only logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from kubeproxy.engine.pacing import TokenBucket, wait_briefly
from kubeproxy.errors import SourceError
from kubeproxy.server.text import timestamp

_log = logging.getLogger("kubeproxy.report")

CONTROLLER: Final = "kube-proxy"
SERIES_SECONDS: Final = 6 * 60.0  # seconds in which equal events form one series
PATCH_SECONDS: Final = 60.0  # seconds between two writes of a growing series
BURST: Final = 25  # the maximum number of events about one object in a burst
REFILL_SECONDS: Final = 5 * 60.0
REMEMBERED: Final = 4096  # entries of each cache
QUEUED: Final = 1000
NOTE_BYTES: Final = 1024
ATTEMPTS: Final = 12
RETRY_SECONDS: Final = 10.0

EventType = Literal["Normal", "Warning"]

Post = Callable[[str, str, bytes], Awaitable[int]]
"""A function that sends a request (method, path, JSON body) to the API server and returns the HTTP status. A PATCH body
is a JSON merge patch. The function raises SourceError or OSError if it cannot reach the server."""


class ObjectReference(NamedTuple):
    """The object of an event. For a Node, the uid is its name, as in events of the kubelet and the Go kube-proxy."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"


class _Key(NamedTuple):
    """The fields that all events of a series share. Unlike in client-go, the note is one of these fields."""

    regarding: ObjectReference
    kind: EventType
    reason: str
    action: str
    note: str


class _Series(Struct):
    path: str
    last_seen: float
    written_at: float
    count: int = 1
    written_count: int = 1


class EventRecorder(Struct):
    """Records events of the proxy on the Node `host`. All calls must be on the event loop's thread."""

    host: str
    post: Post | None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    _series: OrderedDict[_Key, _Series] = field(default_factory=OrderedDict)
    _buckets: OrderedDict[ObjectReference, TokenBucket] = field(default_factory=OrderedDict)
    _queue: deque[tuple[str, str, bytes, _Key]] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _last_name: int = 0
    _complained: bool = False

    def record(self, regarding: ObjectReference, kind: EventType, reason: str, action: str, note: str) -> None:
        """Record an event; `reason` and `action` are in CamelCase, and `note` is a sentence."""
        note = _shortened(note)
        level = logging.WARNING if kind == "Warning" else logging.INFO
        where = f"{regarding.namespace}/{regarding.name}" if regarding.namespace else regarding.name
        _log.log(level, "Event object=%s kind=%s reason=%s note=%r", where, regarding.kind, reason, note)
        if self.post is None:
            return
        key = _Key(regarding, kind, reason, action, note)
        now = self.clock()
        series = self._series.get(key)
        if series is not None and now - series.last_seen < SERIES_SECONDS:
            series.count += 1
            series.last_seen = now
            if series.written_count == 1:
                self._patch(key, series)
        else:
            self._create(key, now)

    def on_node(self, kind: EventType, reason: str, note: str, action: str = "StartKubeProxy") -> None:
        """Record an event about the proxy's Node; the default `action` is the start of the proxy."""
        self.record(ObjectReference("Node", self.host, "", self.host), kind, reason, action, note)

    async def run(self, retry: float = RETRY_SECONDS) -> None:
        """Send the recorded events until cancelled; repeat a failed request every `retry` seconds."""
        while True:
            self._wake.clear()
            self.flush()
            while self._queue:
                await self._send(*self._queue.popleft(), retry)
            await wait_briefly(self._wake, PATCH_SECONDS)

    def flush(self) -> None:
        """Queue a write of each series that has grown since its last write; remove the series that have ended."""
        now = self.clock()
        for key, series in list(self._series.items()):
            if series.count > series.written_count and now - series.written_at >= PATCH_SECONDS:
                self._patch(key, series)
            elif now - series.last_seen >= SERIES_SECONDS:
                del self._series[key]

    def _create(self, key: _Key, now: float) -> None:
        bucket = self._buckets.get(key.regarding) or TokenBucket(1 / REFILL_SECONDS, BURST, self.clock)
        _remember(self._buckets, key.regarding, bucket)
        if not bucket.take():
            _log.debug("Too many events about %s %s: omitted an event", key.regarding.kind, key.regarding.name)
            return
        namespace = key.regarding.namespace or "default"
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        # As in client-go, an event's name is the object's name and a time. The increment makes each name unique.
        self._last_name = max(self._last_name + 1, int(self.wall_clock() * 1e9))
        name = f"{key.regarding.name}.{self._last_name:x}"
        _remember(self._series, key, _Series(f"{path}/{name}", now, now))
        self._enqueue("POST", path, self._document(key, namespace, name), key)

    def _document(self, key: _Key, namespace: str, name: str) -> dict[str, object]:
        reference = {
            "apiVersion": key.regarding.api_version,
            "kind": key.regarding.kind,
            "namespace": key.regarding.namespace,
            "name": key.regarding.name,
            "uid": key.regarding.uid,
        }
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": timestamp(self.wall_clock()),
            "reportingController": CONTROLLER,
            "reportingInstance": f"{CONTROLLER}-{self.host}"[:128],
            "action": key.action,
            "reason": key.reason,
            "regarding": {key: value for key, value in reference.items() if value},
            "note": key.note,
            "type": key.kind,
        }

    def _patch(self, key: _Key, series: _Series) -> None:
        series.written_count = series.count
        series.written_at = self.clock()
        seen = {"count": series.count, "lastObservedTime": timestamp(self.wall_clock())}
        self._enqueue("PATCH", series.path, {"series": seen}, key)

    def _enqueue(self, method: str, path: str, body: object, key: _Key) -> None:
        if len(self._queue) >= QUEUED:
            self._complain("more than %d wait to be sent", QUEUED)
            return
        self._queue.append((method, path, msgspec.json.encode(body), key))
        self._wake.set()

    async def _send(self, method: str, path: str, body: bytes, key: _Key, retry: float) -> None:
        assert self.post is not None  # noqa: S101 - record() queues no request without an API server
        for _ in range(ATTEMPTS):
            try:
                status = await self.post(method, path, body)
            except (SourceError, OSError) as error:
                self._complain("%s", error)
            except Exception as error:
                # An error in sending an event must not end the proxy.
                self._complain("%r", error)
                return
            else:
                if 200 <= status < 300 or (method == "POST" and status == 409):
                    self._complained = False
                    return
                self._complain("the API server answered %d", status)
                if status != 429 and status < 500:
                    break
            await asyncio.sleep(retry)
        self._series.pop(key, None)  # the next event starts a new series

    def _complain(self, why: str, *values: object) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("Events may get lost: " + why, *values)


def _remember(cache: OrderedDict[Any, Any], key: object, value: object) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > REMEMBERED:
        cache.popitem(last=False)


def _shortened(note: str) -> str:
    encoded = note.encode(errors="replace")
    if len(encoded) <= NOTE_BYTES:
        return encoded.decode()
    return encoded[: NOTE_BYTES - 3].decode(errors="ignore") + "..."
