"""Computes the EndpointSlices of a Service from its pods, and the fewest writes that produce them. Pure.

Source: the EndpointSlice controller of Kubernetes 1.36 (k8s.io/endpointslice), KEP-752, KEP-1672, KEP-2433, KEP-3015.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lab.controllers.scheduling import condition

Json = dict[str, Any]
MAX_ENDPOINTS = 100
MANAGED_BY = "endpointslice-controller.k8s.io"
SERVICE_NAME = "kubernetes.io/service-name"
MANAGED_BY_LABEL = "endpointslice.kubernetes.io/managed-by"
HEADLESS_LABEL = "service.kubernetes.io/headless"
TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"

PortKey = tuple[tuple[str, str, int | None, str], ...]
"""The ports of a slice, each (name, protocol, number, appProtocol)."""


def lasting_containers(pod: Json) -> list[Json]:
    """Return the containers of a pod that keep running: its containers, and init containers that are restarted
    (sidecars)."""
    sidecars = [c for c in pod["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"]
    return [*(pod["spec"].get("containers") or ()), *sidecars]


def target_port(service_port: Json, pod: Json) -> int | None:
    """The number of a pod's port that a Service's port leads to; None if the pod has no port with that name."""
    target = service_port.get("targetPort", service_port["port"])
    if isinstance(target, int):
        return target
    for container in lasting_containers(pod):
        for port in container.get("ports") or ():
            if port.get("name") == target and port.get("protocol", "TCP") == service_port["protocol"]:
                return int(port["containerPort"])
    return None


def port_key(service: Json, pod: Json) -> PortKey:
    """The slice ports of a Service as they are for one pod."""
    ports: list[tuple[str, str, int | None, str]] = []
    for port in service["spec"].get("ports") or ():
        number = target_port(port, pod)
        if number is not None:
            ports.append((port.get("name", ""), port["protocol"], number, port.get("appProtocol", "")))
    return tuple(sorted(ports, key=lambda p: (p[0], p[1], p[2] or 0)))


def hints_of(service: Json, endpoint: Json) -> Json | None:
    """Topology hints from spec.trafficDistribution (KEP-2433, KEP-3015)."""
    distribution = service["spec"].get("trafficDistribution")
    hints: Json = {}
    if not endpoint["conditions"]["ready"] or not distribution:
        return None
    if endpoint.get("zone"):
        hints["forZones"] = [{"name": endpoint["zone"]}]
    if distribution == "PreferSameNode" and endpoint.get("nodeName"):
        hints["forNodes"] = [{"name": endpoint["nodeName"]}]
    return hints or None


def endpoint_of(service: Json, pod: Json, address: str, zone: str) -> Json:
    """Return the endpoint of a pod."""
    metadata = pod["metadata"]
    terminating = bool(metadata.get("deletionTimestamp"))
    serving = condition(pod, "Ready") == "True"
    ready = bool(service["spec"].get("publishNotReadyAddresses")) or (serving and not terminating)
    endpoint: Json = {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "targetRef": {
            "kind": "Pod",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "nodeName": pod["spec"].get("nodeName"),
    }
    if zone:
        endpoint["zone"] = zone
    if hints := hints_of(service, endpoint):
        endpoint["hints"] = hints
    return endpoint


def pod_addresses(pod: Json, family: str) -> list[str]:
    """Return the addresses of a pod in a family, IPv4 or IPv6."""
    ips = [p["ip"] for p in (pod.get("status") or {}).get("podIPs") or ()]
    return [ip for ip in ips if (":" in ip) == (family == "IPv6")]


Wanted = dict[tuple[str, PortKey], dict[str, Json]]
"""Desired endpoints by (address type, ports), then by address."""


def wanted_endpoints(service: Json, pods: list[Json], zones: dict[str, str]) -> Wanted:
    """Return all desired endpoints of a Service. `zones` are the nodes' zones by name."""
    wanted: Wanted = {}
    for family in service["spec"].get("ipFamilies") or ():
        for pod in pods:
            if (pod.get("status") or {}).get("phase") in {"Failed", "Succeeded"}:
                continue
            for address in pod_addresses(pod, family):
                zone = zones.get(pod["spec"].get("nodeName", ""), "")
                group = wanted.setdefault((family, port_key(service, pod)), {})
                group[address] = endpoint_of(service, pod, address, zone)
        if not any(f == family for f, _ in wanted):
            wanted[family, port_key(service, {"spec": {}})] = {}
    return wanted


