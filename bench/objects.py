"""The Services and EndpointSlices of the measurements, as the API server writes them: JSON with all fields.

Service number n has the cluster IP 10.96.0.0 + n + 10, one TCP or UDP port 80 and one slice with its endpoints; a
dual-stack Service has the same for IPv6. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

NODE = "bench-node"
NODE_IP = "10.9.0.1"
CLUSTER_CIDR = "10.128.0.0/9"
CLUSTER_CIDR_6 = "fd00::a:80:0:0/89"
SERVICE_CIDR = "10.96.0.0/12"
PAGE = 500
"""Objects on a page of a list, as clients request."""

SLICE = 100
"""Maximum number of endpoints in a slice, as with the endpoint slice controller."""

_FIRST_SERVICE = 0x0A600000 + 10
_FIRST_ENDPOINT = 0x0A800000 + 10
_SPARE_ENDPOINT = 0x0AF00000
_BOTH = " dual-stack"


class Size(NamedTuple):
    """The number of Services, the number of endpoints of each, and the number of families."""

    services: int
    endpoints: int
    families: int = 1

    def __str__(self) -> str:
        count = f"{self.services // 1000}k" if self.services >= 1000 and not self.services % 1000 else self.services
        return f"{count}x{self.endpoints}{_BOTH if self.families == 2 else ''}"


def parse_size(text: str) -> Size:
    """Parse a size such as '10kx10' or '10kx10 dual-stack'. Raises ValueError."""
    services, _, endpoints = text.removesuffix(_BOTH).partition("x")
    factor = 1000 if services.endswith("k") else 1
    return Size(int(services.removesuffix("k")) * factor, int(endpoints), 2 if text.endswith(_BOTH) else 1)


def dotted(number: int) -> str:
    """Return an IPv4 address as text."""
    return ".".join(str(byte) for byte in number.to_bytes(4, "big"))


def cluster_ip(number: int) -> str:
    """Return the cluster IP of a Service."""
    return dotted(_FIRST_SERVICE + number)


def endpoints_of(number: int, count: int) -> list[str]:
    """Return the addresses of a Service's endpoints."""
    first = _FIRST_ENDPOINT + number * count
    return [dotted(first + i) for i in range(count)]


def of_ipv6(address: str) -> str:
    """Return the IPv6 address that belongs to an IPv4 address."""
    return f"fd00::{':'.join(f'{int(byte):x}' for byte in address.split('.'))}"


def spare(number: int) -> str:
    """Return an address that is initially no Service's endpoint."""
    return dotted(_SPARE_ENDPOINT + number)


def names(number: int) -> tuple[str, str]:
    """Return namespace and name of a Service."""
    return f"team-{number % 100:02}", f"service-{number:06}"


def _uid(kind: int, number: int) -> str:
    return f"{kind:08x}-0000-4000-8000-{number:012x}"


def service(number: int, version: int = 1, protocol: str = "TCP", families: int = 1) -> str:
    """Return the JSON of a Service."""
    namespace, name = names(number)
    address = cluster_ip(number)
    addresses, kinds, policy = f'"{address}"', '"IPv4"', "SingleStack"
    if families == 2:
        addresses, kinds, policy = f'{addresses},"{of_ipv6(address)}"', f'{kinds},"IPv6"', "RequireDualStack"
    return (
        f'{{"metadata":{{"name":"{name}","namespace":"{namespace}","uid":"{_uid(1, number)}",'
        f'"resourceVersion":"{version}","creationTimestamp":"2026-01-01T{number % 24:02}:{number % 60:02}:00Z",'
        f'"labels":{{"app":"{name}","tier":"backend"}},"managedFields":[{{"manager":"kubectl-create",'
        '"operation":"Update","apiVersion":"v1","time":"2026-01-01T00:00:00Z","fieldsType":"FieldsV1","fieldsV1":'
        '{"f:metadata":{"f:labels":{".":{},"f:app":{},"f:tier":{}}},"f:spec":{"f:internalTrafficPolicy":{},'
        '"f:ports":{".":{},"k:{\\"port\\":80,\\"protocol\\":\\"TCP\\"}":{".":{},"f:name":{},"f:port":{},'
        '"f:protocol":{},"f:targetPort":{}}},"f:selector":{},"f:sessionAffinity":{},"f:type":{}}}}]},'
        f'"spec":{{"ports":[{{"name":"web","protocol":"{protocol}","port":80,"targetPort":8080}}],'
        f'"selector":{{"app":"{name}"}},"clusterIP":"{address}","clusterIPs":[{addresses}],"type":"ClusterIP",'
        f'"sessionAffinity":"None","ipFamilies":[{kinds}],"ipFamilyPolicy":"{policy}",'
        '"internalTrafficPolicy":"Cluster"},"status":{"loadBalancer":{}}}'
    )


