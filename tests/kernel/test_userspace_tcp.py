"""Userspace mode relays TCP: data is neither lost nor reordered, ends and resets are passed on."""

from __future__ import annotations

import logging
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model.addresses import Family
from support.carrying import (
    TIMEOUT,
    Stage,
    accept,
    connect,
    destination,
    doing,
    endpoint,
    nowhere,
    received,
    reset,
    stage,
    until,
)
from support.effort import examples
from support.namespaces import run

BLOCK = random.Random(7).randbytes(1_000_003)  # A prime length, so that no buffer contains a whole number of them.
sizes = st.lists(st.sampled_from([1, 2, 100, 1448, 4096, 65_535, 262_144, 700_001]), max_size=8)


def pair(made: Stage, family: Family = Family.IPV4) -> tuple[socket.socket, socket.socket]:
    """A client's connection and the endpoint's connection, through the proxy."""
    with endpoint(family=family) as listening:
        client = connect(made.carry([listening], family=family))
        return client, accept(listening)


def send(sock: socket.socket, chunks: list[int], at: int = 0) -> None:
    for size in chunks:
        sock.sendall(text(at, size))
        at += size


def text(at: int, size: int) -> bytes:
    """Return the byte at a position of every stream."""
    at %= len(BLOCK)
    return (BLOCK + BLOCK)[at : at + size]


def sent(chunks: list[int]) -> bytes:
    return b"".join(text(sum(chunks[:n]), size) for n, size in enumerate(chunks))


def speak(sock: socket.socket, chunks: list[int], reading: int, got: list[tuple[bytes, bool]], waits: bool) -> None:
    """Send all bytes, end the stream, and read at the same time; with `waits`, send the rest after the peer's end."""
    half = len(chunks) // 2 if waits else len(chunks)
    with doing(lambda: got.append(received(sock, reading))):
        send(sock, chunks[:half])
        if not waits:
            sock.shutdown(socket.SHUT_WR)
    if waits:
        send(sock, chunks[half:], sum(chunks[:half]))
        sock.shutdown(socket.SHUT_WR)


@pytest.fixture
def loopback():
    with stage() as made:
        yield made


@pytest.mark.parametrize("family", Family)
def test_streams_arrive_complete_in_any_order_of_ends(family: Family) -> None:
    with stage() as made:

        @examples(25)
        @given(sizes, sizes, st.sampled_from(["client", "endpoint", "nobody"]), st.integers(1 << 10, 1 << 17))
        def each(up: list[int], down: list[int], waiting: str, reading: int) -> None:
            client, server = pair(made, family)
            got: list[tuple[bytes, bool]] = []
            with client, server, doing(lambda: speak(server, down, reading, got, waiting == "endpoint")):
                speak(client, up, reading, got, waiting == "client")
            assert sorted(got) == sorted([(sent(up), False), (sent(down), False)])

        each()
        until(lambda: made.path.descriptors.used == 0, "all is closed in the end")


@examples(25)
@given(sizes, sizes, st.booleans())
def test_a_reset_is_carried_as_a_reset(up: list[int], down: list[int], from_client: bool) -> None:
    with stage() as made:
        client, server = pair(made)
        first, other = (client, server) if from_client else (server, client)
        mine, theirs = (up, down) if from_client else (down, up)
        seen = []
        with first, other:

            def read() -> None:
                seen.append(received(other))

            def write() -> None:
                with suppress(ConnectionResetError, BrokenPipeError):  # the reset arrived before all was sent
                    send(other, theirs)

            with doing(read, write):
                send(first, mine)
                reset(first)
        data, was_reset = seen[0]
        assert sent(mine).startswith(data)
        assert was_reset or other_saw_it_while_writing(theirs)
        until(lambda: made.path.descriptors.used == 0, "all is closed in the end")


def other_saw_it_while_writing(chunks: list[int]) -> bool:
    """The kernel reports a reset once: to the thread that was writing, if any."""
    return bool(chunks)


def test_a_large_stream_arrives_whole(loopback: Stage) -> None:
    client, server = pair(loopback)
    total = 128 << 20

    def write() -> None:
        left, twice = total, memoryview(BLOCK * 2)
        at = 0
        while left:
            count = client.send(twice[at : at + min(left, len(BLOCK))])
            left, at = left - count, (at + count) % len(BLOCK)
        client.shutdown(socket.SHUT_WR)

    with client, server, doing(write):
        room, came, twice = memoryview(bytearray(1 << 19)), 0, memoryview(BLOCK * 2)
        while count := server.recv_into(room):
            at = came % len(BLOCK)
            assert room[:count] == twice[at : at + count], f"at byte {came}"
            came += count
    assert came == total


def test_a_slow_reader_gets_everything_and_delays_no_other(loopback: Stage) -> None:
    client, server = pair(loopback)
    with client, server:
        client.setblocking(False)
        stuck_since, count = time.monotonic(), 0
        while time.monotonic() - stuck_since < 0.3:
            try:
                count += client.send(BLOCK[count % 1000 :])
                stuck_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
            assert count < 256 << 20, "the proxy takes in without end what nobody reads"
        for _ in range(20):
            other, its_server = pair(loopback)
            with other, its_server:
                other.sendall(b"?")
                assert its_server.recv(1) == b"?"
        client.settimeout(TIMEOUT)
        client.shutdown(socket.SHUT_WR)
        data, was_reset = received(server, 1 << 20)
        assert (len(data), was_reset) == (count, False)


