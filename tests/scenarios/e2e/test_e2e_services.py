"""Upstream's "Services": endpoints and their ports, changing pods, changes of type, labels, rejection.

Upstream's client is a pod; here a pod and the node itself are clients, on both nodes.
"""

from __future__ import annotations

import pytest

from support.live import PORTS
from support.stage import FOREVER, Stage, everybody
from support.upstream import EVERY_MODE, SOURCE_KEPT, modes, upstream

TCP, UDP = PORTS


def named_port(name: str, number: int) -> dict[str, object]:
    """A container port for TCP."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


# endpoints and ports


@upstream("Services should serve a basic endpoint from pods [Conformance]")
@modes(*EVERY_MODE)
async def test_pods_of_a_service_come_and_go(stage: Stage) -> None:
    stage.service()
    await stage.expect(stage.front(), {"client-a": "refused"})
    await stage.pods("pod1@a")
    await stage.reachable("pod1")
    await stage.pods("pod2@b")
    await stage.reachable("pod1 pod2")
    stage.delete_pod("pod1")
    await stage.reachable("pod2")
    stage.delete_pod("pod2")
    await stage.live.until(lambda: not stage.endpoints(), "a slice without endpoints")
    await stage.expect(stage.front(), {"client-a": "refused", "node": "refused"})


@upstream("Services should serve multiport endpoints from pods [Conformance]")
async def test_each_port_has_endpoints_of_its_own(stage: Stage) -> None:
    ports = [{"name": f"portname{n}", "port": 79 + n, "targetPort": f"svc{n}"} for n in (1, 2)]
    stage.service(ports=ports)
    await stage.pods("pod1@a", ports=[named_port("svc1", 100)])
    await stage.expect(stage.front(port=0), everybody("pod1"), "tcp")
    await stage.expect(stage.front(port=1), {"client-a": "refused"}, "tcp")
    await stage.pods("pod2@b", ports=[named_port("svc2", 101)])
    await stage.expect(stage.front(port=0), everybody("pod1"), "tcp")
    await stage.expect(stage.front(port=1), everybody("pod2"), "tcp")
    stage.delete_pod("pod1")
    await stage.expect(stage.front(port=0), {"client-a": "refused"}, "tcp")
    await stage.expect(stage.front(port=1), everybody("pod2"), "tcp")


@upstream("Services should serve endpoints on same port and different protocols [Conformance]")
async def test_protocols_of_one_port_number_go_one_by_one(stage: Stage) -> None:
    stage.service()
    await stage.pods("pod1@b")
    await stage.reachable("pod1")
    front = stage.front()
    stage.patch(ports=[TCP])
    await stage.expect(front, everybody("pod1"), "tcp")
    await stage.unanswered(front, protocols="udp")
    stage.patch(ports=[UDP])
    await stage.expect(front, everybody("pod1"), "udp")
    await stage.unanswered(front, protocols="tcp")


@upstream(
    "Services should serve endpoints on same port and different protocol for internal traffic on Type LoadBalancer"
)
async def test_protocols_of_one_port_number_of_a_load_balancer(stage: Stage) -> None:
    ports = [{**port, "targetPort": f"svc-{port['name']}"} for port in PORTS]
    stage.service(type="LoadBalancer", ports=ports)
    listed = [{"name": f"svc-{p['name']}", "containerPort": 100, "protocol": p["protocol"]} for p in PORTS]
    await stage.pods("pod1@a", ports=listed)
    await stage.reachable("pod1")


@upstream("Services should be updated after adding or deleting ports")
async def test_a_port_is_added_and_deleted(stage: Stage) -> None:
    first, second = ({"name": f"portname{n}", "port": 79 + n, "targetPort": f"svc{n}"} for n in (1, 2))
    stage.service(ports=[first])
    await stage.pods("pod1@a", ports=[named_port("svc1", 100)])
    await stage.expect(stage.front(), everybody("pod1"), "tcp")
    stage.patch(ports=[first, second])
    added = stage.front(port=1)
    await stage.pods("pod2@b", ports=[named_port("svc2", 101)])
    await stage.expect(added, everybody("pod2"), "tcp")
    stage.patch(ports=[first])
    await stage.unanswered(added, protocols="tcp")
    await stage.expect(stage.front(), everybody("pod1"), "tcp")


@upstream("Services should support named targetPorts that resolve to different ports on different endpoints")
async def test_a_named_port_moves_pod_by_pod(stage: Stage) -> None:
    stage.service(ports=[{"name": "web", "port": 8001, "targetPort": "mutable-port"}])
    old, new = [named_port("mutable-port", 8080)], [named_port("mutable-port", 8000)]
    await stage.pods("pod0@a pod1@b", ports=old)
    await stage.reachable("pod0 pod1", protocols="tcp")
    for gone, pods, word in (("pod0", "pod1 pod2", "pod2@a"), ("pod1", "pod2 pod3", "pod3@b")):
        stage.delete_pod(gone)
        await stage.pods(word, ports=new)
        await stage.reachable(pods, protocols="tcp")


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            8080, marks=upstream("Services should connect to the ports exposed by restartable init containers")
        ),
        pytest.param(
            "http-sidecar",
            marks=upstream("Services should connect to the named ports exposed by restartable init containers"),
        ),
    ],
)
async def test_ports_of_sidecars(stage: Stage, target: int | str) -> None:
    sidecar = {"name": "sidecar", "restartPolicy": "Always", "ports": [named_port("http-sidecar", 8080)]}
    await stage.pods("pod@b", ports=(), initContainers=[sidecar])
    stage.service(ports=[{"name": "http-sidecar", "port": 8080, "targetPort": target}])
    await stage.reachable("pod", protocols="tcp")


@upstream("Services should create endpoints for unready pods")
async def test_unready_and_terminating_pods_of_a_service_that_publishes_them(stage: Stage) -> None:
    stage.service(publishNotReadyAddresses=True)
    stage.create_pod("slow@b", drain=FOREVER)
    stage.probe_succeeds("slow", succeeds=False)
    await stage.reachable("slow")
    stage.delete_pod("slow")
    stage.patch(publishNotReadyAddresses=False)
    await stage.expect(stage.front(), everybody("refused"), "tcp")
    stage.patch(publishNotReadyAddresses=True)
    await stage.reachable("slow")


@pytest.mark.parametrize(
    ("published", "answer"),
    [
        pytest.param(
            True,
            "webserver",
            marks=upstream(
                "Services should be able to connect to terminating and unready endpoints"
                " if PublishNotReadyAddresses is true"
            ),
        ),
        pytest.param(
            False,
            "refused",
            marks=upstream(
                "Services should not be able to connect to terminating and unready endpoints"
                " if PublishNotReadyAddresses is false"
            ),
        ),
    ],
)
async def test_a_pod_that_ends_and_is_not_ready_any_more(stage: Stage, published: bool, answer: str) -> None:
    stage.service(type="NodePort", publishNotReadyAddresses=published)
    await stage.pods("webserver@a", drain=FOREVER)
    await stage.reachable("webserver")
    stage.delete_pod("webserver")
    stage.probe_succeeds("webserver", succeeds=False)
    await stage.live.until(lambda: not stage.endpoints()[0]["conditions"]["serving"], "an endpoint that serves not")
    for front in (stage.front(), stage.front("nodeport"), stage.front("nodeport", host="neighbour")):
        await stage.expect(front, {"client-b": answer}, "tcp")


# behaviour


@upstream("Services should preserve source pod IP for traffic thru service cluster IP [LinuxOnly]")
@modes(*SOURCE_KEPT)
async def test_pods_keep_their_address(stage: Stage) -> None:
    stage.service()
    await stage.pods("echo-sourceip@b")
    await stage.expect(stage.front(), {"client-a": "echo-sourceip kept", "client-b": "echo-sourceip kept"})


@upstream("Services should allow pods to hairpin back to themselves through services")
@modes(*EVERY_MODE)
async def test_a_pod_reaches_itself(stage: Stage) -> None:
    stage.service()
    await stage.pods("hairpin@a")
    await stage.expect(stage.front(), {"hairpin": "hairpin"})


@upstream("Services should be able to up and down services")
async def test_services_come_and_go_beside_each_other(stage: Stage) -> None:
    first, second = stage.service("up-down-1"), stage.service("up-down-2")
    one, two = await stage.replicas("up-down-1", 3), await stage.replicas("up-down-2", 3)
    gone = stage.front(name="up-down-1")
    await stage.reachable(one, "up-down-1", "tcp")
    await stage.reachable(two, "up-down-2", "tcp")
    stage.cluster.delete("replicationcontrollers", "up-down-1", stage.namespace)
    stage.delete_service("up-down-1")
    await stage.unanswered(gone, protocols="tcp")
    await stage.reachable(two, "up-down-2", "tcp")
    third = stage.service("up-down-3")
    three = await stage.replicas("up-down-3", 3)
    assert len({service["spec"]["clusterIP"] for service in (first, second, third)}) == 3
    await stage.reachable(two, "up-down-2", "tcp")
    await stage.reachable(three, "up-down-3", "tcp")


@upstream("Services should work after the service has been recreated")
async def test_a_service_is_recreated_for_the_same_pods(stage: Stage) -> None:
    stage.service()
    pods = await stage.replicas("web", 1)
    await stage.reachable(pods)
    stage.delete_service()
    stage.service()
    await stage.reachable(pods)


# types


@upstream("Services should be able to create a functioning NodePort service [Conformance]")
@modes(*EVERY_MODE)
async def test_a_nodeport_works_on_every_node(stage: Stage) -> None:
    stage.service(type="NodePort")
    await stage.reachable(await stage.replicas("web", 2))


@upstream(
    "Services should be possible to connect to a service via ExternalIP when the external IP is not assigned to a node"
)
async def test_an_external_ip_that_no_node_has(stage: Stage) -> None:
    stage.service(externalIPs=["198.51.100.250"])
    pods = await stage.replicas("web", 2)
    await stage.reachable(pods)
    await stage.expect(stage.front("external"), everybody(pods))


@upstream(
    "Services should be able to update service type to NodePort listening on same port number but different protocols"
)
async def test_a_cluster_ip_becomes_a_nodeport_of_two_protocols(stage: Stage) -> None:
    stage.service(ports=[TCP])
    stage.patch(type="NodePort")
    pods = await stage.replicas("web", 2)
    await stage.reachable(pods, protocols="tcp")
    updated = stage.patch(ports=PORTS)
    assert [bool(port["nodePort"]) for port in updated["spec"]["ports"]] == [True, True]
    await stage.reachable(pods)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "ClusterIP",
            marks=upstream("Services should be able to change the type from ExternalName to ClusterIP [Conformance]"),
        ),
        pytest.param(
            "NodePort",
            marks=upstream("Services should be able to change the type from ExternalName to NodePort [Conformance]"),
        ),
    ],
)
async def test_an_external_name_becomes_served(stage: Stage, kind: str) -> None:
    stage.service(type="ExternalName", externalName="foo.example.com", ports=[])
    stage.patch(type=kind, externalName=None, ports=PORTS)
    await stage.reachable(await stage.replicas("web", 2))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "ClusterIP",
            marks=upstream("Services should be able to change the type from ClusterIP to ExternalName [Conformance]"),
        ),
        pytest.param(
            "NodePort",
            marks=upstream("Services should be able to change the type from NodePort to ExternalName [Conformance]"),
        ),
    ],
)
async def test_a_service_becomes_an_external_name(stage: Stage, kind: str) -> None:
    """Upstream resolves the name by DNS, which does not involve a proxy: here nothing answers at the old addresses."""
    stage.service(type=kind)
    await stage.reachable(await stage.replicas("web", 2))
    fronts = [stage.front(), *([stage.front("nodeport")] if kind == "NodePort" else [])]
    updated = stage.patch(
        type="ExternalName", externalName="externalsvc.example.com", clusterIP=None, clusterIPs=None, ports=[]
    )
    assert not updated["spec"].get("clusterIP")
    await stage.unanswered(*fronts, protocols="tcp")


# labels


@upstream("Services should implement service.kubernetes.io/service-proxy-name")
async def test_a_service_of_another_proxy_is_left_to_it(stage: Stage) -> None:
    another = {"service.kubernetes.io/service-proxy-name": "foo-bar"}
    stage.service("disabled", labels=another)
    stage.service("toggled")
    await stage.replicas("disabled", 1)
    pods = await stage.replicas("toggled", 3)
    disabled, toggled = stage.front(name="disabled"), stage.front(name="toggled")
    await stage.reachable(pods, "toggled", "tcp")
    await stage.unanswered(disabled, protocols="tcp")
    stage.label("toggled", service_proxy_name="foo-bar")
    await stage.unanswered(toggled, protocols="tcp")
    stage.label("toggled", service_proxy_name=None)
    await stage.reachable(pods, "toggled", "tcp")
    await stage.unanswered(disabled, protocols="tcp")


@upstream("Services should implement service.kubernetes.io/headless")
async def test_a_slice_that_is_labelled_headless_counts_no_more(stage: Stage) -> None:
    stage.service(selector=None, ports=[{"name": "port80", "port": 80}])
    await stage.pods("pod@b", ports=[8090])
    port = {"name": "port80", "port": 8090, "protocol": "TCP"}
    stage.slice_of("pod", ports=[port])
    await stage.expect(stage.front(), everybody("pod"), "tcp")
    headless = {"metadata": {"labels": {"service.kubernetes.io/headless": ""}}}
    stage.cluster.patch("endpointslices", "slice", headless, stage.namespace)
    await stage.expect(stage.front(), everybody("refused"), "tcp")


# rejection


@upstream("Services should be rejected when no endpoints exist")
@modes(*EVERY_MODE)
async def test_a_service_without_endpoints_refuses(stage: Stage) -> None:
    stage.service()
    await stage.expect(stage.front(), dict.fromkeys(("client-a", "node"), "refused"))


@upstream("Services should be rejected for evicted pods (no endpoints exist)")
async def test_evicted_pods_are_no_endpoints(stage: Stage) -> None:
    stage.service(publishNotReadyAddresses=True)
    await stage.pods("evicted@a")
    await stage.reachable("evicted")
    evicted = {"status": {"phase": "Failed", "reason": "Evicted"}}
    stage.cluster.patch("pods", "evicted", evicted, stage.namespace, "status")
    await stage.live.until(lambda: not stage.endpoints(), "no endpoints")
    await stage.expect(stage.front(), {"client-a": "refused", "node": "refused"})


@upstream(
    "EndpointSlice should support a Service with multiple ports specified in multiple EndpointSlices [Conformance]"
)
async def test_ports_of_one_pod_in_two_slices(stage: Stage) -> None:
    stage.service(selector=None, ports=[{"name": f"port{n}", "port": n} for n in (80, 81)])
    await stage.pods("pod@b", ports=[8090, 9090])
    stage.slice_of("pod", name="one", ports=[{"name": "port80", "port": 8090, "protocol": "TCP"}])
    stage.slice_of("pod", name="two", ports=[{"name": "port81", "port": 9090, "protocol": "TCP"}])
    for port in (0, 1):
        await stage.expect(stage.front(port=port), everybody("pod"), "tcp")


@upstream(
    "EndpointSlice should support a Service with multiple endpoint IPs specified in multiple EndpointSlices"
    " [Conformance]"
)
async def test_ports_of_two_pods_in_two_slices(stage: Stage) -> None:
    stage.service(selector=None, ports=[{"name": f"port{n}", "port": n} for n in (80, 81)])
    await stage.pods("pod1@a pod2@b", ports=[8090])
    for number, pod in ((80, "pod1"), (81, "pod2")):
        stage.slice_of(pod, name=pod, ports=[{"name": f"port{number}", "port": 8090, "protocol": "TCP"}])
    await stage.expect(stage.front(port=0), everybody("pod1"), "tcp")
    await stage.expect(stage.front(port=1), everybody("pod2"), "tcp")
