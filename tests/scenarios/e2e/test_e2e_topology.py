"""Upstream's "Traffic Distribution" and "Topology Hints".

Upstream has three zones of two nodes; here two nodes are moved between zones, and a hand-written slice simulates a
third zone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.stage import Stage
from support.upstream import EVERY_MODE, modes, upstream

ZONE = "topology.kubernetes.io/zone"
PORT = {"name": "http", "port": 80, "targetPort": 3000}
SLICE_PORT = {"name": "http", "port": 3000, "protocol": "TCP"}


@pytest.fixture
def zones(stage: Stage) -> Iterator[Stage]:
    """A stage that moves the nodes back to their zones at the end."""
    yield stage
    move(stage, "node-b", "zone-b")


def move(stage: Stage, node: str, zone: str) -> None:
    """Move a node to a zone."""
    stage.cluster.patch("nodes", node, {"metadata": {"labels": {ZONE: zone}}})


def in_zone(zone: str) -> dict[str, object]:
    """Return the hints of an endpoint for a zone."""
    return {"forZones": [{"name": zone}]}


@pytest.mark.parametrize(
    "distribution",
    [
        pytest.param(
            "PreferClose",
            marks=upstream(
                "Traffic Distribution should route traffic to an endpoint in the same zone when using PreferClose"
            ),
        ),
        pytest.param(
            "PreferSameZone",
            marks=upstream(
                "Traffic Distribution should route traffic to an endpoint in the same zone when using PreferSameZone"
            ),
        ),
    ],
)
async def test_traffic_stays_in_its_zone(stage: Stage, distribution: str) -> None:
    stage.service(ports=[PORT], trafficDistribution=distribution)
    await stage.pods("server-0@a server-1@b")
    await stage.expect(stage.front(), {"client-a": "server-0", "client-b": "server-1"}, "tcp")
    stage.patch(selector=None)
    await stage.live.until(lambda: not stage.endpoints(), "no slices")
    hints = {"server-0": in_zone("zone-a"), "server-1": in_zone("zone-c")}
    stage.slice_of("server-0 server-1", [SLICE_PORT], hints=hints)
    await stage.expect(stage.front(), {"client-a": "server-0", "client-b": "server-0 server-1"}, "tcp")


@pytest.mark.parametrize(
    "distribution",
    [
        pytest.param(
            "PreferClose",
            marks=upstream(
                "Traffic Distribution should route traffic correctly between pods on multiple nodes when using"
                " PreferClose"
            ),
        ),
        pytest.param(
            "PreferSameZone",
            marks=upstream(
                "Traffic Distribution should route traffic correctly between pods on multiple nodes when using"
                " PreferSameZone"
            ),
        ),
    ],
)
async def test_nodes_of_one_zone_share_its_endpoints(zones: Stage, distribution: str) -> None:
    move(zones, "node-b", "zone-a")
    zones.service(ports=[PORT], trafficDistribution=distribution)
    await zones.pods("server-0@a server-1@b")
    everyone = {"client-a": "server-0 server-1", "client-b": "server-0 server-1"}
    await zones.expect(zones.front(), everyone, "tcp")
    zones.delete_pod("server-0")
    await zones.expect(zones.front(), {"client-a": "server-1", "client-b": "server-1"}, "tcp")
    move(zones, "node-b", "zone-b")
    await zones.pods("server-2@a")
    await zones.expect(zones.front(), {"client-a": "server-2", "client-b": "server-1"}, "tcp")


@upstream(
    "Traffic Distribution should route traffic to an endpoint on the same node or fall back to same zone when using"
    " PreferSameNode"
)
async def test_traffic_stays_on_its_node_else_in_its_zone(zones: Stage) -> None:
    move(zones, "node-b", "zone-a")
    zones.service(ports=[PORT], trafficDistribution="PreferSameNode")
    await zones.pods("server-0@a server-1@b")
    await zones.expect(zones.front(), {"client-a": "server-0", "client-b": "server-1"}, "tcp")
    zones.patch(selector=None)
    await zones.live.until(lambda: not zones.endpoints(), "no slices")
    far = in_zone("zone-b") | {"forNodes": [{"name": "node-c"}]}
    near = in_zone("zone-a") | {"forNodes": [{"name": "node-a"}]}
    zones.slice_of("server-0 server-1", [SLICE_PORT], hints={"server-0": near, "server-1": far})
    await zones.expect(zones.front(), {"client-a": "server-0", "client-b": "server-0"}, "tcp")
    move(zones, "node-b", "zone-c")
    await zones.expect(zones.front(), {"client-a": "server-0", "client-b": "server-0 server-1"}, "tcp")


@upstream(
    "Traffic Distribution should route traffic to an endpoint on the same node when using PreferSameNode and fall back"
    " when the endpoint becomes unavailable"
)
@modes(*EVERY_MODE)
async def test_traffic_leaves_its_node_while_that_has_no_endpoint(stage: Stage) -> None:
    stage.service(ports=[PORT], trafficDistribution="PreferSameNode")
    await stage.pods("server-0@a server-1@b")
    await stage.expect(stage.front(), {"client-a": "server-0", "client-b": "server-1"}, "tcp")
    stage.delete_pod("server-0")
    await stage.expect(stage.front(), {"client-a": "server-1", "client-b": "server-1"}, "tcp")
    await stage.pods("server-new@a")
    await stage.expect(stage.front(), {"client-a": "server-new", "client-b": "server-1"}, "tcp")


@upstream("Topology Hints should distribute endpoints evenly")
async def test_hints_keep_traffic_in_its_zone(stage: Stage) -> None:
    """The controller determines the hints: it gives these to one pod on each of two equal nodes."""
    stage.service(selector=None, ports=[PORT])
    await stage.pods("topology-a@a topology-b@b")
    hints = {"topology-a": in_zone("zone-a"), "topology-b": in_zone("zone-b")}
    stage.slice_of("topology-a topology-b", [SLICE_PORT], hints=hints)
    there = {"client-a": "topology-a", "node": "topology-a", "client-b": "topology-b", "neighbour": "topology-b"}
    await stage.expect(stage.front(), there, "tcp")
