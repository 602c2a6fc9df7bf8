"""The fields of an object as sets of paths, which field managers own (KEP-555). Pure.

A path is a tuple of elements in the form of metadata.managedFields: f:NAME for a field or the key of a map, k:{KEYS}
for an item of a list with keys, v:VALUE for a member of a set. A value that is applied as a whole (an atomic list or
map, an unnamed field of an open struct) has one path, whatever its content. Checked against recordings of a
kube-apiserver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from lab.apiserver.fieldtypes import ListOf, MapOf, Struct, Type
from lab.apiserver.status import Json

Path = tuple[str, ...]
Fields = dict[Path, object]

# Fields that identify the object, or that the server maintains: no manager owns them.
_NOBODYS = {
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "generation",
    "managedFields",
    "resourceVersion",
}
_TOP = {"apiVersion", "kind"}
_PRESENT = object()
"""The value of the path of a container: the container exists, and its content has its own paths."""


class Sets(NamedTuple):
    """The paths of an object: `leaves` with their values, `items` of lists, and `containers`, the other paths."""

    leaves: Fields
    items: set[Path]
    containers: set[Path]

    @property
    def applied(self) -> set[Path]:
        """Return the paths that a manager owns after it has applied this object."""
        return {*self.leaves, *self.items}

    @property
    def everything(self) -> Fields:
        """Return all paths, with the values of leaves."""
        return {**dict.fromkeys((*self.items, *self.containers), _PRESENT), **self.leaves}


def paths_of(obj: Json, kind: Struct) -> Sets:
    """Return the paths of an object, without the metadata that no manager owns."""
    sets = Sets({}, set(), set())
    for name, value in obj.items():
        if name not in _TOP:
            part = {k: v for k, v in value.items() if k not in _NOBODYS} if name == "metadata" else value
            _walk((f"f:{name}",), part, kind.fields.get(name), sets)
    return sets


def _walk(path: Path, value: Any, type_: Type | None, sets: Sets) -> None:
    if isinstance(type_, Struct) and isinstance(value, dict) and not type_.is_atomic:
        if type_.is_pointer:
            sets.containers.add(path)
        for name, inner in value.items():
            _walk((*path, f"f:{name}"), inner, type_.fields.get(name), sets)
    elif isinstance(type_, MapOf) and isinstance(value, dict) and not type_.is_atomic:
        sets.containers.add(path)
        for name, inner in value.items():
            _walk((*path, f"f:{name}"), inner, type_.item, sets)
    elif isinstance(type_, ListOf) and isinstance(value, list) and (type_.keys or type_.is_set):
        if not type_.is_required:
            sets.containers.add(path)
        for item in value:
            at = (*path, element(item, type_))
            sets.items.add(at)
            if isinstance(type_.item, Struct):
                _walk(at, item, type_.item, sets)
    elif value is not None:
        sets.leaves[path] = value


def element(item: Any, type_: ListOf) -> str:
    """Return the path element of an item of a list."""
    if type_.is_set:
        return "v:" + _json(item)
    defaults = {"protocol": "TCP"}
    return "k:" + _json({key: item.get(key, defaults.get(key)) for key in sorted(type_.keys)})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def changed(old: Sets, new: Sets) -> tuple[set[Path], set[Path]]:
    """Return the new and changed paths, and the removed paths."""
    before, after = old.everything, new.everything
    written = {path for path, value in after.items() if path not in before or before[path] != value}
    return written, before.keys() - after.keys()


def encoded(paths: Iterable[Path]) -> Json:
    """The paths as fieldsV1."""
    tree: Json = {}
    for path in sorted(paths):
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node["."] = {}
    return _pruned(tree)


def _pruned(tree: Json) -> Json:
    """Return the tree with each {".": {}} replaced by an empty map, which has the same meaning."""
    return {
        name: {} if node.keys() == {"."} else _pruned(node) if name != "." else {}
        for name, node in sorted(tree.items())
    }


def decoded(fields: Json, path: Path = ()) -> Iterator[Path]:
    """The paths of fieldsV1."""
    for name, node in fields.items():
        if name == ".":
            yield path
        elif node:
            yield from decoded(node, (*path, name))
        else:
            yield (*path, name)


def shown(path: Path) -> str:
    """Return a path in the form of messages: .spec.ports[port=80,protocol="TCP"].targetPort."""
    text = ""
    for part in path:
        kind, _, rest = part.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "v":
            text += f"[={rest}]"
        else:
            keys = msgspec.json.decode(rest)
            text += "[" + ",".join(f"{name}={_json(value)}" for name, value in sorted(keys.items())) + "]"
    return text
