"""Events from a source of objects: complete lists, changed objects, deleted objects, objects that cannot be read.

An event names the objects to compile again, never an action. The order of events of different objects does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.objects import Object, PlacedSlice, Resource


class Replaced(Struct, frozen=True):
    """All objects of a resource as of now (a first list, or a new one): all others are deleted.

    EndpointSlices may be packed already. `kept` names objects (namespace, name) that exist but could not be decoded:
    their last good state stays. None: the names are unknown, and all objects stay.
    """

    resource: Resource
    objects: Sequence[Object | PackedSlice]
    kept: frozenset[tuple[str, str]] | None = frozenset()


class Upserted(Struct, frozen=True):
    """An object was added or changed."""

    resource: Resource
    object: Object


class ZonedSlice(Struct, frozen=True):
    """A known EndpointSlice again, with the zones of its endpoints.

    It is ignored unless it has the known version: the watch delivers all others.
    """

    object: PlacedSlice

    @property
    def resource(self) -> Resource:
        """Return the resource, as other events do."""
        return "endpointslices"


class Deleted(Struct, frozen=True):
    """An object is gone. Cluster-scoped objects have the namespace ''."""

    resource: Resource
    namespace: str
    name: str


class Rejected(Struct, frozen=True):
    """An object, or one entry of it, that cannot be used: it is skipped, and this is reported to the user.

    `field` is a JSON path such as 'spec.ports[1].port' ('' when the whole object is meant).
    """

    resource: Resource
    namespace: str
    name: str
    uid: str
    field: str
    reason: str


Event = Replaced | Upserted | ZonedSlice | Deleted | Rejected

Sink = Callable[[Sequence[Event]], None]
"""Takes the events of one read together, on the event loop's thread; must return quickly and never raise."""
