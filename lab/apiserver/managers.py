"""The owners of an object's fields (metadata.managedFields), and server-side apply. Pure.

The manager that writes a value owns its path. An apply that would change another manager's path is a conflict. A path
that the manager no longer applies is removed, unless another manager also owns it. Source: KEP-555 and
structured-merge-diff, as far as kubectl needs them; versions are not converted, because every kind here has one
version."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from lab.apiserver.fieldsets import Path, changed, decoded, element, encoded, paths_of, shown
from lab.apiserver.fieldtypes import ListOf, MapOf, Struct, Type
from lab.apiserver.status import Json, apply_conflict


class Operation(enum.StrEnum):
    """The operation by which a manager owns fields."""

    APPLY = "Apply"
    UPDATE = "Update"


class Manager(NamedTuple):
    """A field manager; a name has separate fields for each operation, version and subresource."""

    name: str
    operation: Operation
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        text = f'"{self.name}"' + (f' with subresource "{self.subresource}"' if self.subresource else "")
        return f"{text} using {self.api_version}" if self.operation is Operation.UPDATE else text


class _Owned(NamedTuple):
    paths: frozenset[Path]
    time: str


class Owners:
    """The managers of one object. `entries` are metadata.managedFields; `now` is the time of their changes."""

    def __init__(self, entries: Iterable[Json], now: str) -> None:
        self._now = now
        self._owned: dict[Manager, _Owned] = {}
        for entry in entries:
            if entry:  # A client sends [{}] to remove all managed fields.
                manager = Manager(
                    entry.get("manager", ""),
                    Operation(entry["operation"]),
                    entry["apiVersion"],
                    entry.get("subresource", ""),
                )
                self._owned[manager] = _Owned(frozenset(decoded(entry.get("fieldsV1") or {})), entry.get("time", now))

    def paths(self, manager: Manager) -> frozenset[Path]:
        """The fields that one manager owns."""
        return self._owned[manager].paths if manager in self._owned else frozenset()

    def of_others(self, manager: Manager) -> Iterator[tuple[Manager, frozenset[Path]]]:
        """Return the paths that the other managers own."""
        return ((other, owned.paths) for other, owned in self._owned.items() if other != manager)

    def write(self, manager: Manager, written: set[Path], gone: set[Path]) -> None:
        """A manager changed and removed paths: it now owns the changed paths, and no manager owns the removed paths."""
        for other, paths in tuple(self.of_others(manager)):
            self._set(other, paths - written - gone)
        self._set(manager, (self.paths(manager) | written) - gone)

    def apply(self, manager: Manager, applied: set[Path], gone: set[Path]) -> None:
        """A manager applied these paths, and now owns no others; no manager owns the removed paths."""
        for other, paths in tuple(self.of_others(manager)):
            self._set(other, paths - gone)
        self._set(manager, frozenset(applied))

    def take(self, conflicts: Mapping[Manager, frozenset[Path]]) -> None:
        """Take paths from the managers that own them, for a forced apply."""
        for manager, paths in conflicts.items():
            self._set(manager, self.paths(manager) - paths)

    def _set(self, manager: Manager, paths: frozenset[Path]) -> None:
        if not paths:
            self._owned.pop(manager, None)
        elif paths != self.paths(manager):
            self._owned[manager] = _Owned(paths, self._now)

    def entries(self) -> list[Json]:
        """Return metadata.managedFields: first the managers that apply, then by age."""
        ordered = sorted(self._owned.items(), key=lambda item: (item[0].operation, item[1].time, item[0]))
        return [_entry(manager, owned) for manager, owned in ordered]


def _entry(manager: Manager, owned: _Owned) -> Json:
    entry = {
        "manager": manager.name,
        "operation": manager.operation.value,
        "apiVersion": manager.api_version,
        "time": owned.time,
        "fieldsType": "FieldsV1",
        "fieldsV1": encoded(owned.paths),
    }
    return entry | ({"subresource": manager.subresource} if manager.subresource else {})


def apply_to(live: Json, config: Json, kind: Struct, owners: Owners, manager: Manager, *, force: bool) -> Json:
    """Return a copy of the live object with a configuration applied; afterwards `owners` are the owners of the result.

    Raises ApiError 409 with the other managers whose values would change, unless `force` takes over their fields.
    """
    applied = paths_of(config, kind).applied
    result: Json = _merged(live, config, kind)
    theirs = set(_with_parents(path for _, paths in owners.of_others(manager) for path in paths))
    kept = theirs | set(_with_parents(applied))
    for path in sorted(set(_with_parents(owners.paths(manager))) - kept):
        if len(path) > 1 or not isinstance(kind.fields.get(path[0][2:]), Struct):
            _remove(result, path, kind)
    written, gone = changed(paths_of(live, kind), paths_of(result, kind))
    conflicts = {other: paths & written for other, paths in owners.of_others(manager) if paths & written}
    if conflicts and not force:
        raise apply_conflict(
            [(str(m), shown(path)) for m, paths in sorted(conflicts.items()) for path in sorted(paths)]
        )
    owners.take(conflicts)
    owners.apply(manager, applied, gone)
    return result


def _with_parents(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        for length in range(1, len(path) + 1):
            yield path[:length]


def _merged(live: Any, config: Any, type_: Type | None) -> Any:
    if isinstance(config, dict) and isinstance(live, dict):
        if isinstance(type_, Struct) and not type_.is_atomic:
            fields = type_.fields
            changes = {k: _merged(live.get(k), v, fields.get(k)) for k, v in config.items() if v is not None}
            return copy.deepcopy(live) | changes
        if isinstance(type_, MapOf) and not type_.is_atomic:
            return copy.deepcopy(live) | {k: _merged(live.get(k), v, type_.item) for k, v in config.items()}
    if (
        isinstance(config, list)
        and isinstance(live, list)
        and isinstance(type_, ListOf)
        and (type_.keys or type_.is_set)
    ):
        return _merged_list(live, config, type_)
    return copy.deepcopy(config)


def _merged_list(live: list[Any], config: list[Any], type_: ListOf) -> list[Any]:
    """Return the configuration's items in its order; each other item stays before the item that it preceded."""
    there = {element(item, type_): item for item in live}
    wanted = [element(item, type_) for item in config]
    waiting = list(there)
    result: list[Any] = []
    for name, item in zip(wanted, config, strict=True):
        if name in waiting:
            before = waiting[: waiting.index(name)]
            waiting = waiting[len(before) + 1 :]
            result += [copy.deepcopy(there[other]) for other in before if other not in wanted]
        result.append(_merged(there.get(name), item, type_.item))
    return result + [copy.deepcopy(there[name]) for name in waiting if name not in wanted]


def _remove(obj: Any, path: Path, type_: Type) -> None:
    """Remove the value at a path, if it exists."""
    holder: Any = obj
    for part in path[:-1]:
        holder, found = _step(holder, part, type_)
        if holder is None or found is None:
            return
        type_ = found
    last = path[-1]
    if isinstance(holder, dict):
        holder.pop(last[2:], None)
    elif isinstance(holder, list) and isinstance(type_, ListOf):
        holder[:] = [item for item in holder if element(item, type_) != last]


def _step(holder: Any, part: str, type_: Type) -> tuple[Any, Type | None]:
    if isinstance(holder, dict):
        name = part[2:]
        inner = (
            type_.fields.get(name) if isinstance(type_, Struct) else type_.item if isinstance(type_, MapOf) else None
        )
        return holder.get(name), inner
    if isinstance(holder, list) and isinstance(type_, ListOf):
        return next((item for item in holder if element(item, type_) == part), None), type_.item
    return None, None
