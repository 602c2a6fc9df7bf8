"""UDP relay: the listener of a service port, and one session per client. A session has a socket connected to an
endpoint. A session ends after udpIdleTimeout without a datagram in any direction, but a session with more requests than
answers lasts as long as the timeout of connection tracking. When an endpoint is removed, its clients get new sessions.
Datagrams that do not fit into the system's buffers are lost."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from contextlib import suppress
from select import EPOLLIN
from typing import Any, Final

from msgspec import Struct

from kubeproxy.backends.relay.datapath import DataPath, RelayListener
from kubeproxy.model.addresses import Family, unpack
from kubeproxy.model.plan import Pool, ServicePortKey

_DATAGRAMS: Final = 64  # maximum number of datagrams relayed in one round of events
_IP_PKTINFO: Final = 8  # linux/in.h
_IPV6_PKTINFO: Final = 50  # linux/in6.h
_CONTROL: Final = 64
_KIND: Final = "sessions"  # kind of descriptors
_SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h

ROOM: Final = 1 << 20
"""Receive buffer of a listener in bytes, for about 2,700 small datagrams of all clients. The kernel doubles the size
for its overhead. The default of 208 KB is full after 280 datagrams, which a busy DNS server receives within
milliseconds."""

UNANSWERED: Final = 30.0
"""Seconds for which a session expects an answer. Later, after nf_conntrack_udp_timeout, an answer could not reach the
client."""

MOST_UNANSWERED: Final = 4096
"""Maximum number of sessions that may be idle longer than udpIdleTimeout, because each session uses a port. Above this
limit the oldest sessions end."""

_NO_DESCRIPTOR: Final = (
    "%s: a datagram was dropped, as the limit of open files leaves room for %d sessions: raise it "
    "(LimitNOFILE= of the unit, ulimit -n), or make udpIdleTimeout shorter"
)

Control = list[tuple[int, int, bytes]]


def prepare(sock: socket.socket, family: Family) -> None:
    """Set the options of a listener: the kernel reports the destination address of each datagram, so that answers can
    come from this address."""
    sock.setblocking(False)
    with suppress(OSError):  # if CAP_NET_ADMIN in the initial user namespace is missing, the default size remains
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, ROOM)
    if family is Family.IPV4:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)


def answering(control: Control) -> Control:
    """Return the control message for the answer to a datagram, from the datagram's control message: the answer's source
    is the datagram's destination address."""
    for level, kind, info in control:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            return [(level, kind, bytes(4) + info[8:12] + bytes(4))]  # struct in_pktinfo: index, spec_dst, addr
        if level == socket.IPPROTO_IPV6 and kind == _IPV6_PKTINFO:
            local_link = info[:2] == b"\xfe\x80"  # struct in6_pktinfo: addr, index
            return [(level, kind, info[:16] + (info[16:20] if local_link else bytes(4)))]
    return []


class UdpListener(RelayListener):
    """Receives the datagrams of one service port for one pool."""

    kind = _KIND

    def __init__(self, path: DataPath, sock: socket.socket, key: ServicePortKey, sessions: Sessions) -> None:
        super().__init__(path, sock, key)
        self.mine: dict[tuple[Any, bytes], Session] = {}
        self.left: set[Session] = set()
        self._sessions = sessions

    def retarget(self, pool: Pool, affinity: int, serving: Pool) -> None:
        """Replace the endpoints; end sessions with endpoints that no longer serve."""
        super().retarget(pool, affinity, serving)
        for session in [s for s in self.mine.values() if s.endpoint not in serving]:
            session.leave()

    def close(self) -> None:
        """Close the listener and all its sessions."""
        for session in [*self.mine.values(), *self.left]:
            session.close()
        super().close()

    def ready(self, fd: int, events: int) -> None:  # noqa: ARG002 - there is one socket, and one kind of event
        """Relay the datagrams of clients; see Watched."""
        buffer = self.path.buffer
        for _ in range(_DATAGRAMS):
            try:
                size, control, _, client = self.sock.recvmsg_into([buffer], _CONTROL)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error about an earlier answer
            self._forward(buffer[:size], client, control)

    def _forward(self, datagram: memoryview, client: Any, control: Control) -> None:
        name = client, control[0][2] if control else b""
        session = self.mine.get(name)
        if session is not None and session.send(datagram):
            return
        # If the session is new, or its endpoint refused the datagram (an ICMP error), try each endpoint at most once.
        failed: set[bytes] = {session.endpoint} if session is not None else set()
        while (endpoint := self.balancer.pick(client[0], failed)) is not None:
            sock = self._socket()
            if sock is None:
                return  # no socket is available, so other endpoints would fail too
            fresh = self._begin(name, endpoint, sock, answering(control))
            if fresh is not None and fresh.send(datagram):
                return
            failed.add(endpoint)

    def _socket(self) -> socket.socket | None:
        path = self.path
        if not (path.descriptors.take(_KIND, 1) or (self._sessions.make_room() and path.descriptors.take(_KIND, 1))):
            path.complain("sessions", _NO_DESCRIPTOR, self.key, path.descriptors.room(_KIND))
            return None
        try:
            return socket.socket(self.key.family, socket.SOCK_DGRAM)
        except OSError as error:
            path.descriptors.give(_KIND, 1)
            path.complain("sessions", "%s: cannot open a UDP session: %s", self.key, error)
            return None

    def _begin(self, name: tuple[Any, bytes], endpoint: bytes, sock: socket.socket, control: Control) -> Session | None:
        path = self.path
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, path.mark)
            sock.connect((unpack(endpoint[:-2]), int.from_bytes(endpoint[-2:], "big")))
            return Session(self, self._sessions, sock, endpoint, name, control)
        except OSError:
            path.descriptors.give(_KIND, 1)
            sock.close()
            return None


