"""The source --manifests DIR: reads objects from the YAML and JSON files of a folder, and reads changed files again.
The source delivers the same events as the watches of an API server (watch.py). A file may contain several documents,
and documents of kind List. An invalid document does not affect other documents."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kubeproxy.api.decode import decode_object, identity, node_addresses
from kubeproxy.api.source import ResourceStatus
from kubeproxy.config.yaml_text import load_yaml
from kubeproxy.errors import ConfigError
from kubeproxy.kernel.proc import inotify
from kubeproxy.model.events import Deleted, Event, Rejected, Replaced, Sink, Upserted
from kubeproxy.model.objects import LABEL, NAMESPACED, TYPES, VERSIONS, EndpointSlice, Node, Object, Resource, Service

log = logging.getLogger("kubeproxy.api")

POLL = 1.0  # seconds between two scans without inotify

GRACE = 0.1
"""Seconds for which the objects of a missing or empty file are kept: editors save by renaming or truncating."""

SETTLE = 0.005  # seconds between the first event of inotify and the scan: saving a file causes several events

MAX_FILE = 256 << 20

_SUFFIXES = (".yaml", ".yml", ".json")
# IN_MODIFY is omitted: a file is read after its writer has closed it.
_EVENTS: Final = (
    inotify.IN_ATTRIB
    | inotify.IN_CLOSE_WRITE
    | inotify.IN_MOVED_FROM
    | inotify.IN_MOVED_TO
    | inotify.IN_CREATE
    | inotify.IN_DELETE
    | inotify.IN_DELETE_SELF
    | inotify.IN_MOVE_SELF
    | inotify.IN_ONLYDIR
)


class _Signature(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int


class _File(NamedTuple):
    signature: _Signature
    found: dict[Key, Object]


class ManifestSource:
    """Keeps `sink` up to date with the manifests in `folder`. Of the Nodes, only `node_name` is delivered ('' means all
    Nodes). If several files contain an object, the first of these files by name is used. Raises ConfigError if `folder`
    is not a directory."""

    def __init__(
        self,
        folder: str,
        sink: Sink,
        node_name: str = "",
        *,
        poll: float = POLL,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(f"--manifests: {folder} is no directory")
        self._sink = sink
        self._node_name = node_name
        self._poll = poll
        self._grace = grace
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._missing: dict[str, float] = {}
        self._delivered: dict[Key, Object] = {}
        self._reported: set[tuple[Key, str]] = set()
        self._ignored: set[str] = set()
        self._trouble: dict[str, str] = {}
        self.statuses: dict[Resource, ResourceStatus] = {resource: ResourceStatus(resource) for resource in TYPES}

    async def run(self) -> None:
        """Deliver the objects of the folder, and then their changes, until cancelled."""
        while True:
            self.scan()
            watch = inotify.Inotify.open()
            try:
                if watch.watch(self._folder, _EVENTS):
                    await self._follow(watch)
                else:
                    await asyncio.sleep(self._grace if self._missing else self._poll)
            finally:
                watch.close()

    async def _follow(self, watch: inotify.Inotify) -> None:
        """Scan after each change in the folder, until the folder is deleted or moved."""
        while not watch.happened() & (inotify.IN_IGNORED | inotify.IN_MOVE_SELF):
            self.scan()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace if self._missing else None):
                    await _readable(watch.fileno())
                await asyncio.sleep(SETTLE)

    def scan(self) -> None:
        """Read the changed files, and deliver the changes of their objects."""
        rejected: list[Rejected] = []
        present = self._list_folder()
        if present is None and not self.statuses["services"].synced:
            return  # an empty first list would remove the rules of an earlier process from the kernel
        if present is not None:
            self._drop_missing(present)
            for name, signature in present.items():
                known = self._files.get(name)
                if known is None or known.signature != signature:
                    self._read(name, signature, rejected)
        self._deliver(rejected)

    def nodes(self) -> dict[bytes, str]:
        """Return the names of all Nodes by packed address."""
        if not self.statuses["services"].synced:
            self.scan()
        found = (one for file in self._files.values() for one in file.found.values() if isinstance(one, Node))
        return {address: one.metadata.name for one in found for address in node_addresses(one)}

    def _list_folder(self) -> dict[str, _Signature] | None:
        try:
            paths = sorted(self._folder.iterdir())
        except OSError as error:
            self._report(str(self._folder), f"cannot be read, so the last state remains: {error.strerror}")
            return None
        present = {}
        for path in paths:
            if path.name.startswith(".") or path.suffix not in _SUFFIXES:
                continue
            try:
                state = path.stat()
            except OSError:
                continue
            if path.is_file() and (state.st_size or path.name not in self._files):
                present[path.name] = _Signature(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        return present

    def _drop_missing(self, present: dict[str, _Signature]) -> None:
        now = self._clock()
        gone = self._files.keys() - present.keys()
        self._missing = {name: self._missing.get(name, now) for name in gone}
        for name, since in list(self._missing.items()):
            if now - since >= self._grace:
                del self._files[name], self._missing[name]
                self._trouble.pop(name, None)

    def _read(self, name: str, signature: _Signature, rejected: list[Rejected]) -> None:
        known = self._files.get(name)
        try:
            if signature.size > MAX_FILE:
                raise OSError(0, f"the file is larger than {MAX_FILE} bytes")
            data = (self._folder / name).read_bytes()
        except OSError as error:
            self._report(name, f"cannot be read, so the last state remains: {error.strerror}")
            return  # the next scan reads the file again
        self._trouble.pop(name, None)
        content = read_documents(name, data)
        rejected += content.rejected
        # An invalid part of a file may be the new version of any former object of the file. All former objects of the
        # file are therefore kept, so that a mistake never deletes an object.
        last = known.found if known and not content.whole else {}
        self._files[name] = _File(signature, {**last, **content.found})
        for kind in content.ignored - self._ignored:
            log.info("Ignoring objects of kind %s, first seen in %s: no proxy uses them", kind, name)
        self._ignored |= content.ignored

    def _deliver(self, rejected: list[Rejected]) -> None:
        wanted: dict[Key, Object] = {}
        first_in: dict[Key, str] = {}
        conflicts: set[tuple[Key, str]] = set()
        for name in sorted(self._files):
            for key, found in self._files[name].found.items():
                if key in first_in:
                    conflicts.add((key, name))
                    continue
                first_in[key] = name
                if is_watched(found, self._node_name):
                    wanted[key] = found
        for key, name in sorted(conflicts - self._reported):
            rejected.append(Rejected(*key, "", name, f"is read from {first_in[key]}, the first file that contains it"))
        self._reported = conflicts
        if self.statuses["services"].synced:
            events: list[Event] = [*_difference(self._delivered, wanted), *rejected]
        else:
            events = [*_replaced(wanted), *rejected]
        self._delivered = wanted
        if events:
            self._sink(events)
        for status in self.statuses.values():
            status.synced = status.connected = True
            status.last_contact = self._clock()

    def _report(self, name: str, trouble: str) -> None:
        if self._trouble.get(name) != trouble:
            log.warning("Manifest %s %s", name, trouble)
        self._trouble[name] = trouble


async def _readable(descriptor: int) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def _replaced(wanted: dict[Key, Object]) -> Iterator[Event]:
    for resource in TYPES:
        yield Replaced(resource, [found for key, found in wanted.items() if key[0] == resource])


def _difference(old: dict[Key, Object], new: dict[Key, Object]) -> Iterator[Event]:
    for key in old:
        if key not in new:
            yield Deleted(*key)
    for key, found in new.items():
        before = old.get(key)
        if before is not found and before != found:
            yield Upserted(key[0], found)


_OLDER: dict[Resource, tuple[str, ...]] = {"servicecidrs": ("networking.k8s.io/v1beta1",)}
_KINDS: dict[str, tuple[Resource, tuple[str, ...]]] = {
    kind.__name__: (resource, (VERSIONS[resource], *_OLDER.get(resource, ()))) for resource, kind in TYPES.items()
}
_SEPARATOR = re.compile(r"^---(?=\s|\Z)", re.MULTILINE)

Key = tuple[Resource, str, str]  # resource, namespace ('' for none) and name


class FileContent(NamedTuple):
    """The objects and problems in a manifest file."""

    found: dict[Key, Object]
    rejected: list[Rejected]  # problems; each problem's field contains the file and the document
    whole: bool  # False if a document or object is missing from `found` because it is invalid
    ignored: frozenset[str]  # the kinds of objects that no proxy uses


def read_documents(name: str, data: bytes) -> FileContent:
    """Read the content of a file: JSON if `name` ends with .json, else YAML. Never raises."""
    content = FileContent({}, [], True, frozenset())
    whole = True
    ignored: set[str] = set()
    for number, document in _documents(name, data):
        where = f"{name}: document {number}"
        if isinstance(document, Exception):
            reason = " ".join(str(document).split())
            content.rejected.append(Rejected("services", "", "", "", where, f"cannot be read: {reason}"))
            whole = False
            continue
        for path, entry in _entries(document, ""):
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if isinstance(kind, str) and kind and kind not in _KINDS:
                ignored.add(kind[:60])
            elif not _read_entry(entry, f"{where}: {path}", content):
                whole = False
    return content._replace(whole=whole, ignored=frozenset(ignored))


def is_watched(found: Object, node_name: str) -> bool:
    """Return whether a proxy watches an object (source.targets); the node name '' selects every Node. Services that the
    selectors of the watches would exclude are accepted, so that /debug/state shows why they have no effect."""
    labels = found.metadata.labels
    match found:
        case EndpointSlice():
            return labels is None or labels.headless is None
        case Node():
            return not node_name or found.metadata.name == node_name
        case _:
            return True


def _documents(name: str, data: bytes) -> Iterator[tuple[int, Any]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield 1, ValueError(f"is not UTF-8 text, see byte {error.start + 1}")
        return
    if name.endswith(".json"):
        yield 1, _loaded(msgspec.json.decode, text)
        return
    number = 0
    for part in _SEPARATOR.split(text):
        if all(line.lstrip()[:1] in {"", "#", "%"} for line in part.split("\n")):  # only directives and comments
            continue
        number += 1
        yield number, _loaded(load_yaml, part)


def _loaded(load: Callable[[str], Any], text: str) -> Any:
    try:
        return load(text)
    except (ValueError, RecursionError) as error:
        return error


def _entries(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a document with their JSON path: the document itself, or the items of a List."""
    if document is None:
        return
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str) or not kind.endswith("List"):
        yield path, document
        return
    items = document.get("items")
    of_kind = kind.removesuffix("List")
    for index, item in enumerate(items if isinstance(items, list) else []):
        entry = item
        if of_kind and isinstance(item, dict):
            entry = {"kind": of_kind, "apiVersion": document.get("apiVersion"), **item}
        yield f"{path}items[{index}].", entry


