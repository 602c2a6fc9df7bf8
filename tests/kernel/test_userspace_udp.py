"""Userspace mode relays UDP: whole datagrams, a session per client, which ends when idle or with its endpoint."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, suppress

import pytest

from kubeproxy.backends.userspace import listeners, udp
from kubeproxy.model.addresses import Family
from support.carrying import TIMEOUT, UDP, Stage, endpoint, nowhere, stage, until


def client_of(where: tuple[str, int], source: str = "") -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(TIMEOUT)
    if source:
        sock.bind((source, 0))
    sock.connect(where)
    return sock


def ask(client: socket.socket, server: socket.socket, datagram: bytes = b"?") -> tuple[str, int]:
    """Send a datagram to the endpoint and back; return its source, as the endpoint saw it."""
    client.send(datagram)
    got, peer = server.recvfrom(1 << 16)
    assert got == datagram
    server.sendto(datagram + b"!", peer)
    assert client.recv(1 << 16) == datagram + b"!"
    return peer


def sessions(made: Stage) -> int:
    return made.path.descriptors.used


@pytest.fixture
def loopback():
    with stage() as made:
        yield made


@pytest.mark.parametrize("family", Family)
def test_datagrams_of_every_size_go_and_come_whole(family: Family) -> None:
    with stage(udp_idle=TIMEOUT) as made, endpoint(UDP, family) as server:
        with client_of(made.carry([server], UDP, family)) as client:
            peers = {ask(client, server, bytes(size)) for size in (0, 1, 100, 1472, 9000, 65_400)}
        assert len(peers) == sessions(made) == 1


def test_each_client_has_a_session_until_it_is_idle(loopback: Stage) -> None:
    with endpoint(UDP) as server:
        where = loopback.carry([server], UDP)
        clients = [client_of(where) for _ in range(20)]
        assert len({ask(client, server) for client in clients}) == 20
        until(lambda: sessions(loopback) == 0, "sessions end")
        assert len({ask(client, server) for client in clients}) == 20
        for client in clients:
            client.close()


def test_sessions_are_spread_evenly(loopback: Stage) -> None:
    servers = [endpoint(UDP) for _ in range(3)]
    where = loopback.carry(servers, UDP)
    for _ in range(12):
        with client_of(where) as client:
            client.send(b"?")
    for server in servers:
        for _ in range(4):
            server.recv(10)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(10)
        server.close()


def test_an_endpoint_that_refuses_is_left(loopback: Stage) -> None:
    with endpoint(UDP) as server:
        where = loopback.carry([nowhere(), server], UDP)
        for _ in range(4):
            with client_of(where) as client:
                client.settimeout(0.2)
                server.settimeout(0.2)
                for _ in range(int(TIMEOUT / 0.2)):
                    client.send(b"?")
                    try:
                        server.recv(10)
                        break
                    except TimeoutError:
                        continue
                else:
                    pytest.fail("never reached the living endpoint")


def test_sessions_end_with_their_endpoint_and_clients_go_on_elsewhere() -> None:
    with stage(udp_idle=TIMEOUT) as made, endpoint(UDP) as old, endpoint(UDP) as new:
        where = made.carry([old], UDP)
        with client_of(where) as client:
            ask(client, old)
            assert made.carry([old, new], UDP) == where
            ask(client, old)
            assert made.carry([new], UDP) == where
            ask(client, new)
        assert sessions(made) == 1
        made.listeners.drop(list(made.listeners.names()))
        assert sessions(made) == 0


def test_affinity_is_by_address_not_by_port() -> None:
    with stage() as made:
        servers = [endpoint(UDP) for _ in range(3)]
        where = made.carry(servers, UDP, affinity=100)
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(4):
                with client_of(where, source) as client:
                    client.send(source.encode())
        met: dict[bytes, list[int]] = {}

        def all_came() -> bool:
            for number, server in enumerate(servers):
                with suppress(BlockingIOError):
                    while True:
                        met.setdefault(server.recv(100), []).append(number)
            return sum(map(len, met.values())) == 8

        for server in servers:
            server.setblocking(False)
        until(all_came, "datagrams arrive")
        for server in servers:
            server.close()
        assert [len(set(numbers)) for numbers in met.values()] == [1, 1]


def test_too_many_sessions_are_dropped_with_a_reason(caplog) -> None:
    with stage(limit=4, udp_idle=TIMEOUT) as made, endpoint(UDP) as server:
        where = made.carry([server], UDP)
        clients = [client_of(where) for _ in range(6)]
        for client in clients[:3]:
            ask(client, server)
        for client in clients[3:]:
            client.send(b"?")
        ask(clients[0], server)
        assert sessions(made) == 3
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert "ns/web/UDP" in line
        assert "room for 3 sessions" in line
        for client in clients:
            client.close()


def test_an_answer_that_takes_longer_than_the_idle_timeout_reaches_its_client() -> None:
    """Like the answer of a DNS server that queries others first, or of any server on a busy node."""
    with stage(udp_idle=0.05) as made, endpoint(UDP) as server:
        where = made.carry([server], UDP)
        with client_of(where) as slow, client_of(where) as quick:
            slow.send(b"A")
            slow.send(b"AAAA")
            (first, peer), (second, _) = server.recvfrom(10), server.recvfrom(10)
            ask(quick, server)  # later, so that it becomes idle later
            until(lambda: sessions(made) == 1, "the session that had its answer ends")
            server.sendto(first, peer)
            assert slow.recv(10) == b"A"
            ask(quick, server)
            until(lambda: sessions(made) == 1, "the session that had its answer ends again")
            server.sendto(second, peer)
            assert slow.recv(10) == b"AAAA"
            until(lambda: sessions(made) == 0, "nobody waits any more")


def test_a_session_waits_for_an_answer_no_longer_than_the_kernel(monkeypatch) -> None:
    with ExitStack() as clients, stage(udp_idle=0.05) as made, endpoint(UDP) as server:
        where = made.carry([server], UDP)
        monkeypatch.setattr(udp, "MOST_UNANSWERED", 2)
        for _ in range(6):
            clients.enter_context(client_of(where)).send(b"?")
        for _ in range(6):
            server.recv(10)
        until(lambda: sessions(made) == 2, "so many may wait")
        monkeypatch.setattr(udp, "UNANSWERED", 0.1)
        until(lambda: sessions(made) == 0, "these end, too")


def test_waiting_clients_make_room_for_others() -> None:
    with ExitStack() as clients, stage(limit=4, udp_idle=0.05) as made, endpoint(UDP) as server:
        where = made.carry([server], UDP)
        for _ in range(3):
            clients.enter_context(client_of(where)).send(b"?")
            server.recv(10)
        assert sessions(made) == 3
        late = clients.enter_context(client_of(where))
        server.setblocking(False)

        def served() -> bool:
            late.send(b"!")
            with suppress(BlockingIOError):
                return server.recv(10) == b"!"
            return False

        until(served, "it has room")
        assert sessions(made) == 3


def test_a_removed_endpoint_may_answer_earlier_requests() -> None:
    with stage(udp_idle=TIMEOUT) as made, endpoint(UDP) as old, endpoint(UDP) as new:
        where = made.carry([old], UDP)
        with client_of(where) as client:
            client.send(b"?")
            _, peer = old.recvfrom(10)
            made.carry([new], UDP)
            ask(client, new)
            old.sendto(b"late", peer)
            assert client.recv(10) == b"late"
        assert sessions(made) == 2
        made.listeners.drop(list(made.listeners.names()))
        assert sessions(made) == 0


def test_a_recreated_service_listens_where_its_clients_flows_still_lead() -> None:
    """Until the removal of the rules, which takes up to five seconds on a busy node, the kernel refused them."""
    with stage() as made, endpoint(UDP) as server:
        where = made.carry([server], UDP)
        with client_of(where) as client:
            for _ in range(2):
                ask(client, server)
                made.listeners.drop(list(made.listeners.names()))
                assert made.carry([server], UDP) == where
            ask(client, server)
        made.listeners.drop(list(made.listeners.names()))
        with socket.socket(type=socket.SOCK_DGRAM) as other:
            other.bind(("", where[1]))
            assert made.carry([server], UDP) != where, "somebody else has it"


def test_former_ports_are_few(loopback: Stage, monkeypatch) -> None:
    monkeypatch.setattr(listeners, "_FORMER", 2)
    for number in range(5):
        loopback.carry([nowhere()], UDP, name=str(number))
        loopback.listeners.drop(list(loopback.listeners.names()))
    assert [name.key.name for name in loopback.listeners._former] == ["3", "4"]


def test_datagrams_that_come_while_the_relay_is_held_up_are_kept(loopback: Stage) -> None:
    """A thousand requests in the moments in which another process has the CPU."""
    held = threading.Event()
    with endpoint(UDP) as server, client_of(loopback.carry([server], UDP)) as client:
        server.setsockopt(socket.SOL_SOCKET, udp._SO_RCVBUFFORCE, 1 << 22)
        loopback.path._loop.call_soon_threadsafe(held.wait)
        for number in range(1000):
            client.send(number.to_bytes(2))
        held.set()
        assert [server.recv(10) for _ in range(1000)] == [number.to_bytes(2) for number in range(1000)]
