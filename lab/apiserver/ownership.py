"""Updates metadata.managedFields after a write: determines the written paths and the manager.

Writes inside the lab (by controllers and tests) have no manager: an object with only such writes has no managers,
because nothing applies it. If the object has managers, such a write owns the fields that it changes.
"""

from __future__ import annotations

from typing import NamedTuple

from lab.apiserver.event_versions import from_core
from lab.apiserver.fieldsets import Path, Sets, changed, paths_of
from lab.apiserver.fieldtypes import Struct
from lab.apiserver.managers import Manager, Operation, Owners
from lab.apiserver.resources import Resource
from lab.apiserver.schema import KINDS
from lab.apiserver.status import Json

_ALLOCATED = {
    "Service": ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "healthCheckNodePort"),
    "Namespace": ("finalizers",),
    "Node": ("taints",),
}
"""Fields of spec that the server fills in after it has read the body; the writer owns them only if the body had
them."""


class Writer(NamedTuple):
    """The manager of a write: fieldManager of the query, or the name of the client's program."""

    name: str
    operation: Operation = Operation.UPDATE


LAB = Writer("lab")


class Write(NamedTuple):
    """One write of an object of a resource; `given` are the paths in the body that the client sent."""

    resource: Resource
    subresource: str
    writer: Writer
    given: Sets

    @property
    def manager(self) -> Manager:
        """The manager that writes."""
        return Manager(self.writer.name, self.writer.operation, self.resource.api_version, self.subresource)

    def entries(self, old: Json | None, new: Json, entries: list[Json], now: str) -> list[Json]:
        """metadata.managedFields after the write; `entries` are the managed fields before the write."""
        owners = Owners(entries, now)
        if self.writer.operation is Operation.APPLY:
            owners.apply(self.manager, {path for path in self.given.applied if self._counts(path)}, set())
            return owners.entries()
        kind = kind_of(self.resource)
        before = paths_of(_versioned(self.resource, old), kind) if old else Sets({}, set(), set())
        written, gone = changed(before, paths_of(_versioned(self.resource, new), kind))
        owners.write(self.manager, {path for path in written if self._counts(path)}, gone)
        return owners.entries()

    def _counts(self, path: Path) -> bool:
        is_status = path[0] == "f:status"
        if is_status != (self.subresource == "status") and "status" in self.resource.subresources:
            return False
        return path in self.given.everything or not _is_allocated(self.resource.kind, path)


def _is_allocated(kind: str, path: Path) -> bool:
    if kind == "Service" and path[-1] == "f:nodePort":
        return True
    return path[0] == "f:spec" and len(path) > 1 and path[1][2:] in _ALLOCATED.get(kind, ())


def kind_of(resource: Resource) -> Struct:
    """Return the field types of a resource's objects."""
    return KINDS[resource.api_version, resource.kind]


def _versioned(resource: Resource, obj: Json) -> Json:
    return from_core(obj) if resource.group == "events.k8s.io" else obj
