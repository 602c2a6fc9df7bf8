"""Reading and following tracked connections of a real kernel, selected by status, and one connection in several."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from kubeproxy.kernel.conntrack.tracked import (
    ANSWERED,
    DESTINATION_TRANSLATED,
    Events,
    Wanted,
    entries,
    entries_to,
    filter_program,
    level,
    refusals,
    target_of,
)
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.model.addresses import PROTOCOLS, pack

RULES = """
table ip t {
    chain track { type filter hook output priority 0; ct state new accept; }
    chain nat { type nat hook output priority -100; ip daddr 10.96.0.9 dnat to 127.0.0.1; }
}
table ip6 t {
    chain track { type filter hook output priority 0; ct state new accept; }
    chain nat { type nat hook output priority -100; ip6 daddr fd96::9 dnat to ::1; }
}
"""
TRANSLATED = Wanted(DESTINATION_TRANSLATED, DESTINATION_TRANSLATED)
VIPS = {2: "10.96.0.9", 10: "fd96::9"}
LOOPBACK = {2: "127.0.0.1", 10: "::1"}


@pytest.fixture
def link(netns) -> Iterator[Netlink]:
    for command in ("link set lo up", "route add 10.0.0.0/8 dev lo", "-6 route add fd96::/64 dev lo src ::1"):
        subprocess.run(["ip", *command.split()], check=True)
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)
    with Netlink.open(NETLINK_NETFILTER) as opened:
        yield opened


def datagrams(address: str, count: int = 1) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(count):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"?", (address, 5353))


@pytest.mark.parametrize("family", [2, 10])
def test_tcp_and_udp_are_read_as_they_stand(link, family):
    kind = socket.AF_INET if family == 2 else socket.AF_INET6
    listener = socket.create_server((LOOPBACK[family], 0), family=kind)
    port = listener.getsockname()[1]
    client = socket.create_connection((VIPS[family], port))
    datagrams(VIPS[family])
    datagrams(LOOPBACK[family])
    found = {entry.target: entry for entry in entries(link, family)}
    vip, loopback = pack(VIPS[family]), pack(LOOPBACK[family])
    tcp = found[target_of(vip, PROTOCOLS["TCP"], port)]
    assert tcp.client == loopback + client.getsockname()[1].to_bytes(2, "big")
    assert tcp.server == loopback + port.to_bytes(2, "big")
    assert tcp.seen == loopback
    assert (tcp.answered, tcp.over, tcp.state) == (True, False, 3)
    udp = found[target_of(vip, PROTOCOLS["UDP"], 5353)]
    assert (udp.answered, udp.state, udp.server) == (False, 0, loopback + (5353).to_bytes(2, "big"))
    assert {entry.target for entry in entries(link, family, TRANSLATED)} == {tcp.target, udp.target}
    silent = Wanted(DESTINATION_TRANSLATED, DESTINATION_TRANSLATED | ANSWERED)
    assert [entry.target for entry in entries(link, family, silent)] == [udp.target]
    assert {entry.target for entry in entries_to(link, family, PROTOCOLS["TCP"], port)} == {tcp.target}
    client.close()
    listener.close()


def test_pings_have_no_ports(link):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as ping:
        ping.sendto(b"\x08\0\xf7\xff\0\0\0\0", ("127.0.0.1", 0))
    assert level(link).entries == 1
    assert list(entries(link, 2)) == []


def test_a_zone_of_its_own_is_read_attribute_by_attribute(link):
    rules = "table ip z { chain raw { type filter hook output priority -300; udp dport 5353 ct zone set 7\n}\n}\n"
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    datagrams("10.96.0.9")
    (entry,) = entries(link, 2)
    assert entry.target == target_of(pack("10.96.0.9"), PROTOCOLS["UDP"], 5353)
    assert entry.status & DESTINATION_TRANSLATED


def test_beginnings_and_ends_of_some_are_announced(link):
    with Events.listen(TRANSLATED) as events:
        datagrams("10.96.0.9")
        datagrams("fd96::9")
        datagrams("127.0.0.1")
        begun = list(events.events(time.monotonic() + 0.2))
        assert [(event.ended, event.family) for event in begun] == [(False, 2), (False, 10)]
        flush(link)
        ended = [event for event in events.events(time.monotonic() + 0.2) if event.ended]
    assert {event.entry.entry_id for event in ended} == {event.entry.entry_id for event in begun}


def flush(link: Netlink) -> None:
    """Delete all connections, of both families."""
    for family in (2, 10):
        link.requests(1 << 8 | 2, [bytes([family, 0, 0, 0])], "a flush")


def test_one_in_so_many_is_announced_with_its_end(link):
    with Events.listen() as events:
        events.sample(8)
        datagrams("127.0.0.1", 400)
        begun = list(events.events(time.monotonic() + 0.3))
        assert 20 < len(begun) < 90
        flush(link)
        ended = [event for event in events.events(time.monotonic() + 0.3) if event.ended]
    assert {event.entry.entry_id for event in ended} == {event.entry.entry_id for event in begun}


def test_lost_events_are_noticed(link, monkeypatch):
    monkeypatch.setattr("kubeproxy.kernel.conntrack.tracked._RECEIVE_BUFFER", 4096)
    with Events.listen() as events:
        datagrams("127.0.0.1", 400)
        assert len(list(events.events(time.monotonic() + 0.2))) < 400
        assert events.lost > 0


def test_the_number_of_entries_and_of_refusals(link):
    before = level(link)
    datagrams("127.0.0.1", 5)
    after = level(link)
    assert after.entries - before.entries == 5
    assert after.limit > 0
    assert refusals(link).dropped == 0


def test_a_filter_without_conditions_lets_everything_through():
    assert filter_program(Wanted(), 1)[:2] == b"\x06\0"
