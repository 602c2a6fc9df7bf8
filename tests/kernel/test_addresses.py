"""Listing the addresses of a real kernel, and notifications of changes."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest

from kubeproxy.kernel.route import (
    SCOPE_UNIVERSE,
    Address,
    AddressMonitor,
    local_addresses,
)
from support.namespaces import inside, namespace, run

SCOPE_LINK, SCOPE_HOST = 253, 254  # enum rt_scope_t


def ip(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def test_addresses_of_all_interfaces_are_listed_by_family() -> None:
    with namespace() as name:
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        run("ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none", "up")
        run("ip", "-n", name, "addr", "add", "192.0.2.10/24", "dev", "eth0")
        run("ip", "-n", name, "addr", "add", "192.0.2.11", "peer", "192.0.2.99", "dev", "eth0")
        run("ip", "-n", name, "addr", "add", "2001:db8::10/64", "dev", "eth0", "nodad")
        run("ip", "-n", name, "addr", "add", "fe80::10/64", "dev", "eth0", "nodad")
        four = inside(name, lambda: local_addresses(socket.AF_INET))
        six = inside(name, lambda: local_addresses(socket.AF_INET6))
    assert set(four) == {
        Address(ip("127.0.0.1"), 8, "lo", SCOPE_HOST),
        Address(ip("192.0.2.10"), 24, "eth0", SCOPE_UNIVERSE),
        Address(ip("192.0.2.11"), 32, "eth0", SCOPE_UNIVERSE),
    }
    assert set(six) == {
        Address(ip("::1"), 128, "lo", SCOPE_HOST),
        Address(ip("2001:db8::10"), 64, "eth0", SCOPE_UNIVERSE),
        Address(ip("fe80::10"), 64, "eth0", SCOPE_LINK),
    }


def test_thousands_of_addresses_take_more_than_one_read() -> None:
    with namespace() as name:
        commands = "".join(f"addr add 10.{n >> 8}.{n & 255}.1/32 dev lo\n" for n in range(2000))
        run("ip", "-n", name, "-batch", "-", text=commands)
        assert len(inside(name, lambda: local_addresses(socket.AF_INET))) == 2001


@pytest.mark.parametrize("address", ["192.0.2.10/24", "2001:db8::10/64"])
def test_the_monitor_tells_of_changes_and_only_of_changes(address: str) -> None:
    async def wait(monitor: AddressMonitor) -> bool:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(monitor.fileno(), readable.set)
        try:
            async with asyncio.timeout(5):
                await readable.wait()
        finally:
            loop.remove_reader(monitor.fileno())
        return monitor.drain()

    with namespace() as name, inside(name, AddressMonitor.listen) as monitor:
        assert not monitor.drain()
        run("ip", "-n", name, "addr", "add", address, "dev", "lo")
        assert asyncio.run(wait(monitor))
        while monitor.drain():
            pass
        run("ip", "-n", name, "addr", "del", address, "dev", "lo")
        assert asyncio.run(wait(monitor))


def test_messages_that_were_lost_count_as_a_change() -> None:
    with namespace() as name, inside(name, AddressMonitor.listen) as monitor:
        monitor._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        commands = "".join(f"addr add 10.0.{n}.1/32 dev lo\n" for n in range(200))
        run("ip", "-n", name, "-batch", "-", text=commands)
        assert monitor.drain()
        assert not monitor.drain()


def test_the_monitor_ignores_one_interface() -> None:
    def hear() -> list[bool]:
        with AddressMonitor.listen(ignored={"services"}) as monitor:
            run("ip", "link", "add", "services", "type", "veth", "peer", "name", "other")
            run("ip", "addr", "add", "192.0.2.10/32", "dev", "services")
            heard = [monitor.drain()]
            run("ip", "addr", "add", "192.0.2.11/32", "dev", "other")
            return [*heard, monitor.drain()]

    with namespace() as name:
        assert inside(name, hear) == [False, True]
