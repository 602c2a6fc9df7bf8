"""Decodes bytes of the API into typed objects and events: pages of lists, lines of watches. Pure. Usually one typed
msgspec decode is enough. If it fails, the objects are decoded leniently, one by one (salvage.py): a wrong object
becomes a Rejected, and other objects are not affected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.json import Decoder

from kubeproxy.api.salvage import FAILURES, Salvaged, mended, salvage
from kubeproxy.api.status import MalformedAnswer, StatusError, decode_status
from kubeproxy.errors import SourceError
from kubeproxy.model.addresses import pack
from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.events import Deleted, Event, Rejected, Upserted
from kubeproxy.model.objects import NAMESPACED, TYPES, Node, Object, Resource
from kubeproxy.wording import counted

MAX_LINE = 32 << 20
"""Longest watch line in bytes. An object in etcd has at most 1.5 MB by default; a longer line is a broken stream."""

MAX_PROBLEMS: Final = 10
"""Maximum number of reported problems per object; the last problem states the number of omitted problems."""

INITIAL_EVENTS_END: Final = "k8s.io/initial-events-end"
"""The annotation of the bookmark that ends a WatchList's initial events (KEP-3157)."""

_T = TypeVar("_T")


class _ListMeta(Struct, rename="camel"):
    resource_version: str | None = None
    continue_: str | None = msgspec.field(default=None, name="continue")


class ObjectList(Struct, Generic[_T]):
    """A list of objects of any resource."""

    kind: str
    metadata: _ListMeta
    items: list[_T] | None


class _Line(Struct, Generic[_T]):
    type: str
    object: _T


class _BookmarkMeta(Struct, rename="camel"):
    resource_version: str | None = None
    annotations: dict[str, str] | None = None


class _Bookmark(Struct):
    metadata: _BookmarkMeta
    kind: str = ""


class ListPage(NamedTuple):
    """One page of a list: its objects, the rejected objects and parts of objects, and the token of the next page (''
    in the last page)."""

    objects: list[Object]
    rejected: list[Rejected]
    version: str
    continue_token: str


class WatchChanges(NamedTuple):
    """The content of the complete lines of a watch."""

    events: list[Event]
    version: str  # the newest resourceVersion in the lines, or '' if no line has one
    initial_end: bool  # whether the lines contain the bookmark that ends the initial events
    error: SourceError | None  # error after which the stream cannot be read; earlier events are valid


_raw_list = Decoder(ObjectList[Raw])
_raw_line = Decoder(_Line[Raw])
_bookmark = Decoder(_Bookmark)
_lists: dict[Resource, Decoder[ObjectList[Object]]] = {name: Decoder(ObjectList[kind]) for name, kind in TYPES.items()}  # type: ignore[valid-type]
_lines: dict[Resource, Decoder[_Line[Object]]] = {name: Decoder(_Line[kind]) for name, kind in TYPES.items()}  # type: ignore[valid-type]
_objects: dict[Resource, Decoder[Object]] = {name: Decoder(kind) for name, kind in TYPES.items()}


def decode_page(resource: Resource, data: bytes | bytearray) -> ListPage:
    """Decode one page of a list of `resource`. Raises MalformedAnswer for a list of another kind: if such a list were
    empty and accepted, all objects would be deleted."""
    try:
        page = _lists[resource].decode(data)
    except FAILURES:
        return _decode_page_by_item(resource, data)
    _check_kind(resource, page.kind, "List")
    objects = page.items if page.items is not None else []
    if not all(found.metadata.name for found in objects):
        return _decode_page_by_item(resource, data)
    return ListPage(objects, [], page.metadata.resource_version or "", page.metadata.continue_ or "")


def _decode_page_by_item(resource: Resource, data: bytes | bytearray) -> ListPage:
    try:
        page = _decode_mended(_raw_list, data)
    except FAILURES as error:
        raise MalformedAnswer(f"the list of {resource} cannot be read: {error}") from error
    _check_kind(resource, page.kind, "List")
    objects: list[Object] = []
    rejected: list[Rejected] = []
    for item in page.items or []:
        found, problems = decode_object(resource, bytes(item))
        objects += [found] if found is not None else []
        rejected += problems
    return ListPage(objects, rejected, page.metadata.resource_version or "", page.metadata.continue_ or "")


def decode_object(resource: Resource, data: bytes) -> tuple[Object | None, list[Rejected]]:
    """Return two values: the object in `data` (None if unusable) and the rejected parts. Never raises."""
    try:
        found = _objects[resource].decode(data)
    except FAILURES:
        pass
    else:
        if found.metadata.name:
            return found, []
    saved = salvage(data, TYPES[resource])
    return saved.object, _rejections(resource, saved)


