"""A small etcd and watch cache in memory: the objects, their history, and the listeners for changes.

Objects are stored as JSON bytes, encoded once, so that long lists and many watches only join bytes; decode() returns a
new copy. One resourceVersion counts all writes. Nothing here validates. Only the thread of the event loop may use the
store.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

from lab.apiserver.resources import by_plural
from lab.apiserver.status import Json, too_large

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Key = tuple[str, str]
"""(namespace, name); the namespace of cluster-scoped objects is empty."""

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(dict)
_NO_LABELS: dict[str, str] = {}


class Record:
    """One version of one object: `raw` is its JSON without kind and apiVersion."""

    __slots__ = ("fields", "key", "labels", "raw", "revision")

    def __init__(self, key: Key, revision: int, raw: bytes, labels: dict[str, str], fields: dict[str, str]) -> None:
        self.key = key
        self.revision = revision
        self.raw = raw
        self.labels = labels
        self.fields = fields

    def decode(self) -> Json:
        """Return a new copy of the object, without kind and apiVersion."""
        obj: Json = _DECODER.decode(self.raw)
        return obj


class Change(NamedTuple):
    """One write: `new` is the object after the change (after a deletion its last state), `old` the object before."""

    revision: int
    type: EventType
    storage: str
    new: Record
    old: Record | None


Listener = Callable[[Change], None]


def _dig(obj: Json, path: str) -> str:
    value: object = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class Store:
    """Objects by storage name and key. `history` changes of each storage are kept for watches."""

    def __init__(self, history: int = 50_000) -> None:
        self.revision = 1
        self._history = history
        self._objects: dict[str, dict[Key, Record]] = {}
        self._sorted: dict[str, list[Key]] = {}
        self._log: dict[str, deque[Change]] = {}
        self._compacted: dict[str, int] = {}
        self._listeners: dict[str, list[Listener]] = {}
        self._fields: dict[str, tuple[str, ...]] = {}

    # reading

    def get(self, storage: str, key: Key) -> Record | None:
        """Return the present object, or None."""
        return self._objects.get(storage, {}).get(key)

    def records(self, storage: str, namespace: str | None = None) -> list[Record]:
        """Return all objects, or the objects of a namespace, in the order of their keys."""
        objects = self._objects.get(storage, {})
        keys = self._sorted.get(storage)
        if keys is None or len(keys) != len(objects):
            keys = self._sorted[storage] = sorted(objects)
        if namespace is None:
            return [objects[k] for k in keys]
        first = bisect.bisect_left(keys, (namespace, ""))
        last = bisect.bisect_left(keys, (namespace + "\0", ""))
        return [objects[k] for k in keys[first:last]]

    def count(self, storage: str) -> int:
        """Return the number of objects."""
        return len(self._objects.get(storage, {}))

    def records_at(self, storage: str, revision: int, namespace: str | None = None) -> list[Record] | None:
        """Return the objects at `revision`; None if the history begins later.

        Raises ApiError 504 for a revision in the future.
        """
        if revision > self.revision:
            raise too_large(revision, self.revision)
        if revision < self.compacted(storage):
            return None
        state = dict(self._objects.get(storage, {}))
        for change in reversed(self._log.get(storage, ())):
            if change.revision <= revision:
                break
            if change.old is None:
                state.pop(change.new.key, None)
            else:
                state[change.new.key] = change.old
        return [state[k] for k in sorted(state) if namespace is None or k[0] == namespace]

    def changes_since(self, storage: str, revision: int) -> list[Change] | None:
        """Return the changes after `revision`, oldest first; None if the history lacks some."""
        if revision < self.compacted(storage):
            return None
        found: list[Change] = []
        for change in reversed(self._log.get(storage, ())):
            if change.revision <= revision:
                break
            found.append(change)
        found.reverse()
        return found

    def compacted(self, storage: str) -> int:
        """Changes up to and including this revision are no longer in the history."""
        return self._compacted.get(storage, 0)

    # listeners

    def subscribe(self, storage: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each change, during the write. Return the function that removes the listener."""
        listeners = self._listeners.setdefault(storage, [])
        listeners.append(listener)

        def unsubscribe() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return unsubscribe

    # writing

    def put(self, storage: str, obj: Json) -> Record:
        """Create or replace an object without any check; set its resourceVersion in place."""
        self.revision += 1
        record = self._record(storage, obj)
        objects = self._objects.setdefault(storage, {})
        old = objects.get(record.key)
        objects[record.key] = record
        if old is None:
            self._insert_key(storage, record.key)
        self._commit(Change(self.revision, "ADDED" if old is None else "MODIFIED", storage, record, old))
        return record

    def put_many(self, storage: str, objs: Iterable[Json]) -> int:
        """Store many objects; return their number. For loading benchmarks: about 10 us an object."""
        self._sorted.pop(storage, None)
        count = 0
        for obj in objs:
            self.put(storage, obj)
            count += 1
        return count

    def remove(self, storage: str, key: Key, last: Json | None = None) -> Record:
        """Delete an object; `last` replaces its final state. Returns the final state with the revision of the deletion.

        Raises KeyError if the object does not exist.
        """
        old = self._objects[storage].pop(key)
        self.revision += 1
        record = self._record(storage, old.decode() if last is None else last)
        keys = self._sorted.get(storage)
        if keys is not None:
            del keys[bisect.bisect_left(keys, key)]
        self._commit(Change(self.revision, "DELETED", storage, record, old))
        return record

    def compact(self) -> None:
        """Delete the history: older watches and pages end with 410."""
        for storage in {*self._objects, *self._log}:
            self._log.pop(storage, None)
            self._compacted[storage] = self.revision

    def _insert_key(self, storage: str, key: Key) -> None:
        keys = self._sorted.get(storage)
        if keys is not None:
            bisect.insort(keys, key)

    def _record(self, storage: str, obj: Json) -> Record:
        metadata = obj["metadata"]
        metadata["resourceVersion"] = str(self.revision)
        key = (metadata.get("namespace") or "", metadata["name"])
        names = self._fields.get(storage)
        if names is None:
            names = self._fields[storage] = by_plural(storage).fields
        fields = {name: _dig(obj, name) for name in names}
        fields["metadata.name"] = key[1]
        fields["metadata.namespace"] = key[0]
        body = {k: v for k, v in obj.items() if k not in {"kind", "apiVersion"}}
        return Record(key, self.revision, _ENCODER.encode(body), metadata.get("labels") or _NO_LABELS, fields)

    def _commit(self, change: Change) -> None:
        log = self._log.setdefault(change.storage, deque())
        if len(log) >= self._history:
            self._compacted[change.storage] = log.popleft().revision
        log.append(change)
        for listener in tuple(self._listeners.get(change.storage, ())):
            listener(change)
