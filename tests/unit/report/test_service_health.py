"""Service health check ports over real loopback connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import pytest

from kubeproxy.model.addresses import Family
from kubeproxy.report.health import HealthCheckAddress, LocalEndpoints, ServiceHealth

V4, V6 = Family.IPV4, Family.IPV6


class Kit:
    """A ServiceHealth with a record of its reports."""

    def __init__(self) -> None:
        self.healthy = True
        self.failures: list[tuple[str, str, int, str]] = []
        self.health = ServiceHealth(lambda: self.healthy, lambda *told: self.failures.append(told), retry=0.02)
        self.health.listen_on({V4: ["127.0.0.1"], V6: ["::1"]})


def run(work: Callable[[Kit], Awaitable[None]]) -> None:
    async def main() -> None:
        kit = Kit()
        try:
            async with asyncio.timeout(20):
                await work(kit)
        finally:
            await kit.health.stop()

    asyncio.run(main())


def free_ports(count: int, hosts: tuple[str, ...] = ("127.0.0.1",)) -> list[int]:
    """Return ports on which no process listens, all different."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((hosts[0], 0))).getsockname()[1] for _ in range(count)]


async def get(
    port: int, host: str = "127.0.0.1", path: str = "/any/path", method: str = "GET"
) -> tuple[int, dict[str, str], bytes] | None:
    """Return the answer of a port; None if no process listens."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return None
    writer.write(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body


@pytest.mark.parametrize(
    ("endpoints", "healthy", "status"), [(2, True, 200), (0, True, 503), (2, False, 503), (0, False, 503)]
)
def test_the_answer_is_that_of_kube_proxy(endpoints: int, healthy: bool, status: int) -> None:
    async def work(kit: Kit) -> None:
        (port,) = free_ports(1)
        kit.healthy = healthy
        kit.health.sync({HealthCheckAddress(V4, port): LocalEndpoints("shop", "web", endpoints)})
        answer = await get(port)
        assert answer is not None
        assert answer[0] == status
        assert answer[1]["X-Load-Balancing-Endpoint-Weight"] == str(endpoints)
        assert answer[1]["Content-Type"] == "application/json"
        assert answer[1]["X-Content-Type-Options"] == "nosniff"
        assert answer[2].decode() == (
            '{\n\t"service": {\n\t\t"namespace": "shop",\n\t\t"name": "web"\n\t},\n'
            f'\t"localEndpoints": {endpoints},\n\t"serviceProxyHealthy": {str(healthy).lower()}\n}}'
        )

    run(work)


@pytest.mark.parametrize("path", ["/", "*", "/any?x=y"])
def test_any_method_is_answered(path: str) -> None:
    async def work(kit: Kit) -> None:
        (port,) = free_ports(1)
        kit.health.sync({HealthCheckAddress(V4, port): LocalEndpoints("shop", "web", 1)})
        wanted = await get(port)
        assert wanted is not None
        assert wanted[0] == 200
        for method in ("OPTIONS", "POST", "HEAD"):
            answer = await get(port, path=path, method=method)
            assert answer is not None
            assert (answer[0], answer[2]) == (200, b"" if method == "HEAD" else wanted[2])

    run(work)


def test_ports_open_change_and_close() -> None:
    async def work(kit: Kit) -> None:
        one, two = free_ports(2)
        kit.health.sync(
            {
                HealthCheckAddress(V4, one): LocalEndpoints("a", "x", 1),
                HealthCheckAddress(V4, two): LocalEndpoints("a", "y", 0),
            }
        )
        assert [(await get(port))[0] for port in (one, two)] == [200, 503]
        server = kit.health._servers[V4, two]
        kit.health.sync({HealthCheckAddress(V4, two): LocalEndpoints("a", "y", 5)})
        assert await get(one) is None
        assert (await get(two))[1]["X-Load-Balancing-Endpoint-Weight"] == "5"
        # The port moves to another Service without being closed.
        kit.health.sync({HealthCheckAddress(V4, two): LocalEndpoints("b", "z", 1)})
        assert b'"name": "z"' in (await get(two))[2]
        assert kit.health._servers[V4, two] is server
        kit.health.sync({})
        assert await get(two) is None
        assert kit.failures == []

    run(work)


def test_a_closed_port_is_free_at_once_and_its_connections_end() -> None:
    async def work(kit: Kit) -> None:
        (port,) = free_ports(1)
        kit.health.sync({HealthCheckAddress(V4, port): LocalEndpoints("a", "x", 1)})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"true\n}")
        kit.health.sync({})
        with socket.create_server(("127.0.0.1", port)):
            pass
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

    run(work)


def test_a_port_in_use_is_reported_once_and_retried_and_others_are_served() -> None:
    async def work(kit: Kit) -> None:
        free, busy = free_ports(2)
        with socket.create_server(("127.0.0.1", busy)):
            kit.health.sync(
                {
                    HealthCheckAddress(V4, busy): LocalEndpoints("shop", "web", 1),
                    HealthCheckAddress(V4, free): LocalEndpoints("a", "x", 1),
                }
            )
            assert (await get(free))[0] == 200
            await asyncio.sleep(0.1)
            kit.health.sync(
                {
                    HealthCheckAddress(V4, busy): LocalEndpoints("shop", "web", 2),
                    HealthCheckAddress(V4, free): LocalEndpoints("a", "x", 1),
                }
            )
        ((namespace, name, port, why),) = kit.failures
        assert (namespace, name, port) == ("shop", "web", busy)
        assert why == f"cannot serve health checks of shop/web on 127.0.0.1:{busy}: Address already in use"
        await asyncio.sleep(0.1)
        answer = await get(busy)
        assert answer[1]["X-Load-Balancing-Endpoint-Weight"] == "2"
        assert len(kit.failures) == 1

    run(work)


def test_a_port_in_use_that_no_service_needs_any_more_is_not_retried() -> None:
    async def work(kit: Kit) -> None:
        (busy,) = free_ports(1)
        with socket.create_server(("127.0.0.1", busy)):
            kit.health.sync({HealthCheckAddress(V4, busy): LocalEndpoints("shop", "web", 1)})
            kit.health.sync({})
        await asyncio.sleep(0.1)
        assert await get(busy) is None

    run(work)


def test_ports_move_with_the_node_addresses() -> None:
    async def work(kit: Kit) -> None:
        (port,) = free_ports(1)
        kit.health.sync({HealthCheckAddress(V4, port): LocalEndpoints("a", "x", 1)})
        assert await get(port, "::1") is None
        kit.health.listen_on({V4: ["127.0.0.2"], V6: ["::1"]})
        assert await get(port) is None
        assert (await get(port, "127.0.0.2"))[0] == 200
        kit.health.listen_on({V4: None, V6: None})
        for host in ("127.0.0.1", "127.0.0.3"):
            assert (await get(port, host))[0] == 200
        assert await get(port, "::1") is None

    run(work)


@pytest.mark.parametrize("addresses", [{V4: ["127.0.0.1"], V6: ["::1"]}, {V4: None, V6: None}], ids=["chosen", "all"])
def test_each_family_has_its_own_port_with_its_own_count(addresses) -> None:
    async def work(kit: Kit) -> None:
        kit.health.listen_on(addresses)
        (port,) = free_ports(1)
        kit.health.sync(
            {
                HealthCheckAddress(V4, port): LocalEndpoints("a", "x", 2),
                HealthCheckAddress(V6, port): LocalEndpoints("a", "x", 0),
            }
        )
        answers = [await get(port, host) for host in ("127.0.0.1", "::1")]
        assert [(status, head["X-Load-Balancing-Endpoint-Weight"]) for status, head, _ in answers] == [
            (200, "2"),
            (503, "0"),
        ]
        kit.health.sync({HealthCheckAddress(V6, port): LocalEndpoints("a", "x", 1)})
        assert await get(port) is None
        assert (await get(port, "::1"))[0] == 200
        assert kit.failures == []

    run(work)


def test_networks_that_match_no_address_mean_no_port() -> None:
    async def work(kit: Kit) -> None:
        kit.health.listen_on({V4: [], V6: ["::1"]})
        (port,) = free_ports(1)
        kit.health.sync({HealthCheckAddress(family, port): LocalEndpoints("a", "x", 1) for family in Family})
        assert await get(port) is None
        assert (await get(port, "::1"))[0] == 200
        kit.health.listen_on({V4: ["127.0.0.1"], V6: []})
        assert (await get(port))[0] == 200
        assert await get(port, "::1") is None

    run(work)


def test_nothing_is_opened_before_the_addresses_are_known() -> None:
    async def work(kit: Kit) -> None:
        health = ServiceHealth(lambda: True, lambda *told: kit.failures.append(told))
        (port,) = free_ports(1)
        health.sync({HealthCheckAddress(V4, port): LocalEndpoints("a", "x", 1)})
        assert await get(port) is None
        health.listen_on({V4: ["127.0.0.1"]})
        assert (await get(port))[0] == 200
        await health.stop()

    run(work)
