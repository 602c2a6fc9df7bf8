"""The text of one manifest file into objects: YAML and JSON, several documents, List kinds. Pure.

A wrong document does not affect the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from kubeproxy.api.decode import decode_object, identity, service_of
from kubeproxy.config.yaml_text import load_yaml
from kubeproxy.model.events import Rejected
from kubeproxy.model.objects import NAMESPACED, EndpointSlice, Node, Object, PlacedSlice, Resource, Service
from kubeproxy.model.plan import ServiceName

_KINDS: dict[str, tuple[Resource, tuple[str, ...]]] = {
    "Service": ("services", ("v1",)),
    "EndpointSlice": ("endpointslices", ("discovery.k8s.io/v1",)),
    "Node": ("nodes", ("v1",)),
    "ServiceCIDR": ("servicecidrs", ("networking.k8s.io/v1", "networking.k8s.io/v1beta1")),
}
_SEPARATOR = re.compile(r"^---(?=\s|\Z)", re.MULTILINE)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

Key = tuple[Resource, str, str]
"""Resource, namespace ('' for none) and name."""


class FileContent(NamedTuple):
    """The content of a file.

    The field of a Rejected names file and document. `whole` is False when a document or object is missing from `found`
    because it is wrong; `ignored` has the kinds of objects that no proxy uses.
    """

    found: dict[Key, Object]
    rejected: list[Rejected]
    whole: bool
    ignored: frozenset[str]


def read_documents(name: str, data: bytes, with_zones: Collection[ServiceName] = ()) -> FileContent:
    """Read the content of the file `name`, which is JSON if its suffix is .json. Never raises.

    Slices of the Services `with_zones` are PlacedSlices.
    """
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
            elif not _read_entry(entry, f"{where}: {path}", content, with_zones):
                whole = False
    return content._replace(whole=whole, ignored=frozenset(ignored))


def is_watched(found: Object, node_name: str) -> bool:
    """Return whether a proxy watches an object (source.targets); the node name '' selects every Node.

    Services that the selectors of the watches exclude are included: /debug/state shows why they have no effect.
    """
    labels = found.metadata.labels
    match found:
        case EndpointSlice():
            return labels is None or labels.headless is None
        case Node():
            return not node_name or found.metadata.name == node_name
        case _:
            return True


def _documents(name: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each document, an Exception in place of a value that cannot be read."""
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
    """Yield the objects of a document with their JSON path: itself, or the items of a List."""
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


def _read_entry(entry: Any, where: str, content: FileContent, with_zones: Collection[ServiceName]) -> bool:
    """Add the object, and its problems, to `content`; return whether there is an object."""

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
    if with_zones and isinstance(found, EndpointSlice) and service_of(found) in with_zones:
        found, rejected = decode_object(resource, encoded, PlacedSlice)
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
    """Return the field and the text of a name that an API server would refuse, None if all names are valid.

    Backends derive chain names from these names, so a name `web:x` would be ambiguous: it could also mean port x of
    `web`. Source: Kubernetes' rules for Services, namespaces and port names, all labels of RFC 1123.
    """
    names = {"metadata.namespace": service.metadata.namespace or "", "metadata.name": service.metadata.name}
    names |= {f"spec.ports[{i}].name": port.name or "" for i, port in enumerate(service.spec.ports or ())}
    return next(((field, name) for field, name in names.items() if name and not _LABEL.fullmatch(name)), None)


def _with_namespace(entry: dict[Any, Any], resource: Resource) -> dict[Any, Any]:
    metadata = entry.get("metadata")
    if not isinstance(metadata, dict):
        return entry
    if resource not in NAMESPACED:
        return {**entry, "metadata": {**metadata, "namespace": None}}
    return entry if metadata.get("namespace") else {**entry, "metadata": {**metadata, "namespace": "default"}}
