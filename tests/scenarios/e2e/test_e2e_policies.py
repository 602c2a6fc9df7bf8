"""Upstream's "Services" on traffic policies, terminating endpoints, health check ports and session affinity.

Two proxies run, one on each node, so that tests can send requests to a node without endpoints.
"""

from __future__ import annotations

import asyncio

import pytest

from support.stage import FOREVER, Stage
from support.upstream import EVERY_MODE, SOURCE_KEPT, modes, upstream

INTERNAL = {"internalTrafficPolicy": "Local"}
EXTERNAL = {"externalTrafficPolicy": "Local"}


# traffic policies


@upstream(
    "Services should respect internalTrafficPolicy=Local Pod to Pod",
    "Services should respect internalTrafficPolicy=Local Pod (hostNetwork: true) to Pod",
)
@modes(*EVERY_MODE)
async def test_internal_traffic_stays_on_the_node(stage: Stage) -> None:
    stage.service(**INTERNAL)
    await stage.pods("echo@a")
    there = {"client-a": "echo", "node": "echo"}
    await stage.expect(stage.front(), there | {"client-b": "timeout", "neighbour": "timeout"})


@upstream("Services should respect internalTrafficPolicy=Local Pod and Node, to Pod (hostNetwork: true)")
async def test_internal_traffic_stays_on_the_node_of_a_pod_in_its_network(stage: Stage) -> None:
    stage.service(ports=[{"name": "http", "port": 80, "targetPort": 10180}], **INTERNAL)
    await stage.pods("echo@a", ports=[10180], hostNetwork=True)
    there = {"client-a": "echo", "node": "echo"}
    await stage.expect(stage.front(), there | {"client-b": "timeout", "neighbour": "timeout"}, "tcp")


@upstream("Services should support externalTrafficPolicy=Local for type=NodePort")
@modes(*SOURCE_KEPT)
async def test_a_local_nodeport_keeps_the_source(stage: Stage) -> None:
    stage.service(type="NodePort", **EXTERNAL)
    await stage.pods("echo@b")
    await stage.expect(stage.front("nodeport", host="neighbour"), {"node": "echo kept", "outside": "echo kept"})
    await stage.expect(stage.front("nodeport"), {"outside": "timeout"})


# terminating endpoints


@upstream("Services should fail health check node port if there are only terminating endpoints")
async def test_a_terminating_pod_serves_while_the_health_check_fails(stage: Stage) -> None:
    service = stage.service(type="LoadBalancer", **EXTERNAL)
    port = service["spec"]["healthCheckNodePort"]
    await stage.pods("echo@a", drain=FOREVER)
    await stage.health("node", port, 200)
    await stage.health("neighbour", port, 503)
    stage.delete_pod("echo")
    await stage.health("node", port, 503)
    await stage.expect(stage.front("nodeport"), {"client-a": "echo", "outside": "echo kept"})


@upstream(
    "Services should fallback to terminating endpoints when there are no ready endpoints with"
    " internalTrafficPolicy=Cluster",
    "Services should fallback to terminating endpoints when there are no ready endpoints with"
    " externallTrafficPolicy=Cluster",
)
@modes(*EVERY_MODE)
async def test_a_terminating_pod_serves_all_clients(stage: Stage) -> None:
    stage.service(type="NodePort")
    await stage.pods("echo@a", drain=FOREVER)
    await stage.reachable("echo")
    stage.delete_pod("echo")
    await stage.reachable("echo")


@upstream(
    "Services should fallback to local terminating endpoints when there are no ready endpoints with"
    " internalTrafficPolicy=Local"
)
async def test_a_terminating_pod_serves_internal_traffic_of_its_node(stage: Stage) -> None:
    stage.service(**INTERNAL)
    await stage.pods("echo@a", drain=FOREVER)
    stage.delete_pod("echo")
    await stage.expect(stage.front(), {"client-a": "echo", "node": "echo", "client-b": "timeout"})


@upstream(
    "Services should fallback to local terminating endpoints when there are no ready endpoints with"
    " externalTrafficPolicy=Local"
)
async def test_a_terminating_pod_serves_external_traffic_to_its_node(stage: Stage) -> None:
    stage.service(type="NodePort", **EXTERNAL)
    await stage.pods("echo@a", drain=FOREVER)
    stage.delete_pod("echo")
    here, elsewhere = stage.front("nodeport"), stage.front("nodeport", host="neighbour")
    await stage.expect(here, {"client-a": "echo", "client-b": "echo", "neighbour": "echo", "outside": "echo kept"})
    # A pod's packets have its own address on the other node too, and are recognised as a pod's there: so the node
    # itself connects.
    await stage.expect(elsewhere, {"node": "timeout", "outside": "timeout", "client-b": "echo"})


