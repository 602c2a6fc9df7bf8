"""The endpoints of the relay of NodePorts on loopback for a Service with unequal weights."""

from __future__ import annotations

from collections import Counter

import pytest

from kubeproxy.backends.nftables.localhost import relay_targets
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import LONGEST_AFFINITY
from support.cluster_objects import HERE, THERE, dests, endpoint, endpoint_slice, service
from unit.model.test_planner import WEB, planner

ONE, TWO, THREE = dests("10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:8080")
MEMBERS = [endpoint(f"10.244.0.{n}", HERE if n == 1 else THERE) for n in (1, 2, 3)]


def target(**more):
    """Return the number of slots of each endpoint in the pool of NodePort 30080, and the affinity."""
    asked = Annotations(**{name: more.pop(name) for name in ("weights", "algorithm") if name in more})
    ports = [ServicePort(port=80, node_port=30080), ServicePort(port=80, name="udp", protocol="UDP", node_port=30080)]
    made = planner(
        service(ports=ports, type="NodePort", annotations=asked, **more),
        endpoint_slice(*MEMBERS, ports=[EndpointPort(8080), EndpointPort(8080, "udp", "UDP")]),
    )
    ((port, found),) = relay_targets(made.compiled[WEB].plans)
    assert port == 30080
    return Counter(found.pool), found.affinity


@pytest.mark.parametrize(
    ("asked", "pool", "affinity"),
    [
        ({}, {ONE: 1, TWO: 1, THREE: 1}, 0),
        ({"weights": f"{HERE}=50"}, {ONE: 1, TWO: 2, THREE: 2}, 0),
        ({"weights": f"{HERE}=0"}, {TWO: 1, THREE: 1}, 0),
        ({"algorithm": "maglev", "weights": f"{HERE}=50"}, {ONE: 1, TWO: 2, THREE: 2}, 0),
        ({"session_affinity": "ClientIP"}, {ONE: 1, TWO: 1, THREE: 1}, 10800),
        ({"algorithm": "maglev", "session_affinity": "ClientIP"}, {ONE: 1, TWO: 1, THREE: 1}, LONGEST_AFFINITY),
    ],
)
def test_weights_apply_and_kept_endpoints_are_remembered(asked, pool, affinity):
    assert target(**asked) == (pool, affinity)
