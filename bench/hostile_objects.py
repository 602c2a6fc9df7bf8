"""A Service that is large in some way, with its EndpointSlices, as watch lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from bench import objects
from kubeproxy.model.objects import Resource

Line = tuple[Resource, bytes]


class Wide(NamedTuple):
    """Service number `number`, with these numbers of ports, endpoints and external IPs."""

    number: int
    ports: int = 1
    endpoints: int = 10
    addresses: int = 0
    affinity: bool = False
    annotations: Mapping[str, str] = {}

    @property
    def name(self) -> tuple[str, str]:
        """Return namespace and name."""
        return objects.names(self.number)

    def added(self) -> list[Line]:
        """Return the lines that add the Service and all of its slices."""
        return [("services", self._service("ADDED")), *self._slices("ADDED")]

    def removed(self) -> list[Line]:
        """Return the lines that delete the Service and all of its slices."""
        return [("services", self._service("DELETED")), *self._slices("DELETED")]

    def slice_line(self, version: int, endpoints: int, *, ready: bool = True) -> Line:
        """Return the line that makes the last slice end with this number of endpoints, the last one ready or not."""
        return self._slice("MODIFIED", (endpoints - 1) // objects.SLICE, version, endpoints, ready=ready)

    def _service(self, change: str) -> bytes:
        address = objects.cluster_ip(self.number)
        spec = {
            "ports": [{"name": f"p{n}", "protocol": "TCP", "port": 1 + n, "targetPort": 8080} for n in self._ports()],
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": ["IPv4"],
            "type": "ClusterIP",
            "externalIPs": [f"198.51.100.{1 + n}" for n in range(self.addresses)],
            "sessionAffinity": "ClientIP" if self.affinity else "None",
        }
        return _line(change, "Service", "v1", self._metadata("", annotations=self.annotations), spec=spec)

    def _slices(self, change: str) -> Iterator[Line]:
        for part in range(-(-self.endpoints // objects.SLICE)):
            yield self._slice(change, part, 1, self.endpoints)

    def _slice(self, change: str, part: int, version: int, endpoints: int, *, ready: bool = True) -> Line:
        first = part * objects.SLICE
        addresses = objects.endpoints_of(self.number, self.endpoints)[first : min(first + objects.SLICE, endpoints)]
        found = [{"addresses": [address], "conditions": {"ready": True}} for address in addresses]
        if not ready:
            found[-1]["conditions"] = {"ready": False}
        labels = {"kubernetes.io/service-name": self.name[1]}
        metadata = self._metadata(f"-{part}", labels=labels, resourceVersion=str(version))
        ports = [{"name": f"p{n}", "protocol": "TCP", "port": 8080 + n} for n in self._ports()]
        more = {"addressType": "IPv4", "endpoints": found, "ports": ports}
        return "endpointslices", _line(change, "EndpointSlice", "discovery.k8s.io/v1", metadata, **more)

    def _ports(self) -> range:
        return range(self.ports)

    def _metadata(self, suffix: str, **more: Any) -> dict[str, Any]:
        namespace, name = self.name
        known = {"name": name + suffix, "namespace": namespace, "uid": name + suffix, "resourceVersion": "1"}
        return known | {"creationTimestamp": "2026-01-01T00:00:00Z"} | more


def _line(change: str, kind: str, version: str, metadata: dict[str, Any], **more: Any) -> bytes:
    body = msgspec.json.encode({"metadata": metadata, **more}).decode()
    return objects.watch_line(change, body, kind, version)