@upstream("Services should implement NodePort and HealthCheckNodePort correctly when ExternalTrafficPolicy changes")
async def test_the_external_policy_changes_and_changes_back(stage: Stage) -> None:
    service = stage.service(type="LoadBalancer", **EXTERNAL)
    port = service["spec"]["healthCheckNodePort"]
    await stage.pods("echo@b")
    endpoints_node, other = stage.front("nodeport", host="neighbour"), stage.front("nodeport")
    for policy in ("Local", "Cluster", "Local"):
        if stage.get()["spec"]["externalTrafficPolicy"] != policy:
            # The same port is used again on the way back.
            stage.patch(externalTrafficPolicy=policy, healthCheckNodePort=port if policy == "Local" else None)
        is_local = policy == "Local"
        await stage.health("neighbour", port, 200 if is_local else None)
        await stage.health("node", port, 503 if is_local else None)
        # A node always reaches its own port: for its own packets the policy is always Cluster.
        seen = "kept" if is_local else "masqueraded"
        await stage.expect(endpoints_node, {"node": f"echo {seen}", "outside": f"echo {seen}"}, "tcp")
        await stage.expect(other, {"node": "echo", "outside": "timeout" if is_local else "echo"}, "tcp")


# session affinity


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "cluster",
            marks=upstream(
                "Services should have session affinity work for service with type clusterIP [LinuxOnly] [Conformance]"
            ),
        ),
        pytest.param(
            "nodeport",
            marks=upstream("Services should have session affinity work for NodePort service [LinuxOnly] [Conformance]"),
        ),
    ],
)
@modes(*EVERY_MODE)
async def test_a_client_stays_with_its_pod(stage: Stage, kind: str) -> None:
    stage.service(type="NodePort", sessionAffinity="ClientIP")
    pods = await stage.replicas("web", 3)
    for proto in ("tcp", "udp"):
        await stage.sticks(stage.front(kind, host="neighbour"), pods, proto)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "cluster",
            marks=upstream(
                "Services should be able to switch session affinity for service with type clusterIP [LinuxOnly]"
                " [Conformance]"
            ),
        ),
        pytest.param(
            "nodeport",
            marks=upstream(
                "Services should be able to switch session affinity for NodePort service [LinuxOnly] [Conformance]"
            ),
        ),
    ],
)
@modes(*EVERY_MODE[:4])
async def test_affinity_is_switched_off_and_on(stage: Stage, kind: str) -> None:
    stage.service(type="NodePort", sessionAffinity="ClientIP")
    pods = await stage.replicas("web", 3)
    front = stage.front(kind)
    await stage.sticks(front, pods)
    stage.patch(sessionAffinity="None", sessionAffinityConfig=None)
    await stage.expect(front, {"client-a": pods}, "tcp")
    stage.patch(sessionAffinity="ClientIP")
    await stage.sticks(front, pods)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "cluster",
            marks=upstream(
                "Services should have session affinity timeout work for service with type clusterIP [LinuxOnly]"
            ),
        ),
        pytest.param(
            "nodeport",
            marks=upstream("Services should have session affinity timeout work for NodePort service [LinuxOnly]"),
        ),
    ],
)
@modes(*EVERY_MODE[:4])
async def test_affinity_ends_with_its_timeout(stage: Stage, kind: str) -> None:
    """Four Services wait at the same time, because a client may by chance reach its old pod again."""
    names = ("one", "two", "three", "four")
    for name in names:
        config = {"clientIP": {"timeoutSeconds": 1}}
        stage.service(
            name, selector={"app": "web"}, type="NodePort", sessionAffinity="ClientIP", sessionAffinityConfig=config
        )
    pods = await stage.replicas("web", 3)
    fronts = [stage.front(kind, name) for name in names]
    for front in fronts:
        await stage.sticks(front, pods)

    async def moved() -> str:
        before = [await stage.met(front, 2) for front in fronts]
        await asyncio.sleep(1.3)
        after = [await stage.met(front, 2) for front in fronts]
        return "" if before != after else f"clients stayed with {before}"

    await stage.live.eventually(moved)
