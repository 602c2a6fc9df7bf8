"""Events from a source of objects: complete lists, changed objects, deleted objects, unusable objects.

An event names the objects to compile again, never an action. The order of events of different objects does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.objects import Object, PlacedSlice, Resource


class Replaced(Struct, frozen=True):
    """All present objects of a resource, from a list: all others are deleted.

    EndpointSlices may be packed. `kept` names objects (namespace, name) that exist but could not be decoded: their last
    state stays. None: the names are unknown, and all objects stay.
    """

    resource: Resource
    objects: Sequence[Object | PackedSlice]
    kept: frozenset[tuple[str, str]] | None = frozenset()


class Upserted(Struct, frozen=True):
    """An object was added or changed."""

    resource: Resource
    object: Object


class ZonedSlice(Struct, frozen=True):
    """A known EndpointSlice with the zones of its endpoints; ignored unless it has the known version."""

    object: PlacedSlice

    @property
    def resource(self) -> Resource:
        """The resource, as of other events."""
        return "endpointslices"


class Deleted(Struct, frozen=True):
    """An object was deleted. Cluster-scoped objects have the namespace ''."""

    resource: Resource
    namespace: str
    name: str


class Rejected(Struct, frozen=True):
    """An unusable object or entry of one, which is skipped; `field` is a JSON path, '' for the whole object."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    field: str
    reason: str


Event = Replaced | Upserted | ZonedSlice | Deleted | Rejected

Sink = Callable[[Sequence[Event]], None]
"""Takes the events of one read, on the event loop's thread; must return quickly and never raise."""