def _read_entry(entry: Any, where: str, content: FileContent) -> bool:
    def refuse(resource: Resource, field: str, reason: str) -> bool:
        content.rejected.append(Rejected(resource, "", "", "", field, reason))
        return False

    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        return refuse("services", f"{where}kind", f"must be one of {', '.join(_KINDS)} or List")
    resource, versions = _KINDS[kind]
    if entry.get("apiVersion") not in versions:
        got = str(entry.get("apiVersion"))[:60]
        return refuse(resource, f"{where}apiVersion", f"{got} is not supported for {kind}; use {versions[0]}")
    try:
        encoded = msgspec.json.encode(_with_namespace(entry, resource))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return refuse(resource, where.rstrip(": ."), f"is no JSON value: {error}")
    found, rejected = decode_object(resource, encoded)
    if isinstance(found, Service) and (odd := _odd_name(found)) is not None:
        field, name = odd
        reason = f"{name[:80]!r} is no name: up to 63 lower-case letters, digits and -, with neither end a -"
        rejected = [Rejected(resource, *identity(found), found.metadata.uid or "", field, reason)]
        found = None
    if found is not None:
        content.found.setdefault((resource, *identity(found)), found)
    content.rejected.extend(
        msgspec.structs.replace(problem, field=f"{where}{problem.field}".rstrip(": .")) for problem in rejected
    )
    return found is not None


def _odd_name(service: Service) -> tuple[str, str] | None:
    """Return the field and the text of a name that an API server would refuse; None if all names are valid. Source:
    Kubernetes' rules for Services, namespaces and port names, all DNS labels (RFC 1123). Backends derive chain names
    from these names: a Service `web:x` would be confused with port x of `web`."""
    names = {"metadata.namespace": service.metadata.namespace or "", "metadata.name": service.metadata.name}
    names |= {f"spec.ports[{i}].name": port.name or "" for i, port in enumerate(service.spec.ports or ())}
    return next(((field, name) for field, name in names.items() if name and not LABEL.fullmatch(name)), None)


def _with_namespace(entry: dict[Any, Any], resource: Resource) -> dict[Any, Any]:
    metadata = entry.get("metadata")
    if not isinstance(metadata, dict):
        return entry
    if resource not in NAMESPACED:
        return {**entry, "metadata": {**metadata, "namespace": None}}
    return entry if metadata.get("namespace") else {**entry, "metadata": {**metadata, "namespace": "default"}}