def test_a_reset_gets_through_while_the_other_side_does_not_read(loopback: Stage) -> None:
    client, server = pair(loopback)
    with client, server:
        client.setblocking(False)
        stuck_since = time.monotonic()
        while time.monotonic() - stuck_since < 0.2:
            try:
                client.send(BLOCK)
                stuck_since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        reset(client)
        until(lambda: loopback.path.descriptors.used == 0, "the endpoint's connection is ended")
        assert received(server)[1]


def test_dead_endpoints_are_passed_over(loopback: Stage) -> None:
    silent = endpoint()
    run("nft", "add table ip filter")
    run("nft", "add chain ip filter input { type filter hook input priority 0 ; }")
    run("nft", f"add rule ip filter input tcp dport {silent.getsockname()[1]} drop")
    with endpoint() as living, silent:
        where = loopback.carry([living, destination(silent), *(nowhere() for _ in range(6))])
        for _ in range(8):
            with connect(where) as client, accept(living) as server:
                client.sendall(b"?")
                assert server.recv(1) == b"?"


@pytest.mark.parametrize("pool", ["one refuses", "none"])
def test_without_a_living_endpoint_the_client_is_reset(loopback: Stage, pool: str, caplog) -> None:
    where = loopback.carry([nowhere()] if pool == "one refuses" else [])
    with pytest.raises(ConnectionResetError), connect(where) as client:  # the reset may arrive before connect() returns
        client.recv(1)
    why = "Connection refused" if pool == "one refuses" else "there is none"
    until(lambda: re.search(f"ns/web/TCP: a connection was reset, .*{why}", caplog.text), caplog.text)
    assert loopback.path.descriptors.used == 0


def test_a_slow_endpoint_is_tried_again_for_longer(loopback: Stage) -> None:
    """TCP repeats a lost SYN after a second, for which the third attempt waits."""
    with endpoint() as late:
        run("nft", "add table ip filter")
        run("nft", "add chain ip filter input { type filter hook input priority 0 ; }")
        run("nft", f"add rule ip filter input tcp dport {late.getsockname()[1]} drop")
        with connect(loopback.carry([late])) as client:
            client.sendall(b"?")
            time.sleep(0.4)
            run("nft", "flush chain ip filter input")
            with accept(late) as server:
                assert server.recv(1) == b"?"


def test_connections_are_spread_evenly(loopback: Stage) -> None:
    servers = [endpoint() for _ in range(3)]
    where = loopback.carry(servers)
    clients = [connect(where) for _ in range(30)]
    met: Counter[int] = Counter()
    for at, server in enumerate(servers):
        for _ in range(10):
            accept(server).close()
            met[at] += 1
    assert met == {0: 10, 1: 10, 2: 10}
    for sock in (*clients, *servers):
        sock.close()


def test_many_idle_connections_need_no_thread_and_delay_no_client(loopback: Stage) -> None:
    with endpoint() as listening:
        where = loopback.carry([listening])
        idle = []
        for _ in range(400):
            client = connect(where)
            idle.append((client, accept(listening)))
        with connect(where) as client, accept(listening) as server:
            client.sendall(b"?")
            assert server.recv(1) == b"?"
        for client, server in idle:
            server.sendall(b"!")
            assert client.recv(1) == b"!"
            client.close()
            server.close()
    until(lambda: loopback.path.descriptors.used == 0, "all is closed in the end")


def test_too_many_connections_are_refused_with_a_reason(caplog) -> None:
    with stage(limit=21) as made, endpoint() as listening:
        where = made.carry([listening])
        held = [(connect(where), accept(listening)) for _ in range(10)]
        for _ in range(3):
            with pytest.raises(ConnectionResetError), connect(where) as client:
                client.recv(1)
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert "ns/web/TCP" in line
        assert "room for 10 connections" in line  # two descriptors each, and one for the listener
        assert "LimitNOFILE" in line
        for sock in held.pop():
            sock.close()
        until(lambda: made.path.descriptors.used == 18, "there is room again")
        with connect(where) as client, accept(listening) as server:
            server.sendall(b"!")
            assert client.recv(1) == b"!"
        for client, server in held:
            client.close()
            server.close()


def test_connections_outlive_their_service_but_not_the_proxy() -> None:
    with stage() as made:
        client, server = pair(made)
        where = client.getpeername()
        made.listeners.drop(list(made.listeners.names()))
        with pytest.raises(ConnectionRefusedError):
            connect(where)
        client.sendall(b"?")
        assert server.recv(1) == b"?"
        made.path.stop()
        assert received(client) == received(server) == (b"", True)
        client.close()
        server.close()


def test_a_killed_proxy_leaves_resets_behind() -> None:
    """The kernel closes the sockets of a killed process; an ordinary end would look like a complete answer."""
    with endpoint() as listening:
        command = [sys.executable, "-m", "support.carrying", destination(listening).hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
            try:
                assert proxy.stdout is not None
                where = ("127.0.0.1", int(proxy.stdout.readline()))
                with connect(where) as client, accept(listening) as server:
                    server.sendall(b"half an answer")
                    assert client.recv(100) == b"half an answer"
                    proxy.kill()
                    assert received(client) == received(server) == (b"", True)
            finally:
                proxy.kill()


def test_ports_come_from_the_range(caplog) -> None:
    with stage(ports=range(4100, 4102)) as made, endpoint() as one, socket.socket() as taken:
        taken.bind(("127.0.0.1", 4100))
        taken.listen()
        assert made.carry([one], name="a")[1] == 4101
        with pytest.raises(AssertionError):
            made.carry([one], name="b")
        assert "ns/b/TCP: no listener: its clients are refused" in caplog.text
        assert "make portRange 4100-4101 wider" in caplog.text
        with connect(("127.0.0.1", 4101)) as client, accept(one) as server:
            client.sendall(b"?")
            assert server.recv(1) == b"?"
