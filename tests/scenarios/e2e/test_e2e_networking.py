"""Upstream's "Granular Checks: Services", on the first family and on the second one, and Services of both families.

Upstream's http is TCP here. Its SCTP is in test_e2e_sctp.py.
"""

from __future__ import annotations

import asyncio
import functools
import socket

import pytest

from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import HEALTH_PORT, METRICS_PORT
from support.live import Front
from support.stage import Stage, everybody
from support.upstream import EVERY_MODE, modes, upstream

BOTH = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should function for pod-Service: http",
                "Networking Granular Checks: Services should function for pod-Service: udp",
                "Networking Granular Checks: Services should function for node-Service: http",
                "Networking Granular Checks: Services should function for node-Service: udp",
                "Networking Granular Checks: Services should function for endpoint-Service: http",
                "Networking Granular Checks: Services should function for endpoint-Service: udp",
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for pod-Service: http",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for pod-Service: udp",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for node-Service: http",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for node-Service: udp",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for endpoint-Service: http",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for endpoint-Service: udp",
            ),
        ),
    ],
)
@modes(*EVERY_MODE)
async def test_pods_nodes_and_endpoints_reach_a_service(stage: Stage, family: str) -> None:
    stage.service(type="NodePort", **BOTH)
    await stage.pods("netserver-0@a netserver-1@b")
    pods = "netserver-0 netserver-1"
    await stage.reachable(pods, family=family)
    endpoints = dict.fromkeys(pods.split(), pods)
    for front in (stage.front(family=family), stage.front("nodeport", family=family)):
        await stage.expect(front, endpoints)


@upstream("Networking Granular Checks: Services should function for multiple endpoint-Services with same selector")
async def test_two_services_of_the_same_pods(stage: Stage) -> None:
    for name in ("web", "second"):
        stage.service(name, type="NodePort", selector={"app": "web"})
    await stage.pods("netserver-0@a netserver-1@b")
    pods = "netserver-0 netserver-1"
    for name in ("web", "second"):
        await stage.reachable(pods, name, "tcp")
        await stage.expect(stage.front(name=name), dict.fromkeys(pods.split(), pods), "tcp")
    stage.delete_service("second")
    await stage.reachable(pods, protocols="tcp")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should update endpoints: http",
                "Networking Granular Checks: Services should update endpoints: udp",
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should update endpoints: http",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should update endpoints: udp",
            ),
        ),
    ],
)
async def test_an_endpoint_goes(stage: Stage, family: str) -> None:
    stage.service(**BOTH)
    await stage.pods("netserver-0@a netserver-1@b netserver-2@b")
    await stage.reachable("netserver-0 netserver-1 netserver-2", family=family)
    stage.delete_pod("netserver-0")
    await stage.reachable("netserver-1 netserver-2", family=family)


@upstream(
    "Networking Granular Checks: Services should update nodePort: http [Slow]",
    "Networking Granular Checks: Services should update nodePort: udp [Slow]",
)
async def test_a_nodeport_goes_with_its_service(stage: Stage) -> None:
    stage.service(type="NodePort")
    stage.service("second", selector={"app": "web"})
    await stage.pods("netserver-0@a netserver-1@b")
    await stage.reachable("netserver-0 netserver-1")
    ports = [stage.front("nodeport", host=host) for host in ("node", "neighbour")]
    stage.delete_service()
    await stage.unanswered(*ports)
    await stage.reachable("netserver-0 netserver-1", "second")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should function for client IP based session affinity: http"
                " [LinuxOnly]",
                "Networking Granular Checks: Services should function for client IP based session affinity: udp"
                " [LinuxOnly]",
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for client IP based session affinity: http [LinuxOnly]",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for client IP based session affinity: udp [LinuxOnly]",
            ),
        ),
    ],
)
async def test_clients_stay(stage: Stage, family: str) -> None:
    stage.service(sessionAffinity="ClientIP", **BOTH)
    pods = await stage.replicas("web", 3)
    for proto in ("tcp", "udp"):
        await stage.sticks(stage.front(family=family), pods, proto)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should be able to handle large requests: http",
                "Networking Granular Checks: Services should be able to handle large requests: udp",
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should be able to handle large requests: http",
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should be able to handle large requests: udp",
            ),
        ),
    ],
)
async def test_large_requests_and_answers(stage: Stage, family: str) -> None:
    """Each datagram is larger than the MTU of the lab's links, so it is sent in fragments."""
    stage.service(**BOTH)
    await stage.pods("near@a far@b")
    await stage.reachable("near far", family=family)
    front = stage.front(family=family)
    for place in ("client-a", "client-b", "node"):
        for ask, message in ((echo_tcp, b"42" * 1000), (echo_udp, b"n" + b"o" * 1999)):
            question = functools.partial(ask, front, message)
            for _ in range(8):
                assert await run_in_async(stage.cluster.namespace_of(place), question) == message


