"""Events from a source of objects: complete lists, changed objects, deleted objects, unusable objects. An event
contains the new state of objects, never an action. The order of events of different objects does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from sys import intern
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.model.endpoints import PackedSlice, packed
from kubeproxy.model.objects import (
    EndpointSlice,
    Labels,
    LoadBalancerStatus,
    Object,
    Resource,
    Service,
    ServicePort,
    ServiceStatus,
)


class Replaced(Struct, frozen=True):
    """A list of all existing objects of a resource; known objects that are missing from the list are deleted."""

    resource: Resource
    objects: Sequence[Object | PackedSlice]  # EndpointSlices may be packed
    kept: frozenset[tuple[str, str]] | None = frozenset()  # unreadable objects, which remain; None: all objects remain


class Upserted(Struct, frozen=True):
    """An object was added or changed."""

    resource: Resource
    object: Object


class Deleted(Struct, frozen=True):
    """An object was deleted. The namespace of a cluster-scoped object is ''."""

    resource: Resource
    namespace: str
    name: str


class Rejected(Struct, frozen=True):
    """An object, or an entry in an object, that cannot be used. `field` is a JSON path; '' means the whole object."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    field: str
    reason: str


Event = Replaced | Upserted | Deleted | Rejected

Sink = Callable[[Sequence[Event]], object]
"""A function that receives the events of one read. It runs on the event loop's thread, returns quickly and never
raises."""


_NO_LABELS: Final = Labels()
_NO_STATUS: Final = ServiceStatus(LoadBalancerStatus())


def kept(found: Object) -> Object | PackedSlice:
    """Return an object of a long list in a form that needs less memory: a packed slice, or an equal Service that shares
    equal parts with other Services. In the decoded form 10,000 Services need twice the memory, and their slices need
    ten times the memory; Python would not return most of this memory to the system."""
    if isinstance(found, EndpointSlice):
        return packed(found)
    return _sharing(found) if isinstance(found, Service) else found


def _sharing(service: Service) -> Service:
    meta, spec, status = service.metadata, service.spec, service.status
    address, addresses = spec.cluster_ip, spec.cluster_ips
    return Service(
        replace(meta, namespace=_word(meta.namespace), labels=_NO_LABELS if meta.labels == _NO_LABELS else meta.labels),
        replace(
            spec,
            type=_word(spec.type),
            cluster_ips=[address] if address is not None and addresses == [address] else addresses,
            ports=_ports(tuple(spec.ports)) if spec.ports else spec.ports,
            session_affinity=_word(spec.session_affinity),
            internal_traffic_policy=_word(spec.internal_traffic_policy),
            external_traffic_policy=_word(spec.external_traffic_policy),
        ),
        _NO_STATUS if status == _NO_STATUS else status,
    )


def _word(text: str | None) -> str | None:
    return intern(text) if text else text


@lru_cache(maxsize=1024)
def _ports(entries: tuple[ServicePort, ...]) -> list[ServicePort]:
    """Return a list of ports that all Services with equal ports share."""
    return list(entries)
