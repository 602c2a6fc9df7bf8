"""Attacks on other Services by a user who may only write Services, with objects that the API server accepts.

See docs/security.md.
"""

from __future__ import annotations

import pytest

from kubeproxy.model.addresses import Family, unpack
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.objects import EndpointPort, ServicePort
from kubeproxy.model.planner import Planner
from support.cluster_objects import endpoint, endpoint_slice, key, service, world

VICTIM, EVIL = ("default", "victim"), ("evil", "evil")
PORTS = [ServicePort(port=443, node_port=30443)]
EARLY, LATE = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"


def planner(created: str = LATE, **evil) -> Planner:
    """Return a planner with a victim's Service, and an attacker's Service on another cluster IP that comes after it."""
    made = Planner(world(families=list(Family)))
    victim = service("victim", "10.96.0.10", ports=PORTS, external_ips=["203.0.113.9"], ingress=["198.51.100.9"],
                     created=EARLY)  # fmt: skip
    made.apply([Replaced("services", [victim]), Replaced("endpointslices", ())])
    made.take()
    subject = service("evil", "10.96.0.66", "fd00:10:96::66", namespace="evil", created=created,
                      **{"ports": [ServicePort(port=443)]} | evil)  # fmt: skip
    made.apply([Upserted("services", subject)])
    made.take()
    return made


@pytest.mark.parametrize("kind", ["external_ips", "ingress"])
@pytest.mark.parametrize("address", ["10.96.0.10", "203.0.113.9", "198.51.100.9"])
def test_an_address_of_another_service_is_not_to_be_had(kind: str, address: str) -> None:
    made = planner(**{kind: [address]})
    assert made.owner(Family.IPV4, key(f"{address}:443")) == VICTIM
    assert any(address in problem.reason for problem in made.compiled[EVIL].problems)


def test_a_cluster_ip_and_a_nodeport_are_kept_before_older_ones_too() -> None:
    made = planner(created="2020-01-01T00:00:00Z", external_ips=["10.96.0.10"], ports=[ServicePort(30443)])
    assert made.owner(Family.IPV4, key("10.96.0.10:443")) == VICTIM
    assert made.owner(Family.IPV4, key(":30443")) == VICTIM


@pytest.mark.parametrize("kind", ["external_ips", "ingress"])
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "::1", "169.254.169.254", "fe80::1", "224.0.0.1", "239.1.1.1", "ff02::1",
     "255.255.255.255", "0.0.0.0", "::", "::ffff:127.0.0.1"],
)  # fmt: skip
def test_addresses_that_are_nobodys_are_refused(kind: str, address: str) -> None:
    made = planner(**{kind: [address, "203.0.113.77"]})
    plans = made.compiled[EVIL].plans
    known = {"10.96.0.66:443", "[fd00:10:96::66]:443", "203.0.113.77:443"}
    assert {frontend.key for plan in plans for frontend in plan.frontends} == {key(text) for text in known}
    assert any(repr(address) in problem.reason for problem in made.compiled[EVIL].problems)


@pytest.mark.parametrize("address", ["192.0.2.1", "8.8.8.8", "10.244.0.5"])
def test_addresses_of_nodes_pods_and_the_world_are_served_as_written(address: str) -> None:
    """As in the Go kube-proxy (CVE-2020-8554): admission or the feature gate must stop users without the right."""
    made = planner(external_ips=[address])
    assert made.owner(Family.IPV4, key(f"{address}:443")) == EVIL


def test_endpoints_are_those_of_the_services_own_namespace() -> None:
    made = planner()
    ports = [EndpointPort(port=443)]
    foreign = endpoint_slice(endpoint("203.0.113.99"), name="x", of="victim", namespace="evil", ports=ports)
    own = endpoint_slice(endpoint("10.96.0.66"), of="victim", ports=ports)
    made.apply([Upserted("endpointslices", foreign)])
    assert pools(made) == set()
    made.apply([Upserted("endpointslices", own)])  # another Service's address, served as written
    assert pools(made) == {"10.96.0.66"}


def pools(made: Planner) -> set[str]:
    """Return the possible endpoints of connections to the victim."""
    made.take()
    return {unpack(destination[:-2]) for plan in made.compiled[VICTIM].plans for destination in plan.cluster}
