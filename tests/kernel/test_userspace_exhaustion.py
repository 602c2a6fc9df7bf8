"""Userspace mode without system resources: new connections are refused, and later everything works as before."""

from __future__ import annotations

import errno
import os
import select
import socket
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kubeproxy.backends.userspace import listeners
from kubeproxy.backends.userspace.listeners import Assignment, ListenerName, PoolKind
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServicePortKey
from support.carrying import TCP, TIMEOUT, UDP, accept, connect, endpoint, nowhere, stage, until


class Epoll:
    """An epoll with this limit of further sockets, as at fs.epoll.max_user_watches."""

    def __init__(self, real: select.epoll, room: int) -> None:
        self.real, self.room = real, room
        self.refused = 0

    def register(self, fd, events):
        if self.room <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        self.real.register(fd, events)

    def __getattr__(self, name):
        return getattr(self.real, name)


@contextmanager
def room(made, number):
    real = made.path._epoll
    made.path._epoll = limited = Epoll(real, number)
    try:
        yield limited
    finally:
        made.path._epoll = real


def test_a_listener_outlives_a_system_that_watches_no_more_sockets():
    with stage() as made, endpoint() as listening:
        where = made.carry([listening])
        with room(made, 0), pytest.raises(ConnectionResetError), connect(where) as client:
            client.recv(1)
        until(lambda: made.path.descriptors.used == 0, "all is closed")
        accept(listening).close()
        with connect(where) as client, accept(listening) as server:
            server.sendall(b"!")
            assert client.recv(1) == b"!"


def test_a_udp_listener_outlives_it_as_well():
    with stage(udp_idle=TIMEOUT) as made, endpoint(UDP) as server, socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect(made.carry([server], UDP))
        with room(made, 0) as limited:
            client.send(b"lost")
            until(lambda: limited.refused, "the datagram comes")
            until(lambda: made.path.call(lambda: made.path.descriptors.used) == 0, "no session is left")
        client.send(b"?")
        assert server.recv(10) == b"?"


def test_a_client_that_cannot_be_watched_is_turned_away(caplog):
    with stage() as made, endpoint() as listening:
        where = made.carry([listening])
        with room(made, 1), pytest.raises(ConnectionResetError), connect(where) as client:
            client.recv(1)
        until(lambda: made.path.descriptors.used == 0, "all is closed")
        assert [record.getMessage() for record in caplog.records] == [
            "ns/web/TCP: a connection was reset: [Errno 28] No space left on device"
        ]


def test_without_descriptors_bytes_for_a_lost_target_reach_no_other_target(monkeypatch):
    """All connections use one pipe: a replacement may be impossible, and its descriptors may be reused."""

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with stage() as made, ExitStack() as open_:
        pairs = [[open_.enter_context(sock) for sock in socket.socketpair()] for _ in range(4)]
        (client, source), (target, server), (other, other_source), (other_target, other_server) = pairs
        client.send(b"lost")
        other.send(b"kept")
        target.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(os, "pipe2", refuse)
        with pytest.raises(ApplyError, match="Broken pipe"):
            made.path.call(lambda: made.path.carry(source.fileno(), target.fileno()))
        assert made.path.call(lambda: made.path.carry(other_source.fileno(), other_target.fileno())) == (4, b"")
        assert other_server.recv(100) == b"kept"
        assert server.recv(100) == b""


def test_listeners_that_cannot_be_watched_are_opened_later():
    with stage() as made, endpoint() as listening:
        with room(made, 0), pytest.raises(ApplyError, match="No space left"):
            made.carry([listening])
        before = made.path.descriptors.limit
        where = made.carry([listening])
        assert made.path.descriptors.limit == before - 1
        with connect(where) as client, accept(listening) as server:
            server.sendall(b"!")
            assert client.recv(1) == b"!"


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_listeners_that_are_gone_before_they_could_be_watched_stop_no_others(protocol):
    """As when a Service is deleted before the system can watch more sockets again."""
    with stage() as made, endpoint(protocol) as listening:
        limit = made.path.descriptors.limit
        with room(made, 0), pytest.raises(ApplyError, match="No space left"):
            made.carry([listening], protocol)
        made.listeners.drop(made.listeners.names())
        assert made.path.descriptors.limit == limit
        made.carry([listening], protocol, name="other")
        assert made.path.descriptors.limit == limit - 1


def test_a_datagram_without_room_for_a_session_costs_one_look():
    """Not one for each endpoint: there is no time for that in this situation."""
    pool = [nowhere()[:-2] + port.to_bytes(2, "big") for port in range(1, 301)]
    with stage(limit=1) as made, socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect(made.carry(pool, UDP))
        (listener,) = made.listeners._open.values()
        picks, pick = [], listener.balancer.pick

        def counted(*arguments):
            picks.append(arguments)
            return pick(*arguments)

        listener.balancer.pick = counted
        client.send(b"lost")
        until(lambda: picks, "the datagram comes")
        made.path.call(lambda: None)
        assert len(picks) == 1


@pytest.mark.parametrize("flooded", [TCP, UDP])
def test_a_flood_of_one_protocol_leaves_room_for_the_other_one(flooded):
    """A client may have any number of addresses: connections and sessions share one limit of open files."""
    with (
        stage(limit=40, udp_idle=TIMEOUT) as made,
        endpoint() as listening,
        endpoint(UDP) as server,
        ExitStack() as many,
    ):
        tcp, udp = made.carry([listening]), made.carry([server], UDP)

        def datagram():
            client = many.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            client.settimeout(TIMEOUT)
            client.connect(udp)
            client.send(b"?")
            return client

        said = []
        made.path.complain = lambda about, *_: said.append(about)
        for _ in range(60):
            if flooded == UDP:
                datagram()
            else:
                with suppress(ConnectionResetError):  # refused before its connect was complete
                    many.enter_context(connect(tcp))
        until(lambda: said, "it is too much")
        if flooded == UDP:
            with connect(tcp) as client, accept(listening) as link:
                link.sendall(b"!")
                assert client.recv(1) == b"!"
        else:
            client = datagram()
            data, where = server.recvfrom(10)
            server.sendto(data, where)
            assert client.recv(10) == b"?"


def test_ports_that_are_all_taken_are_looked_at_once(monkeypatch):
    """Not once for each Service: with many Services and connections that takes minutes."""
    tried = []

    def taken(key, port):
        tried.append(port)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(listeners, "_listening", taken)
    with stage(ports=range(4100, 4200)) as made:
        keys = [ServicePortKey("ns", str(number), "", socket.IPPROTO_TCP, Family.IPV4) for number in range(50)]
        made.listeners.take({ListenerName(key, PoolKind.CLUSTER): Assignment((), 0, ()) for key in keys})
        assert len(tried) == 100
        made.listeners.take({ListenerName(keys[0], PoolKind.CLUSTER): Assignment((), 0, ())})
        assert len(tried) == 200
