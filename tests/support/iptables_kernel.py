"""iptables backends on the real kernel: Services to write, and a comparison with the result of a full sync."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.iptables.skeleton import StartOptions
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import ServicePlan
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.fake_tables import BUILT_IN, Normalised, Told, normalised
from support.fake_tables import backend as fake_backend
from support.fake_tables import parsed as saved
from support.iptables_plans import SHARED_CHAINS
from support.namespaces import run
from support.random_plans import Plans

OPTIONS = StartOptions(localhost_nodeports=True, liberal=False, counters=False)
_BARE = world()
WORLD = structs.replace(_BARE, ipv4=structs.replace(_BARE.parts[Family.IPV4], nodeport_ips=None))


def opened(variant: xtables.Variant, family: Family = Family.IPV4, told: Told | None = None) -> IptablesBackend:
    return IptablesBackend.open(xtables.variant_commands(family, variant), WORLD, OPTIONS, told or Told())


def plans(name: str, number: int, *addresses: str, **spec: Any) -> tuple[ServicePlan, ...]:
    """Return the IPv4 plans of a Service with endpoints, half of them on this node."""
    found = [endpoint(a, HERE if i % 2 else "node-b") for i, a in enumerate(addresses)]
    ports = [ServicePort(port=80, node_port=30000 + number)]
    subject = service(name, f"10.96.0.{number}", ports=ports, **spec)
    compiled = compile_service(subject, [parsed(*found, family="IPv4")], WORLD)
    return tuple(plan for plan in compiled.plans if plan.key.family is Family.IPV4)


def state() -> Plans:
    return {
        ("default", "a"): plans("a", 1, "10.244.0.1", "10.244.0.2", "10.244.0.3", external_traffic_policy="Local"),
        ("default", "b"): plans("b", 2, "10.244.0.4", session_affinity="ClientIP", ingress=["203.0.113.9"],
                                load_balancer_source_ranges=["198.51.100.0/24"]),
        ("default", "c"): plans("c", 3),
    }  # fmt: skip


def rules(variant: str) -> Normalised:
    lines = run(f"iptables-{variant}-save").splitlines()
    return normalised(saved(lines), Family.IPV4, SHARED_CHAINS)


def expected(wanted: Plans) -> Normalised:
    made = fake_backend(WORLD, Family.IPV4, options=OPTIONS)
    list(made.resync(wanted))
    return normalised(made.tables.chains, Family.IPV4, SHARED_CHAINS)


def check(variant: str, wanted: Plans) -> None:
    """Compare the kernel with the result of a full sync on fake tables, except for empty built-in chains."""
    seen, should = rules(variant), expected(wanted)
    built_in = {(table, chain) for table, chains in BUILT_IN.items() for chain in chains}
    assert {p: r for p, r in seen.items() if r or p not in built_in} == {
        p: r for p, r in should.items() if r or p not in built_in
    }
