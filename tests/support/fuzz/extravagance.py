"""Measures the cost of large Services on a node: for users who may only write Services and EndpointSlices.

`python -m support.fuzz.extravagance` prints the costs. Each case consists of the objects of one Service; the costs are
those of nftables mode on every node.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kubeproxy.api.decode import decode_object
from kubeproxy.backends.nftables.render import render
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.objects import Resource
from kubeproxy.model.planner import Planner
from support.cluster_objects import world
from support.nftables_plans import placed

Json = dict[str, Any]
_META: Final = {"name": "a", "namespace": "default"}
_WORLD: Final = world(families=[Family.IPV4])


class Cost(NamedTuple):
    """Bytes of JSON, elements of the kernel's sets, CPU seconds, and the peak of Python's memory in bytes."""

    size: int
    elements: int
    seconds: float
    peak: int


def _service(annotations: Json | None = None, ingress: int = 0, **spec: Any) -> Json:
    return {
        "metadata": _META | {"annotations": annotations or {}},
        "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}], **spec},
        "status": {"loadBalancer": {"ingress": [{"ip": f"198.51.{n >> 8}.{n & 255}"} for n in range(ingress)]}},
    }


def _slice(endpoints: int, ports: int = 1, number: int = 0) -> Json:
    first = number * endpoints
    return {
        "metadata": _META | {"name": f"s{number}", "labels": {"kubernetes.io/service-name": "a"}},
        "addressType": "IPv4",
        "ports": _ports(ports, "port"),
        "endpoints": [
            {"addresses": [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"], "nodeName": f"n{n}"}
            for n in range(first, first + endpoints)
        ],
    }


def _ports(count: int, field: str) -> list[Json]:
    return [{"name": f"p{n}" if count > 1 else "", field: n + 1 if count > 1 else 80} for n in range(count)]


def _ranges(count: int) -> Json:
    ranges = [f"10.{n >> 8}.{n & 255}.0/25" for n in range(count)]
    return {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges}


CASES: Final[dict[str, Callable[[], list[Json]]]] = {
    "an ordinary one: 1 port, 10 endpoints": lambda: [_service(), _slice(10)],
    "annotations of 256 KiB": lambda: [
        _service({"x": "x" * (200 << 10), "kube-proxy-py/weights": "n=1," * 14000}), _slice(1)],
    "10,000 source ranges": lambda: [_service(ingress=1, **_ranges(10000)), _slice(1)],
    "1,000 slices of 100 endpoints": lambda: [_service(), *(_slice(100, number=n) for n in range(1000))],
    "1,000 endpoints with weights": lambda: [
        _service({"kube-proxy-py/weights": ",".join(f"n{n}={1 + n % 99}" for n in range(1000))}), _slice(1000)],
    "3 ports, 21 addresses, Maglev with 4,093 slots": lambda: [
        _service({"kube-proxy-py/algorithm": "maglev-4093"}, 20, type="LoadBalancer", ports=_ports(3, "port")),
        _slice(1, 3)],
    "30 ports, 21 addresses, 100 endpoints with weights": lambda: [
        _service({"kube-proxy-py/weights": "n0=1"}, 20, type="LoadBalancer", ports=_ports(30, "port")),
        _slice(100, 30)],
    "1,000 ports, 10 endpoints": lambda: [_service(ports=_ports(1000, "port")), _slice(10, 1000)],
    "100 addresses, 1,000 source ranges": lambda: [_service(ingress=100, **_ranges(1000)), _slice(1)],
    "100 ports, 20 addresses, 1,000 source ranges": lambda: [
        _service(ingress=20, **_ranges(1000), ports=_ports(100, "port")), _slice(1, 100)],
    "300 ports, 300 endpoints": lambda: [_service(ports=_ports(300, "port")), _slice(300, 300)],
    "1,000 ports, 1,000 endpoints": lambda: [_service(ports=_ports(1000, "port")), _slice(1000, 1000)],
}  # fmt: skip
"""Cases by the part that they have in large numbers."""


def cost(made: list[Json]) -> Cost:
    """Return the costs of a Service and its slices."""
    packed = [json.dumps(one, separators=(",", ":")).encode() for one in made]
    start = time.process_time()
    elements = _read(packed)
    seconds = time.process_time() - start
    tracemalloc.start()
    try:
        _read(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Cost(sum(map(len, packed)), elements, seconds, peak)


def _read(packed: list[bytes]) -> int:
    planner = Planner(_WORLD)
    planner.apply([Replaced("services", ()), Replaced("endpointslices", ())])
    resource: Resource = "services"
    for data in packed:
        found, rejected = decode_object(resource, data)
        assert found is not None
        planner.apply([Upserted(resource, found), *rejected])
        resource = "endpointslices"
    plans = [plan for change in planner.take() for plan in change.after.plans]
    return sum(len(elements) for elements in render(placed(plans)).values())


def main() -> None:
    """Print a table."""
    print("| one Service with | JSON | elements | CPU | memory, times the JSON |\n|---|---:|---:|---:|---:|")
    for name, make in CASES.items():
        found = cost(make())
        times = f"{found.peak / 1e6:,.1f} MB, {found.peak / found.size:,.0f}"
        print(f"| {name} | {found.size / 1e3:,.0f} kB | {found.elements:,} | {found.seconds * 1e3:,.0f} ms | {times} |")


if __name__ == "__main__":
    main()
