"""Bytes of the API into typed objects and events: pages of lists, lines of watches.

Pure. The usual case is one typed msgspec decode; only what fails it is looked at again, object by object
(salvage.py), so that a wrong object costs itself a Rejected and its neighbours nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from kubeproxy.api.salvage import mended, salvage
from kubeproxy.api.status import MalformedAnswer, decode_status, status_error
from kubeproxy.errors import SourceError
from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.events import Deleted, Event, Rejected, Upserted
from kubeproxy.model.objects import (
    NAMESPACED,
    TYPES,
    EndpointSlice,
    Node,
    Object,
    PlacedSlice,
    Resource,
    Service,
    ServiceCIDR,
)
from kubeproxy.model.plan import Problem, ServiceName

MAX_LINE = 32 << 20
"""Longest watch line in bytes. An object in etcd has at most 1.5 MB by default; the rest is a broken stream."""

MAX_PROBLEMS = 10
"""Problems of one object that are reported one by one; the last one counts those left out."""

INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""The annotation of the bookmark that ends a WatchList's initial events (KEP-3157)."""

_T = TypeVar("_T")


class _ListMeta(Struct, rename="camel"):
    resource_version: str | None = None
    continue_: str | None = msgspec.field(default=None, name="continue")


class _List(Struct, Generic[_T]):
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
    """One page of a list: its objects, what of them was rejected, and where the list goes on ('' at its end)."""

    objects: list[Object]
    rejected: list[Rejected]
    version: str
    continue_token: str


class WatchChanges(NamedTuple):
    """What complete lines of a watch said.

    `version` is the newest resourceVersion seen ('' for none); `initial_end` that the bookmark ending the initial
    events was among them; `error` that the stream is over: what came before it is still good.
    """

    events: list[Event]
    version: str
    initial_end: bool
    error: SourceError | None


_raw_list = msgspec.json.Decoder(_List[Raw])
_raw_line = msgspec.json.Decoder(_Line[Raw])
_bookmark = msgspec.json.Decoder(_Bookmark)

_lists: dict[Resource, msgspec.json.Decoder[_List[Object]]] = {
    "services": msgspec.json.Decoder(_List[Service]),
    "endpointslices": msgspec.json.Decoder(_List[EndpointSlice]),
    "nodes": msgspec.json.Decoder(_List[Node]),
    "servicecidrs": msgspec.json.Decoder(_List[ServiceCIDR]),
}
_lines: dict[Resource, msgspec.json.Decoder[_Line[Object]]] = {
    "services": msgspec.json.Decoder(_Line[Service]),
    "endpointslices": msgspec.json.Decoder(_Line[EndpointSlice]),
    "nodes": msgspec.json.Decoder(_Line[Node]),
    "servicecidrs": msgspec.json.Decoder(_Line[ServiceCIDR]),
}
_placed_list: msgspec.json.Decoder[_List[Object]] = msgspec.json.Decoder(_List[PlacedSlice])
_placed_line: msgspec.json.Decoder[_Line[Object]] = msgspec.json.Decoder(_Line[PlacedSlice])
_objects: dict[type[Object], msgspec.json.Decoder[Object]] = {
    kind: msgspec.json.Decoder(kind) for kind in (*TYPES.values(), PlacedSlice)
}


def decode_page(resource: Resource, data: bytes | bytearray, with_zones: Collection[ServiceName] = ()) -> ListPage:
    """Decode one page of a list of `resource`. Raises MalformedAnswer when `data` is no list of it.

    A list of another kind may be as good JSON, and without items it would say that everything is gone. Slices of the
    Services `with_zones` are PlacedSlices.
    """
    page = _decode_page(resource, data, _lists[resource], TYPES[resource])
    if with_zones and resource == "endpointslices":
        placed = {identity(found) for found in page.objects if service_of(found) in with_zones}
        return _with_zones(page, data, placed) if placed else page
    return page