class WatchDecoder:
    """Splits the bytes of one watch stream into lines, independent of chunk boundaries, and decodes the lines."""

    __slots__ = ("_decoder", "_resource", "_tail")

    def __init__(self, resource: Resource) -> None:
        self._resource: Resource = resource
        self._decoder = _lines[resource]
        self._tail = bytearray()

    def feed(self, data: bytes) -> WatchChanges:
        """Add the next bytes; return the content of the lines that are now complete."""
        end = data.rfind(b"\n")
        if end < 0:
            self._tail += data
            if len(self._tail) > MAX_LINE:
                return WatchChanges([], "", False, MalformedAnswer(f"a watch line is longer than {MAX_LINE} bytes"))
            return WatchChanges([], "", False, None)
        lines = data[:end].split(b"\n")
        if self._tail:
            lines[0] = bytes(self._tail) + lines[0]
            self._tail = bytearray()
        self._tail += data[end + 1 :]
        return self._decode(lines)

    def finish(self) -> WatchChanges:
        """At the end of the stream, decode the bytes after the last newline; incomplete bytes give an error."""
        rest = bytes(self._tail)
        self._tail = bytearray()
        return self._decode([rest])

    def _decode(self, lines: list[bytes]) -> WatchChanges:
        events: list[Event] = []
        version = ""
        initial_end = False
        for line in lines:
            if not line.strip():
                continue
            try:
                seen, ended = self._decode_line(line, events)
            except SourceError as error:
                return WatchChanges(events, version, initial_end, error)
            version = seen or version
            initial_end = initial_end or ended
        return WatchChanges(events, version, initial_end, None)

    def _decode_line(self, data: bytes, events: list[Event]) -> tuple[str, bool]:
        """Decode a line and append its events. Return its version, and whether the line ends the initial events."""
        try:
            line = self._decoder.decode(data)
        except FAILURES:
            return self._decode_odd_line(data, events)
        metadata = line.object.metadata
        if not metadata.name or line.type not in {"ADDED", "MODIFIED", "DELETED"}:
            return self._decode_odd_line(data, events)
        if line.type == "DELETED":
            events.append(Deleted(self._resource, metadata.namespace or "", metadata.name))
        else:
            events.append(Upserted(self._resource, line.object))
        return metadata.resource_version or "", False

    def _decode_odd_line(self, data: bytes, events: list[Event]) -> tuple[str, bool]:
        try:
            line = _decode_mended(_raw_line, data)
        except FAILURES as error:
            raise MalformedAnswer(f"a watch line of {len(data)} bytes is no event: {error}") from error
        content = bytes(line.object)
        match line.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                return self._salvage_change(line.type, content, events), False
            case "BOOKMARK":
                try:
                    bookmark = _bookmark.decode(content)
                except FAILURES:
                    return "", False
                _check_kind(self._resource, bookmark.kind)
                metadata = bookmark.metadata
                return metadata.resource_version or "", (metadata.annotations or {}).get(INITIAL_EVENTS_END) == "true"
            case "ERROR":
                raise StatusError(decode_status(content, 0))
            case other:
                raise MalformedAnswer(f"a watch event of the unknown type {other[:40]!r}")

    def _salvage_change(self, change: str, content: bytes, events: list[Event]) -> str:
        resource = self._resource
        saved = salvage(content, TYPES[resource])
        if change == "DELETED" and saved.name:
            events.append(Deleted(resource, saved.namespace, saved.name))
            return saved.version
        if saved.object is not None:
            events.append(Upserted(resource, saved.object))
        events.extend(_rejections(resource, saved))
        return saved.version


def _decode_mended(decoder: Decoder[Any], data: bytes | bytearray) -> Any:
    try:
        return decoder.decode(data)
    except FAILURES:
        return decoder.decode(mended(bytes(data)))


def _check_kind(resource: Resource, kind: str, suffix: str = "") -> None:
    expected = TYPES[resource].__name__ + suffix
    if kind != expected:
        raise MalformedAnswer(f"the answer about {resource} is of the kind {kind[:60]!r}, not {expected}")


def _rejections(resource: Resource, saved: Salvaged) -> list[Rejected]:
    reported = saved.problems[:MAX_PROBLEMS]
    if left_out := len(saved.problems) - len(reported):
        last = reported[-1]
        reported[-1] = last._replace(reason=f"{last.reason} (and {counted(left_out, 'more problem')} in this object)")
    of = (resource, saved.namespace, saved.name, saved.uid)
    return [Rejected(*of, problem.field, problem.reason) for problem in reported]


def identity(found: Object | PackedSlice) -> tuple[str, str]:
    """Return (namespace, name) of an object; the namespace is '' for an object without a namespace."""
    return found.metadata.namespace or "", found.metadata.name


def node_addresses(node: Node) -> Iterator[bytes]:
    """Yield the packed addresses of a Node."""
    for entry in (node.status.addresses if node.status is not None else None) or ():
        if (address := pack(entry.address)) is not None:
            yield address


def kept_identities(
    objects: Iterable[Object | PackedSlice], rejected: Iterable[Rejected]
) -> frozenset[tuple[str, str]] | None:
    """Return (namespace, name) of the objects in `rejected` that are not among `objects`; None if a rejected object has
    no readable name, because any missing object may be this object."""
    named = {(problem.namespace, problem.name, problem.resource) for problem in rejected}
    if not all(name and (namespace or resource not in NAMESPACED) for namespace, name, resource in named):
        return None
    wrong = {(namespace, name) for namespace, name, _ in named}
    return frozenset(wrong.difference(map(identity, objects)) if wrong else wrong)