def echo_tcp(front: Front, message: bytes) -> bytes:
    status, body = http_get(front.address, front.port, f"/echo?msg={message.decode()}", 5.0)
    assert status == 200
    return body


def echo_udp(front: Front, message: bytes) -> bytes:
    with socket.socket(socket.AF_INET6 if ":" in front.address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5.0)
        sock.connect(front)
        sock.send(b"echo " + message)
        return sock.recv(65536)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should function for service endpoints using hostNetwork"
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for service endpoints using hostNetwork"
            ),
        ),
    ],
)
async def test_endpoints_in_the_nodes_network(stage: Stage, family: str) -> None:
    number = {"IPv4": 8085, "IPv6": 8086}[family]
    ports = [{"name": proto, "port": 80, "protocol": proto.upper(), "targetPort": number} for proto in ("tcp", "udp")]
    stage.service(type="NodePort", ports=ports, **BOTH)
    await stage.pods("netserver-0@a netserver-1@b", ports=[number], hostNetwork=True)
    await stage.reachable("netserver-0 netserver-1", family=family)


@upstream("Networking should check kube-proxy urls")
async def test_pages_of_the_proxy(stage: Stage) -> None:
    status, body = await stage.live.page("/healthz", HEALTH_PORT)
    assert status == 200
    assert "lastUpdated" in body
    status, body = await stage.live.page("/proxyMode", METRICS_PORT)
    assert (status, body) == (200, stage.mode.config["mode"])


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(
            [],
            id="unset",
            marks=upstream(
                "[Feature:IPv6DualStack] should create a single stack service with cluster ip from primary service"
                " range"
            ),
        ),
        pytest.param(
            ["IPv4"], id="4", marks=upstream("[Feature:IPv6DualStack] should create service with ipv4 cluster ip")
        ),
        pytest.param(
            ["IPv6"], id="6", marks=upstream("[Feature:IPv6DualStack] should create service with ipv6 cluster ip")
        ),
        pytest.param(
            ["IPv4", "IPv6"],
            id="4-6",
            marks=upstream("[Feature:IPv6DualStack] should create service with ipv4,v6 cluster ip"),
        ),
        pytest.param(
            ["IPv6", "IPv4"],
            id="6-4",
            marks=upstream("[Feature:IPv6DualStack] should create service with ipv6,v4 cluster ip"),
        ),
    ],
)
async def test_families_of_a_service(stage: Stage, families: list[str]) -> None:
    wanted = families or ["IPv4"]
    policy = "RequireDualStack" if len(families) == 2 else "SingleStack"
    given = {"ipFamilies": families, "ipFamilyPolicy": policy} if families else {}
    spec = stage.service(type="NodePort", **given)["spec"]
    assert (spec["ipFamilies"], spec["ipFamilyPolicy"]) == (wanted, policy)
    assert ["IPv6" if ":" in address else "IPv4" for address in spec["clusterIPs"]] == wanted
    await stage.pods("pod1@a pod2@b")
    await asyncio.gather(*(stage.reachable("pod1 pod2", family=family) for family in wanted))
    slices = stage.cluster.select("endpointslices", "kubernetes.io/service-name=web", stage.namespace)
    assert {entry["addressType"] for entry in slices} == set(wanted)
    for family in {"IPv4", "IPv6"} - set(wanted):
        await stage.expect(stage.front("nodeport", family=family), everybody("refused"), "tcp")
