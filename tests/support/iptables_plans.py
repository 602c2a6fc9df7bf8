"""Services as plans of one family, and an iptables backend on fake tables that contains them."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kubeproxy.backends.iptables.skeleton import SHARED
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import ServicePlan
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.fake_tables import FakedBackend, backend
from support.random_plans import Plans

V4 = Family.IPV4
SHARED_CHAINS = frozenset(chain for _, chain in SHARED)
_BARE = world(families=[V4])
WORLD = structs.replace(_BARE, ipv4=structs.replace(_BARE.parts[Family.IPV4], nodeport_ips=None))


def plans(name: str, number: int, *addresses: str, **spec: Any) -> tuple[ServicePlan, ...]:
    ports = spec.pop("ports", [ServicePort(port=80)])
    subject = service(name, f"10.96.0.{number}", ports=ports, **spec)
    return compile_service(subject, [parsed(*(endpoint(a, HERE) for a in addresses), family="IPv4")], WORLD).plans


def a(name: str) -> tuple[str, str]:
    return "default", name


def opened(state: Plans, **more: Any) -> FakedBackend:
    made = backend(WORLD, V4, **more)
    list(made.resync(state))
    made.tables.inputs.clear()
    return made