def endpoint_slice(
    number: int,
    addresses: list[str],
    version: int = 1,
    *,
    part: int = 0,
    trigger: str = "",
    protocol: str = "TCP",
    port: int = 8080,
) -> str:
    """Return the JSON of one of a Service's EndpointSlices. `trigger` is its last-change-trigger-time."""
    namespace, name = names(number)
    kind, mark = ("IPv6", "v6") if addresses and ":" in addresses[0] else ("IPv4", "")
    annotations = (
        f'"annotations":{{"endpoints.kubernetes.io/last-change-trigger-time":"{trigger}"}},' if trigger else ""
    )
    endpoints = ",".join(
        f'{{"addresses":["{address}"],"conditions":{{"ready":true,"serving":true,"terminating":false}},'
        f'"nodeName":"node-{i % 50}","targetRef":{{"kind":"Pod","name":"{name}-{i:05}","namespace":"{namespace}",'
        f'"uid":"{_uid(3, number)}"}},"zone":"zone-{i % 3}"}}'
        for i, address in enumerate(addresses)
    )
    return (
        f'{{"metadata":{{"name":"{name}-{part}{mark}","generateName":"{name}-","namespace":"{namespace}",'
        f'"uid":"{_uid(2 + 16 * part, number)}","resourceVersion":"{version}","generation":{version},'
        f'"creationTimestamp":"2026-01-01T00:00:00Z",{annotations}"labels":{{"app":"{name}",'
        '"endpointslice.kubernetes.io/managed-by":"endpointslice-controller.k8s.io",'
        f'"kubernetes.io/service-name":"{name}"}},"ownerReferences":[{{"apiVersion":"v1","kind":"Service",'
        f'"name":"{name}","uid":"{_uid(1, number)}","controller":true,"blockOwnerDeletion":true}}],"managedFields":'
        '[{"manager":"kube-controller-manager","operation":"Update","apiVersion":"discovery.k8s.io/v1",'
        '"time":"2026-01-01T00:00:00Z","fieldsType":"FieldsV1","fieldsV1":{"f:addressType":{},"f:endpoints":{},'
        '"f:metadata":{"f:labels":{".":{},"f:endpointslice.kubernetes.io/managed-by":{}},"f:ownerReferences":'
        '{}},"f:ports":{}}}]},"addressType":'
        f'"{kind}",'
        f'"endpoints":[{endpoints}],"ports":[{{"name":"web","protocol":"{protocol}","port":{port}}}]}}'
    )


def _pages(kind: str, version: str, count: int, item: Callable[[int], str]) -> Iterator[bytes]:
    for start in range(0, count, PAGE):
        items = ",".join(item(number) for number in range(start, min(start + PAGE, count)))
        more = f',"continue":"{start + PAGE}"' if start + PAGE < count else ""
        head = f'{{"kind":"{kind}List","apiVersion":"{version}","metadata":{{"resourceVersion":"1"{more}}},"items":['
        yield f"{head}{items}]}}".encode()


def service_pages(size: Size) -> Iterator[bytes]:
    """Yield the list of Services, page by page."""

    def item(number: int) -> str:
        return service(number, families=size.families)

    return _pages("Service", "v1", size.services, item)


def slice_pages(size: Size) -> Iterator[bytes]:
    """Yield the list of EndpointSlices, page by page."""

    def item(number: int) -> str:
        addresses = endpoints_of(number, size.endpoints)
        parts = range(0, max(1, len(addresses)), SLICE)
        found = [endpoint_slice(number, addresses[start : start + SLICE], part=start // SLICE) for start in parts]
        if size.families == 2:
            addresses = [of_ipv6(address) for address in addresses]
            found += [endpoint_slice(number, addresses[start : start + SLICE], part=start // SLICE) for start in parts]
        return ",".join(found)

    return _pages("EndpointSlice", "discovery.k8s.io/v1", size.services, item)


def watch_line(change: str, body: str, kind: str, version: str) -> bytes:
    """Return one line of a watch: change is ADDED, MODIFIED or DELETED."""
    return f'{{"type":"{change}","object":{{"kind":"{kind}","apiVersion":"{version}",{body[1:]}}}\n'.encode()


def service_line(change: str, number: int, version: int) -> bytes:
    """Return a watch line about a Service."""
    return watch_line(change, service(number, version), "Service", "v1")


def slice_line(change: str, number: int, addresses: list[str], version: int, trigger: str = "") -> bytes:
    """Return a watch line about a Service's EndpointSlice."""
    body = endpoint_slice(number, addresses, version, trigger=trigger)
    return watch_line(change, body, "EndpointSlice", "discovery.k8s.io/v1")
