"""Plans for tests of nftables mode: each Service has a word and a number, which determines its addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kubeproxy.backends.nftables.render import Numbers, Placed, place_all
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service

V4, V6 = Family.IPV4, Family.IPV6
WORLD = world(families=[V4])

EVERYTHING = {
    "ports": [ServicePort(port=80, node_port=30080), ServicePort(port=53, name="dns", protocol="UDP")],
    "external_ips": ["203.0.113.1"],
    "ingress": ["198.51.100.1"],
    "load_balancer_source_ranges": ["172.16.0.0/24", "192.0.2.0/24"],
    "external_traffic_policy": "Local",
    "session_affinity": "ClientIP",
}


def placed(plans: Iterable[ServicePlan], numbers: Numbers | None = None) -> list[Placed]:
    """Plans as placed in an empty table, or in a table with the `numbers` of other plans."""
    numbers = numbers or Numbers()
    services: dict[tuple[str, str, Family], list[ServicePlan]] = {}
    for plan in plans:
        services.setdefault((plan.key.namespace, plan.key.name, plan.key.family), []).append(plan)
    return [item for its in services.values() for item in place_all(its, (), numbers)]


def plans_of(
    name: str,
    number: int,
    endpoints: int = 3,
    globals_: Globals = WORLD,
    ports: Sequence[ServicePort] | None = None,
    local: str = HERE,
    **spec: Any,
) -> tuple[ServicePlan, ...]:
    """Return a Service with a cluster IP and endpoints of its number."""
    (family,) = globals_.families
    cluster, pod = ("10.96.{}.{}", "10.244.{}.{}") if family is V4 else ("fd00:96::{:x}{:02x}", "fd00:244::{:x}{:02x}")
    ports = ports or [ServicePort(port=80)]
    members = [endpoint(pod.format(number >> 8, n), local) for n in range(1, endpoints + 1)]
    slice_ports = [EndpointPort(port=8000 + p.port, name=p.name, protocol=p.protocol) for p in ports]
    subject = service(name, cluster.format(number >> 8, number & 255), ports=ports, **spec)
    return compile_service(subject, [parsed(*members, family=family.label, ports=slice_ports)], globals_).plans


def cluster(*names: str, **more: Any) -> dict[ServiceName, tuple[ServicePlan, ...]]:
    """Return Services of these names, numbered from 1."""
    return {("default", name): plans_of(name, number, **more) for number, name in enumerate(names, 1)}


def sticky(name: str, number: int, endpoints: int, seconds: int = 30, **more: Any) -> tuple[ServicePlan, ...]:
    """Return a Service with session affinity."""
    config = SessionAffinityConfig(ClientIPConfig(seconds))
    return plans_of(name, number, endpoints, session_affinity="ClientIP", session_affinity_config=config, **more)
