"""Upstream's "LoadBalancers": the balancer outside replaces the cloud's, with two nodes as targets."""

from __future__ import annotations

import pytest

from support.balancer import Balancer
from support.crowd import Crowd
from support.live import PORTS
from support.stage import Stage
from support.traffic import Stream, Traffic
from support.upstream import SOURCE_KEPT, modes, upstream

LOCAL = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
CLIENTS = 20
"""UDP clients; upstream has one."""
DRAIN = 60.0
"""Seconds for which a pod of a rolling update may continue to answer; the test may end it earlier."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            0,
            id="tcp",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should be able to change the type and ports of a TCP"
                " service [Slow]"
            ),
        ),
        pytest.param(
            1,
            id="udp",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should be able to change the type and ports of a UDP"
                " service [Slow]"
            ),
        ),
    ],
)
async def test_type_and_ports_change(stage: Stage, number: int) -> None:
    port = PORTS[number]
    proto = port["protocol"].lower()
    stage.service(ports=[port])
    pods = await stage.replicas("web", 1)
    await stage.reachable(pods, protocols=proto)
    stage.patch(type="NodePort")
    await stage.reachable(pods, protocols=proto)
    nodeport = stage.get()["spec"]["ports"][0]["nodePort"]
    stage.patch(type="LoadBalancer")
    await stage.balanced()
    balanced = stage.front("loadbalancer")
    assert stage.get()["spec"]["ports"][0]["nodePort"] == nodeport
    from_all = {"outside": pods, "client-a": pods, "client-b": pods}
    await stage.expect(balanced, from_all, proto)

    old = stage.front("nodeport")
    changed = stage.get()["spec"]["ports"][0] | {"nodePort": 32123 + number}
    stage.patch(ports=[changed])
    await stage.reachable(pods, protocols=proto)
    await stage.unanswered(old, protocols=proto)
    await stage.expect(balanced, from_all, proto)
    stage.patch(ports=[changed | {"port": 81}])
    await stage.expect(stage.front("loadbalancer"), from_all, proto)
    await stage.unanswered(balanced, protocols=proto)

    balanced = stage.front("loadbalancer")
    await stage.replicas("web", 0)
    await stage.expect(balanced, {"outside": "refused", "client-a": "refused"}, proto)
    pods = await stage.replicas("web", 1)
    await stage.expect(balanced, {"outside": pods, "client-a": pods}, proto)
    nodeport_front = stage.front("nodeport")
    back = stage.patch(type="ClusterIP")
    assert not back["spec"]["ports"][0].get("nodePort")
    await stage.unanswered(balanced, nodeport_front, protocols=proto)
    await stage.reachable(pods, protocols=proto)


@upstream(
    "LoadBalancers [Feature:LoadBalancer] should be able to create LoadBalancer Service without NodePort and"
    " change it [Slow]"
)
async def test_a_load_balancer_without_nodeports_gets_them(stage: Stage) -> None:
    created = stage.service(type="LoadBalancer", allocateLoadBalancerNodePorts=False)
    assert not any(port.get("nodePort") for port in created["spec"]["ports"])
    pods = await stage.replicas("web", 1)
    await stage.balanced()
    await stage.expect(stage.front("loadbalancer"), {"outside": pods, "client-a": pods})
    stage.patch(allocateLoadBalancerNodePorts=True)
    assert stage.get()["spec"]["ports"][0]["nodePort"]
    await stage.reachable(pods)
    await stage.expect(stage.front("loadbalancer"), {"outside": pods, "client-a": pods})


@upstream(
    "LoadBalancers [Feature:LoadBalancer] should only allow access from service loadbalancer source ranges [Slow]"
)
async def test_source_ranges(stage: Stage) -> None:
    stage.service(type="LoadBalancer")
    pods = await stage.replicas("web", 1)
    await stage.balanced()
    front = stage.front("loadbalancer")
    accepted, its_node = (stage.live.ips[place]["IPv4"] for place in ("client-a", "node"))
    everyone = dict.fromkeys(("outside", "client-a", "client-b"), pods)
    nobody = dict.fromkeys(everyone, "timeout")
    steps = [
        ([], everyone),
        ([f"{accepted}/32", f"{its_node}/32"], nobody | {"client-a": pods}),
        (["0.0.0.0/1", "128.0.0.0/1"], everyone),
        (["255.0.0.0/32"], nobody),
        (None, everyone),
    ]
    for ranges, wanted in steps:
        stage.patch(loadBalancerSourceRanges=ranges)
        await stage.expect(front, wanted, "tcp")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(
            "Local",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should have session affinity work for LoadBalancer service"
                " with Local traffic policy [Slow] [LinuxOnly]",
                "LoadBalancers [Feature:LoadBalancer] should be able to switch session affinity for LoadBalancer"
                " service with Local traffic policy [Slow] [LinuxOnly]",
            ),
        ),
        pytest.param(
            "Cluster",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should have session affinity work for LoadBalancer service"
                " with Cluster traffic policy [Slow] [LinuxOnly]",
                "LoadBalancers [Feature:LoadBalancer] should be able to switch session affinity for LoadBalancer"
                " service with Cluster traffic policy [Slow] [LinuxOnly]",
            ),
        ),
    ],
)
async def test_affinity_through_the_balancer_is_kept_and_switched(stage: Stage, policy: str) -> None:
    stage.service(type="LoadBalancer", externalTrafficPolicy=policy, sessionAffinity="ClientIP")
    pods = await stage.replicas("web", 3)
    await stage.balanced()
    front = stage.front("loadbalancer")
    async with Balancer(stage) as balancer:
        await balancer.sends_to("node", "neighbour")
        await stage.sticks(front, pods, place="outside")
        stage.patch(sessionAffinity="None", sessionAffinityConfig=None)
        await stage.expect(front, {"outside": pods}, "tcp")
        stage.patch(sessionAffinity="ClientIP")
        await stage.sticks(front, pods, place="outside")


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(
            "backend-2@b",
            id="different-nodes",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should be able to preserve UDP traffic when server pod"
                " cycles for a LoadBalancer service on different nodes"
            ),
        ),
        pytest.param(
            "backend-2@a",
            id="same-node",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should be able to preserve UDP traffic when server pod"
                " cycles for a LoadBalancer service on the same nodes"
            ),
        ),
    ],
)
async def test_udp_clients_follow_through_the_balancer(stage: Stage, second: str) -> None:
    stage.service(type="LoadBalancer", ports=[PORTS[1]])
    await stage.balanced()
    async with Balancer(stage):
        with Crowd(stage.live, [("outside", stage.front("loadbalancer"))], CLIENTS) as crowd:
            await stage.pods("backend-1@a")
            await crowd.all_notice("backend-1")
            await stage.pods(second)
            stage.delete_pod("backend-1")
            await crowd.all_notice("backend-2")


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(
            "Cluster",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should not have connectivity disruption during rolling"
                " update with externalTrafficPolicy=Cluster [Slow]"
            ),
        ),
        pytest.param(
            "Local",
            marks=upstream(
                "LoadBalancers [Feature:LoadBalancer] should not have connectivity disruption during rolling"
                " update with externalTrafficPolicy=Local [Slow]"
            ),
        ),
    ],
)
async def test_a_rolling_update_disrupts_no_client(stage: Stage, policy: str) -> None:
    """As with a DaemonSet: one pod on each node, replaced one by one, the next when the new one is ready."""
    stage.service(type="LoadBalancer", externalTrafficPolicy=policy)
    await stage.pods("v0-a@a v0-b@b", drain=DRAIN)
    await stage.balanced()
    front = stage.front("loadbalancer")
    async with Balancer(stage) as balancer:
        await balancer.sends_to("node", "neighbour")
        await stage.expect(front, {"outside": "v0-a v0-b"})
        async with Traffic(stage.live, Stream("outside", "tcp", front)) as traffic:
            for version in (1, 2):
                for node, other in (("a", f"v{version - 1}-b"), ("b", f"v{version}-a")):
                    stage.delete_pod(f"v{version - 1}-{node}")
                    await stage.expect(front, {"outside": other})
                    await traffic.flow(2)  # earlier requests are answered then
                    stage.delete_pod(f"v{version - 1}-{node}", grace=0)
                    await stage.gone(f"v{version - 1}-{node}")
                    await stage.pods(f"v{version}-{node}@{node}", drain=DRAIN)
                    await balancer.sends_to("node", "neighbour")
            await traffic.flow(2)  # earlier requests are answered then
            traffic.clear()
            await traffic.flow()
        assert traffic.failures == []
        assert set.union(*traffic.pods.values()) == {"v2-a", "v2-b"}


# externalTrafficPolicy: Local


@upstream("LoadBalancers ExternalTrafficPolicy: Local [Feature:LoadBalancer] [Slow] should work for type=LoadBalancer")
async def test_a_local_load_balancer_keeps_the_source(stage: Stage) -> None:
    port = stage.service(**LOCAL)["spec"]["healthCheckNodePort"]
    assert port
    await stage.pods("echo@b")
    await stage.balanced()
    async with Balancer(stage) as balancer:
        await balancer.sends_to("neighbour")
        await stage.expect(stage.front("loadbalancer"), {"outside": "echo kept"})
    stage.patch(type="ClusterIP")
    for host in ("node", "neighbour"):
        await stage.health(host, port, None)


@upstream(
    "LoadBalancers ExternalTrafficPolicy: Local [Feature:LoadBalancer] [Slow] should only target nodes with endpoints"
)
async def test_only_nodes_with_endpoints_are_sent_to(stage: Stage) -> None:
    port = stage.service(**LOCAL)["spec"]["healthCheckNodePort"]
    await stage.balanced()
    await stage.pods("first@a")
    async with Balancer(stage) as balancer:
        for pod, host, other in (("first", "node", "neighbour"), ("second", "neighbour", "node")):
            if pod == "second":
                await stage.pods("second@b")
                stage.delete_pod("first")
            await balancer.sends_to(host)
            await stage.expect(stage.front("loadbalancer"), {"outside": pod})
            await stage.health(host, port, 200)
            await stage.health(other, port, 503)


@upstream(
    "LoadBalancers ExternalTrafficPolicy: Local [Feature:LoadBalancer] [Slow] should target all nodes with endpoints"
)
async def test_all_nodes_with_endpoints_are_sent_to(stage: Stage) -> None:
    stage.service(**LOCAL)
    pods = await stage.replicas("web", 2)
    await stage.balanced()
    async with Balancer(stage) as balancer:
        await balancer.sends_to("node", "neighbour")
        await stage.expect(stage.front("loadbalancer"), {"outside": f"{pods} kept"})


@upstream("LoadBalancers ExternalTrafficPolicy: Local [Feature:LoadBalancer] [Slow] should work from pods")
@modes(*SOURCE_KEPT)
async def test_pods_reach_a_local_load_balancer_with_their_address(stage: Stage) -> None:
    stage.service(**LOCAL)
    await stage.pods("echo@a")
    await stage.balanced()
    await stage.expect(stage.front("loadbalancer"), {"client-a": "echo kept", "client-b": "echo kept"})