class Session(Struct, eq=False):
    """One client's socket to its endpoint."""

    _listener: UdpListener
    _sessions: Sessions
    _sock: socket.socket
    endpoint: bytes
    _name: tuple[Any, bytes]
    _control: Control
    _owed: int = 0
    _ended: bool = False

    def __post_init__(self) -> None:
        self._listener.path.watch(self._sock, self, EPOLLIN)
        self._listener.mine[self._name] = self

    @property
    def waits(self) -> bool:
        """Return whether the client sent more requests than it got answers."""
        return self._owed > 0

    def send(self, datagram: memoryview) -> bool:
        """Send a datagram to the endpoint. If the endpoint refused a datagram, close the session and return False."""
        try:
            self._sock.send(datagram)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return False
        self._owed += 1
        self._sessions.active(self)
        return True

    def ready(self, fd: int, events: int) -> None:  # noqa: ARG002 - there is one socket, and one kind of event
        """Relay the datagrams of the endpoint; see Watched."""
        buffer = self._listener.path.buffer
        for _ in range(_DATAGRAMS):
            try:
                size = self._sock.recv_into(buffer)
            except BlockingIOError:
                break
            except OSError:
                self.close()  # the endpoint's port is closed: the next datagram goes to another endpoint
                return
            with suppress(OSError):  # no buffer space, or no route to the client: the datagram is lost
                self._listener.sock.sendmsg([buffer[:size]], self._control, 0, self._name[0])
            self._owed = max(0, self._owed - 1)
        self._sessions.active(self)

    def leave(self) -> None:
        """Accept no more datagrams of the client; relay answers to its earlier datagrams for udpIdleTimeout."""
        if not self._owed:
            self.close()
            return
        del self._listener.mine[self._name]
        self._listener.left.add(self)
        self._owed = 0
        self._sessions.active(self)

    def close(self) -> None:
        """End the session."""
        if self._ended:
            return
        self._ended = True
        if self._listener.mine.get(self._name) is self:
            del self._listener.mine[self._name]
        self._listener.left.discard(self)
        self._sessions.forget(self)
        self._listener.path.release(self._sock)
        self._listener.path.descriptors.give(_KIND, 1)


class Sessions:
    """All sessions, ordered by their last use; ends idle sessions. A session with outstanding answers may be idle for
    longer."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._waiting: OrderedDict[Session, float] = OrderedDict()
        self._answered: OrderedDict[Session, float] = OrderedDict()
        self._looking = False

    def active(self, session: Session) -> None:
        """Record a use of a session."""
        now, before = (self._waiting, self._answered) if session.waits else (self._answered, self._waiting)
        before.pop(session, None)
        now[session] = time.monotonic()
        now.move_to_end(session)
        if not self._looking:
            self._looking = True
            self._path.later(self._path.udp_idle / 2, self._look)

    def forget(self, session: Session) -> None:
        """Remove a session that has ended."""
        self._waiting.pop(session, None)
        self._answered.pop(session, None)

    def make_room(self) -> bool:
        """End one session that was idle for longer than udpIdleTimeout; return False if there is no such session."""
        idle = time.monotonic() - self._path.udp_idle
        return bool(_end(self._answered, idle, 1) or _end(self._waiting, idle, 1))

    def _look(self) -> None:
        now = time.monotonic()
        idle = now - self._path.udp_idle
        _end(self._answered, idle, len(self._answered))
        _end(self._waiting, min(idle, now - UNANSWERED), len(self._waiting))
        _end(self._waiting, idle, len(self._waiting) - MOST_UNANSWERED)
        self._looking = bool(self._answered or self._waiting)
        if self._looking:
            self._path.later(self._path.udp_idle / 2, self._look)


def _end(sessions: OrderedDict[Session, float], before: float, most: int) -> int:
    """End at most `most` of the oldest sessions that were last used before a time; return their number."""
    ended = 0
    while ended < most and sessions:
        session, used = next(iter(sessions.items()))
        if used > before:
            break
        session.close()
        ended += 1
    return ended