@dataclass(slots=True)
class Writes:
    """The writes: new slices (without names), changed slices, and slices to delete."""

    create: list[Json] = field(default_factory=list)
    update: list[Json] = field(default_factory=list)
    delete: list[Json] = field(default_factory=list)


def labels_of(service: Json) -> dict[str, str]:
    """The labels of a Service's slices: the Service's own and the controller's."""
    labels = dict(service["metadata"].get("labels") or {})
    labels |= {SERVICE_NAME: service["metadata"]["name"], MANAGED_BY_LABEL: MANAGED_BY}
    if service["spec"].get("clusterIP") == "None":
        labels[HEADLESS_LABEL] = ""
    return labels


def _ports_json(key: PortKey) -> list[Json]:
    ports: list[Json] = []
    for name, protocol, number, app_protocol in key:
        port: Json = {"name": name, "protocol": protocol, "port": number}
        if app_protocol:
            port["appProtocol"] = app_protocol
        ports.append(port)
    return ports


def _group_of(slice_: Json) -> tuple[str, PortKey]:
    ports = [
        (p.get("name", ""), p.get("protocol", "TCP"), p.get("port"), p.get("appProtocol", ""))
        for p in slice_.get("ports") or ()
    ]
    return slice_["addressType"], tuple(sorted(ports, key=lambda p: (p[0], p[1], p[2] or 0)))


def _new_slice(service: Json, group: tuple[str, PortKey], endpoints: list[Json]) -> Json:
    metadata = service["metadata"]
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "metadata": {
            "generateName": f"{metadata['name']}-",
            "namespace": metadata["namespace"],
            "labels": labels_of(service),
            "ownerReferences": [owner],
        },
        "addressType": group[0],
        "endpoints": endpoints,
        "ports": _ports_json(group[1]),
    }


def plan_writes(service: Json, existing: list[Json], wanted: Wanted) -> Writes:
    """Return the writes that turn `existing` slices into slices of the `wanted` endpoints: an endpoint stays in its
    slice."""
    writes = Writes()
    groups: dict[tuple[str, PortKey], list[Json]] = {}
    for slice_ in existing:
        group = _group_of(slice_)
        if group in wanted:
            groups.setdefault(group, []).append(slice_)
        else:
            writes.delete.append(slice_)
    for group, endpoints in wanted.items():
        _plan_group(service, group, groups.get(group, []), dict(endpoints), writes)
    return writes


def _plan_group(
    service: Json, group: tuple[str, PortKey], slices: list[Json], missing: dict[str, Json], writes: Writes
) -> None:
    kept: list[tuple[Json, list[Json]]] = []
    for slice_ in slices:
        addresses = [e["addresses"][0] for e in slice_.get("endpoints") or ()]
        kept.append((slice_, [missing.pop(a) for a in addresses if a in missing]))
    for _, endpoints in kept:
        while missing and len(endpoints) < MAX_ENDPOINTS:
            endpoints.append(missing.pop(next(iter(missing))))
    has_any = any(endpoints for _, endpoints in kept) or bool(missing)
    for i, (slice_, endpoints) in enumerate(kept):
        # A Service without endpoints keeps one empty slice, which contains its family and ports.
        if not endpoints and (has_any or i > 0):
            writes.delete.append(slice_)
        elif endpoints != (slice_.get("endpoints") or []) or labels_of(service) != slice_["metadata"].get("labels"):
            metadata = slice_["metadata"] | {"labels": labels_of(service)}
            writes.update.append(slice_ | {"metadata": metadata, "endpoints": endpoints})
    rest = list(missing.values())
    new = [rest[i : i + MAX_ENDPOINTS] for i in range(0, len(rest), MAX_ENDPOINTS)]
    if not kept and not new:
        new = [[]]
    writes.create.extend(_new_slice(service, group, endpoints) for endpoints in new)
