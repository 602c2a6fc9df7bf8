"""What should be: the plans of the objects that the API server has now, by a planner that has no history.

Decodes the server's own bytes as the proxy does. What cannot be decoded at all is nothing; generated junk has names
that nothing good ever had, so no earlier state of it can count either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kubeproxy.api.decode import decode_object
from kubeproxy.ask.facts import ProgrammedService
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
    """Return a planner that has met nothing but the final state of each object."""
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
    """Return the plans of each Service that has any."""
    return {name: compiled.plans for name, compiled in planner.compiled.items() if compiled.plans}


def unknown(store: Store, held: Mapping[ServiceName, ProgrammedService]) -> list[str]:
    """Return which newest versions of objects the proxy does not have, and which it has that are gone."""
    wanted: dict[ServiceName, str] = {}
    for record in watched(store, "services"):
        if isinstance(decode_object("services", record.raw)[0], Service):
            wanted[record.key] = str(record.revision)
    has = {name: one.version for name, one in held.items() if one.version is not None}
    wrong = [
        f"Service {'/'.join(name)}: version {wanted.get(name)} expected, has {has.get(name)}"
        for name in wanted.keys() | has.keys()
        if wanted.get(name) != has.get(name)
    ]
    pieces = {(one.name[0], piece): v for one in held.values() for piece, v in one.slices.items() if one.version}
    for record in watched(store, "endpointslices"):
        piece, _ = decode_object("endpointslices", record.raw)
        owner = record.labels.get("kubernetes.io/service-name")
        if not isinstance(piece, EndpointSlice) or piece.address_type not in {"IPv4", "IPv6"}:
            pieces.pop(record.key, None)
        elif (record.key[0], owner) in has and pieces.get(record.key) != str(record.revision):
            wrong.append(f"slice {record.key}: version {record.revision} expected, has {pieces.get(record.key)}")
        pieces.pop(record.key, None)
    wrong += [f"slice {key}: gone, but the proxy has version {version}" for key, version in pieces.items()]
    return sorted(wrong)