def _decode_page(
    resource: Resource, data: bytes | bytearray, decoder: msgspec.json.Decoder[_List[Object]], kind: type[Object]
) -> ListPage:
    try:
        page = decoder.decode(data)
    except (ValueError, RecursionError):
        return _decode_page_by_item(resource, data, kind)
    _check_kind(resource, page.kind, "List")
    objects = page.items if page.items is not None else []
    if not all(found.metadata.name for found in objects):
        return _decode_page_by_item(resource, data, kind)
    return ListPage(objects, [], page.metadata.resource_version or "", page.metadata.continue_ or "")


def _with_zones(page: ListPage, data: bytes | bytearray, names: Collection[tuple[str, str]]) -> ListPage:
    """Return a page of slices with some of them, by namespace and name, as PlacedSlices: decoded once more."""
    again = _decode_page("endpointslices", data, _placed_list, PlacedSlice)
    placed = {name: found for found in again.objects if (name := identity(found)) in names}
    rejected = [one for one in page.rejected if (one.namespace, one.name) not in placed]
    rejected += [one for one in again.rejected if (one.namespace, one.name) in placed]
    return page._replace(objects=[placed.get(identity(found), found) for found in page.objects], rejected=rejected)


def decode_object(
    resource: Resource, data: bytes, kind: type[Object] | None = None
) -> tuple[Object | None, list[Rejected]]:
    """Decode one object, as a `kind` if that is not the usual one of its resource. Never raises.

    Return the object, or None, and what was rejected of it.
    """
    kind = kind or TYPES[resource]
    try:
        found = _objects[kind].decode(data)
    except (ValueError, RecursionError):
        pass
    else:
        if found.metadata.name:
            return found, []
    saved = salvage(data, kind)
    return saved.object, list(_rejections(resource, saved.namespace, saved.name, saved.uid, saved.problems))


class WatchDecoder:
    """Splits the bytes of one watch stream into lines, wherever the chunks were cut, and decodes the lines.

    Slices of the Services in `with_zones`, as it is at the time, become PlacedSlices.
    """

    __slots__ = ("_resource", "_tail", "_with_zones")

    def __init__(self, resource: Resource, with_zones: Collection[ServiceName] = ()) -> None:
        self._resource: Resource = resource
        self._with_zones = with_zones if resource == "endpointslices" else ()
        self._tail = bytearray()

    def feed(self, data: bytes) -> WatchChanges:
        """Take the next bytes; return what the lines completed by them say."""
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
        """The stream ended: decode what follows the last newline, or report that it was cut off."""
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
                seen, ended = _decode_line(self._resource, line, events, self._with_zones)
            except SourceError as error:
                return WatchChanges(events, version, initial_end, error)
            version = seen or version
            initial_end = initial_end or ended
        return WatchChanges(events, version, initial_end, None)


def _decode_line(
    resource: Resource, data: bytes, events: list[Event], with_zones: Collection[ServiceName] = ()
) -> tuple[str, bool]:
    """Decode one line, append its events; return its resourceVersion and whether it ended the initial events."""
    try:
        line = _lines[resource].decode(data)
        if with_zones and service_of(line.object) in with_zones:
            line = _placed_line.decode(data)
    except (ValueError, RecursionError):
        return _decode_odd_line(resource, data, events, with_zones)
    metadata = line.object.metadata
    if not metadata.name or line.type not in {"ADDED", "MODIFIED", "DELETED"}:
        return _decode_odd_line(resource, data, events, with_zones)
    if line.type == "DELETED":
        events.append(Deleted(resource, metadata.namespace or "", metadata.name))
    else:
        events.append(Upserted(resource, line.object))
    return metadata.resource_version or "", False


