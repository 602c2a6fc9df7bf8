"""What a source tells the state: complete lists, changed objects, deleted objects, objects that cannot be read.

An event says what to look at again, never what to do. The order of events of different objects does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.objects import Object, PlacedSlice, Resource


class Replaced(Struct, frozen=True):
    """All objects of a resource as of now (a first list, or a new one): whatever is not in it is gone.

    EndpointSlices may be packed already. `kept` names objects (namespace, name) that exist but could not be decoded:
    their last good state stays. None says that this is not known of any, and that all stay.
    """

    resource: Resource
    objects: Sequence[Object | PackedSlice]
    kept: frozenset[tuple[str, str]] | None = frozenset()


class Upserted(Struct, frozen=True):
    """An object was added or changed."""

    resource: Resource
    object: Object


class ZonedSlice(Struct, frozen=True):
    """An EndpointSlice that is known, once more and with the zones of its endpoints.

    It counts only while its version is the one that is known: of any other the watch says all there is.
    """

    object: PlacedSlice

    @property
    def resource(self) -> Resource:
        """Return the resource, as of other events."""
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
