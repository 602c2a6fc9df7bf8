"""Malicious clients of the health ports: others still get their answers, and the kernel its repairs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from lab.netns import open_socket_in
from lab.proxyprocess import HEALTH_PORT, METRICS_PORT, proxy_command
from support.live import Live

FILES = 200
"""The proxy's limit of open files: fewer than there are clients, and more than the proxy itself needs."""

STATUS_OF = ("curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Connections that remain open until the test's end."""
    with ExitStack() as stack:
        yield stack


def half_open(bare: Live, port: int, count: int, held: ExitStack) -> None:
    """Open connections from outside that never complete their request."""
    address = (bare.ips["node"]["IPv4"], port)

    def connect() -> socket.socket:
        sock = socket.create_connection(address, timeout=5)
        with suppress(ConnectionError):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
        return sock

    for _ in range(count):
        held.enter_context(open_socket_in(bare.cluster.namespace_of("outside"), connect))


@pytest.mark.slow("500 connections")
async def test_half_open_requests_take_no_descriptor_that_a_repair_needs(bare: Live, held: ExitStack) -> None:
    ports = [HEALTH_PORT]
    for n in range(4):
        made = bare.service(f"web-{n}", "a1 b1", type="LoadBalancer", externalTrafficPolicy="Local")
        ports.append(made["spec"]["healthCheckNodePort"])
    limited = ["prlimit", f"--nofile={FILES // 2}:{FILES}", proxy_command()]
    await bare.start({"nftables": {"syncPeriod": "500ms", "minSyncPeriod": "0s"}}, command=limited)
    front = bare.front("web-0")
    await bare.expect(front, {"pod": "a1 b1"})
    for port in ports:
        half_open(bare, port, 100, held)
    await bare.nft("delete", "table", "ip", "kube-proxy")
    await bare.expect(front, {"pod": "a1 b1"})
    for port in ports:
        url = f"http://{bare.ips['node']['IPv4']}:{port}/healthz"
        assert (await bare.cluster.exec("outside", [*STATUS_OF, url]))[1] == "200"
    assert await bare.metric("process_max_fds") == FILES
    assert not bare.logged("Too many open files|Traceback")


async def test_a_foreign_web_page_cannot_read_ours_by_a_name_of_loopback(bare: Live) -> None:
    """DNS rebinding: a browser on this node that shows the page of evil.example sends the request."""
    await bare.start()
    for host, code in (("evil.example", "403"), ("127.0.0.1", "200"), ("localhost", "200"), ("[::1]", "200")):
        where = [
            f"http://127.0.0.1:{port}/{page}" for port, page in ((HEALTH_PORT, "readyz"), (METRICS_PORT, "metrics"))
        ]
        for url in where:
            _, out, _ = await bare.cluster.exec("node", [*STATUS_OF, "-H", f"Host: {host}", url])
            assert out == code
    _, out, _ = await bare.cluster.exec(
        "node", [*STATUS_OF, "-H", "Host: node-a", f"http://{bare.ips['node']['IPv4']}:{HEALTH_PORT}/readyz"]
    )
    assert out == "200"
