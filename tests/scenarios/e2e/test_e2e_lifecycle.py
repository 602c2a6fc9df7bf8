"""Upstream's scenarios of restarting proxies and API servers, alternating pods, later address ranges, SCTP."""

from __future__ import annotations

from lab.proxyprocess import METRICS_PORT
from support.live import Front
from support.stage import Stage, everybody
from support.traffic import Stream, Traffic
from support.upstream import modes, upstream


@upstream("Services should work after restarting kube-proxy [Disruptive]")
async def test_all_proxies_restart(stage: Stage) -> None:
    pods = {}
    for name in ("restart-proxy-1", "restart-proxy-2"):
        stage.service(name)
        pods[name] = await stage.replicas(name, 3)
        await stage.reachable(pods[name], name, "tcp")
    await stage.live.stop_proxies()
    await stage.live.start_proxies()
    for name, there in pods.items():
        await stage.reachable(there, name, "tcp")


@upstream("Services should work after restarting apiserver [Disruptive]")
async def test_the_api_server_restarts(stage: Stage) -> None:
    before = stage.service("restart-apiserver-1")
    one = await stage.replicas("restart-apiserver-1", 3)
    await stage.reachable(one, "restart-apiserver-1", "tcp")
    await stage.cluster.server.refuse()
    await stage.reachable(one, "restart-apiserver-1", "tcp")
    await stage.cluster.server.listen()
    await stage.reachable(one, "restart-apiserver-1", "tcp")
    after = stage.service("restart-apiserver-2")
    two = await stage.replicas("restart-apiserver-2", 3)
    assert before["spec"]["clusterIP"] != after["spec"]["clusterIP"]
    await stage.reachable(one, "restart-apiserver-1", "tcp")
    await stage.reachable(two, "restart-apiserver-2", "tcp")


@upstream(
    "Connectivity Pod Lifecycle should be able to have zero downtime on a Blue Green deployment using Services and"
    " Readiness Gates"
)
async def test_blue_gives_way_to_green(stage: Stage) -> None:
    gate = "k8s.io/blue-green"
    stage.service()
    for word in ("blue-pod@a", "green-pod@b"):
        stage.create_pod(word, readinessGates=[{"conditionType": gate}])
    front = stage.front()

    def switch(pod: str, status: str) -> None:
        stated = stage.cluster.get("pods", pod, stage.namespace)["status"]["conditions"]
        others = [condition for condition in stated if condition["type"] != gate]
        conditions = [*others, {"type": gate, "status": status}]
        stage.cluster.patch("pods", pod, {"status": {"conditions": conditions}}, stage.namespace, "status")

    for pod in ("blue-pod", "green-pod"):
        await stage.live.until(lambda pod=pod: stage.has_condition(pod, "ContainersReady", "True"), f"{pod} runs")
        assert stage.has_condition(pod, "Ready", "False")
    switch("blue-pod", "True")
    await stage.expect(front, everybody("blue-pod"))
    async with Traffic(stage.live, Stream("client-a", "tcp", front), Stream("client-b", "tcp", front)) as traffic:
        switch("green-pod", "True")
        await stage.live.until(lambda: stage.has_condition("green-pod", "Ready", "True"), "green is ready")
        switch("blue-pod", "False")
        await stage.expect(front, everybody("green-pod"))
        await traffic.flow(2)  # earlier requests are answered then
        traffic.clear()
        await traffic.flow()
    assert traffic.failures == []
    assert {str(stream): pods for stream, pods in traffic.pods.items() if pods != {"green-pod"}} == {}


@upstream("[Feature:ServiceCIDRs] should create Services and serve on different Service CIDRs")
async def test_a_second_service_cidr_is_served(stage: Stage) -> None:
    body = {"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1", "metadata": {"name": stage.namespace}}
    stage.cluster.create(body | {"spec": {"cidrs": ["10.196.196.0/24"]}})
    try:
        stage.service(type="NodePort", clusterIP="10.196.196.77")
        await stage.reachable(await stage.replicas("web", 2))
    finally:
        stage.cluster.delete("servicecidrs", stage.namespace)


@upstream(
    "KubeProxyNFAcct [Feature:KubeProxyNFAcct] should update metric for tracking accepted packets destined for"
    " localhost nodeports"
)
@modes("iptables-nft", "iptables-legacy")
async def test_packets_to_localhost_nodeports_are_counted(stage: Stage) -> None:
    stage.service(type="NodePort")
    await stage.pods("agnhost@b")
    counted = await accepted(stage)
    front = Front("127.0.0.1", stage.front("nodeport").port)
    await stage.expect(front, {"node": "agnhost"}, "tcp")

    async def more() -> str:
        now = await accepted(stage)
        return "" if now > counted else f"{now} packets, as before"

    await stage.live.eventually(more)


async def accepted(stage: Stage) -> float:
    """Return the value of a counter of node-a's proxy."""
    _, text = await stage.live.page("/metrics", METRICS_PORT)
    name = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"
    values = [line.split()[-1] for line in text.splitlines() if line.startswith(name)]
    return float(values[0]) if values else -1.0
