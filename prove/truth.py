"""The expected state: the plans that a new planner computes from the API server's present objects.

Decodes the server's bytes as the proxy does. An object that cannot be decoded counts as missing. Junk has names that no
valid object ever had, so it has no earlier valid state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kubeproxy.api.decode import decode_object
from kubeproxy.ask.facts import Objects
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.objects import EndpointSlice, Object, Resource, Service
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan
from kubeproxy.model.planner import Planner
from lab.apiserver.store import Record, Store

PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"

Plans = dict[ServiceName, tuple[ServicePlan, ...]]


def watched(store: Store, resource: Resource) -> Iterator[Record]:
    """Yield the objects of a resource that the proxy's watches select."""
    without = PROXY_NAME if resource == "services" else HEADLESS
    for record in store.records(resource):
        if without not in record.labels and record.fields.get("spec.clusterIP") != "None":
            yield record


def planned(store: Store, world: Globals) -> Planner:
    """Return a planner that has received only the final state of each object."""
    planner = Planner(world)
    for resource in ("services", "endpointslices"):
        planner.apply([Replaced(resource, list(_decoded(store, resource)))])
    planner.apply([Upserted("nodes", node) for node in _decoded(store, "nodes")])
    planner.take()
    return planner


def _decoded(store: Store, resource: Resource) -> Iterator[Object]:
    for record in watched(store, resource):
        found, _ = decode_object(resource, record.raw)
        if found is not None:
            yield found


def plans(planner: Planner) -> Plans:
    """Return the plans of each Service with plans."""
    return {name: compiled.plans for name, compiled in planner.compiled.items() if compiled.plans}


def unknown(store: Store, known: Iterable[Objects]) -> list[str]:
    """Return the objects of which the proxy lacks the newest version, and its objects that no longer exist. A slice
    must be known also if its Service does not exist, because the Service may come later.
    """
    wanted: dict[ServiceName, str] = {}
    for record in watched(store, "services"):
        if isinstance(decode_object("services", record.raw)[0], Service):
            wanted[record.key] = str(record.revision)
    has: dict[ServiceName, str | None] = {}
    pieces: dict[tuple[str, str], str | None] = {}
    for one in known:
        if one.service is not None:
            has[one.name] = one.service.metadata.resource_version
        pieces |= {(one.name[0], piece): held.version for piece, held in one.slices.items()}
    wrong = [
        f"Service {'/'.join(name)}: version {wanted.get(name)} expected, has {has.get(name)}"
        for name in wanted.keys() | has.keys()
        if wanted.get(name) != has.get(name)
    ]
    for record in watched(store, "endpointslices"):
        piece, _ = decode_object("endpointslices", record.raw)
        owner = record.labels.get("kubernetes.io/service-name")
        version = pieces.pop(record.key, None)
        readable = isinstance(piece, EndpointSlice) and piece.address_type in {"IPv4", "IPv6"}
        if readable and owner and version != str(record.revision):
            wrong.append(f"slice {record.key}: version {record.revision} expected, has {version}")
    wrong += [f"slice {key}: gone, but the proxy has version {version}" for key, version in pieces.items()]
    return sorted(wrong)