def _decode_odd_line(
    resource: Resource, data: bytes, events: list[Event], with_zones: Collection[ServiceName]
) -> tuple[str, bool]:
    """Decode a line that is no change of a well-formed object: a bookmark, an error, a wrong object, no JSON."""
    line = _decode_raw_line(data)
    content = bytes(line.object)
    match line.type:
        case "ADDED" | "MODIFIED" | "DELETED":
            return _decode_wrong_object(resource, line.type, content, events, with_zones), False
        case "BOOKMARK":
            try:
                bookmark = _bookmark.decode(content)
            except (ValueError, RecursionError):
                return "", False
            _check_kind(resource, bookmark.kind)
            metadata = bookmark.metadata
            return metadata.resource_version or "", (metadata.annotations or {}).get(INITIAL_EVENTS_END) == "true"
        case "ERROR":
            raise status_error(decode_status(content, 0))
        case other:
            raise MalformedAnswer(f"a watch event of the unknown type {other[:40]!r}")


def _decode_wrong_object(
    resource: Resource, change: str, content: bytes, events: list[Event], with_zones: Collection[ServiceName]
) -> str:
    saved = salvage(content, TYPES[resource])
    if saved.object is not None and with_zones and service_of(saved.object) in with_zones:
        saved = salvage(content, PlacedSlice)
    if change == "DELETED" and saved.name:
        events.append(Deleted(resource, saved.namespace, saved.name))
        return saved.version
    if saved.object is not None:
        events.append(Upserted(resource, saved.object))
    events.extend(_rejections(resource, saved.namespace, saved.name, saved.uid, saved.problems))
    return saved.version


def _decode_raw_line(data: bytes) -> _Line[Raw]:
    try:
        try:
            return _raw_line.decode(data)
        except (ValueError, RecursionError):
            return _raw_line.decode(mended(data))
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"a watch line of {len(data)} bytes is no event: {error}") from error


def _decode_page_by_item(resource: Resource, data: bytes | bytearray, kind: type[Object]) -> ListPage:
    try:
        try:
            page = _raw_list.decode(data)
        except (ValueError, RecursionError):
            page = _raw_list.decode(mended(bytes(data)))
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"the list of {resource} cannot be read: {error}") from error
    _check_kind(resource, page.kind, "List")
    objects: list[Object] = []
    rejected: list[Rejected] = []
    for item in page.items or []:
        found, problems = decode_object(resource, bytes(item), kind)
        if found is not None:
            objects.append(found)
        rejected += problems
    return ListPage(objects, rejected, page.metadata.resource_version or "", page.metadata.continue_ or "")


def _check_kind(resource: Resource, kind: str, suffix: str = "") -> None:
    expected = TYPES[resource].__name__ + suffix
    if kind != expected:
        raise MalformedAnswer(f"the answer about {resource} is of the kind {kind[:60]!r}, not {expected}")


def _rejections(resource: Resource, namespace: str, name: str, uid: str, problems: list[Problem]) -> Iterable[Rejected]:
    left_out = len(problems) - MAX_PROBLEMS
    for index, problem in enumerate(problems[:MAX_PROBLEMS]):
        reason = problem.reason
        if left_out > 0 and index == MAX_PROBLEMS - 1:
            reason += f" (and {left_out} more problems in this object)"
        yield Rejected(resource, namespace, name, uid, problem.field, reason)


def identity(found: Object | PackedSlice) -> tuple[str, str]:
    """Return (namespace, name) of an object, the namespace '' where there is none."""
    return found.metadata.namespace or "", found.metadata.name


def service_of(found: Object) -> ServiceName | None:
    """Return the Service of an EndpointSlice, None where it names none."""
    labels = found.metadata.labels
    return (found.metadata.namespace or "", labels.service_name) if labels and labels.service_name else None


def kept_identities(
    objects: Iterable[Object | PackedSlice], rejected: Iterable[Rejected]
) -> frozenset[tuple[str, str]] | None:
    """Return who was rejected as a whole: named in `rejected` and not among `objects`.

    None when one cannot be told by what it says: whichever is missing then may be that one.
    """
    named = {(problem.namespace, problem.name, problem.resource) for problem in rejected}
    if not all(name and (namespace or resource not in NAMESPACED) for namespace, name, resource in named):
        return None
    wrong = {(namespace, name) for namespace, name, _ in named}
    return frozenset(wrong.difference(map(identity, objects)) if wrong else wrong)
