"""Opens listeners: one for each service port and pool, on a port of portRange or on any free port."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Final, NamedTuple

from kubeproxy.backends.relay import tcp
from kubeproxy.backends.relay.datapath import DataPath, RelayListener
from kubeproxy.backends.userspace import udp
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Pool, ServicePlan, ServicePortKey

log = logging.getLogger("kubeproxy.userspace")

KINDS: Final[dict[int, socket.SocketKind]] = {
    socket.IPPROTO_TCP: socket.SOCK_STREAM,
    socket.IPPROTO_UDP: socket.SOCK_DGRAM,
}
_FORMER: Final = 1024
"""Maximum number of recorded ports of closed UDP listeners; beyond this number the oldest are removed."""

_ANY: Final = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 - the input chain admits only redirected traffic


class PoolKind(StrEnum):
    """A pool of a plan. Each pool has its own listener, because the rules decide which pool a connection may use."""

    CLUSTER = "cluster"
    LOCAL = "local"


class ListenerName(NamedTuple):
    """Identity of a listener."""

    key: ServicePortKey
    kind: PoolKind


class Assignment(NamedTuple):
    """The assignment of a listener: its endpoints, affinity in seconds, and the endpoints that may keep sessions."""

    pool: Pool
    affinity: int
    serving: Pool


def assignments(plan: ServicePlan) -> dict[ListenerName, Assignment]:
    """Return the listeners that a plan needs."""
    found = {}
    for frontend in plan.frontends:
        for action in plan.traffic(frontend):
            if action.forwards and plan.key.protocol in KINDS:
                kind = PoolKind.LOCAL if action.picks_local else PoolKind.CLUSTER
                pool = plan.local if action.picks_local else plan.cluster
                found[ListenerName(plan.key, kind)] = Assignment(pool, plan.affinity, plan.serving)
    return found


class Listeners:
    """The listeners of one family. The engine's threads call the methods; listeners run on the relay's thread."""

    def __init__(self, path: DataPath, sessions: udp.Sessions, ports: range) -> None:
        self._path = path
        self._sessions = sessions
        self._ports = ports
        self._next = 0
        self.exhausted = False
        """Whether a listener was not opened for lack of descriptors or memory."""
        self._full: set[int] = set()  # protocols that had no free port at the last attempt
        self._open: dict[ListenerName, RelayListener] = {}
        self._assignments: dict[ListenerName, Assignment] = {}
        self._former: dict[ListenerName, int] = {}  # the ports of UDP listeners that are closed

    def port(self, name: ListenerName) -> int | None:
        """Return the port of a listener; None if the listener could not be opened."""
        listener = self._open.get(name)
        return listener.port if listener is not None else None

    def recovered(self) -> bool:
        """Return whether listeners lacked descriptors and descriptors are free now."""
        if self.exhausted:
            with suppress(OSError), socket.socket():
                return True
        return False

    def names(self) -> Iterable[ListenerName]:
        """Return all open listeners."""
        return self._open.keys()

    def ports(self, key: ServicePortKey) -> dict[ListenerName, int | None]:
        """Return the ports of a service port's listeners; None for a listener that is not open."""
        return {name: self.port(name) for name in (ListenerName(key, kind) for kind in PoolKind)}

    def take(self, wanted: dict[ListenerName, Assignment]) -> None:
        """Open missing listeners, and set the assignments of all listeners."""
        changed = {name: assignment for name, assignment in wanted.items() if self._assignments.get(name) != assignment}
        self._full.clear()
        for name in changed:
            if name not in self._open and (listener := self._opened(name)) is not None:
                self._open[name] = listener
        work = [(self._open[name], assignment) for name, assignment in changed.items() if name in self._open]

        def apply() -> None:
            for listener, assignment in work:
                listener.retarget(*assignment)
                listener.open()

        if work:
            self._path.call(apply)
        self._assignments.update((name, assignment) for name, assignment in changed.items() if name in self._open)

    def drop(self, names: Iterable[ListenerName]) -> None:
        """Close these listeners, to which no rule redirects connections any more."""
        gone = []
        for name in list(names):
            self._assignments.pop(name, None)
            if (listener := self._open.pop(name, None)) is not None:
                gone.append(listener)
                if name.key.protocol == socket.IPPROTO_UDP:
                    self._former[name] = listener.port
        while len(self._former) > _FORMER:
            del self._former[next(iter(self._former))]

        def close() -> None:
            for listener in gone:
                listener.close()

        if gone:
            self._path.call(close)

    def _opened(self, name: ListenerName) -> RelayListener | None:
        try:
            sock = self._bound(name)
        except OSError as error:
            ports, hint = self._ports, "raise the limit of open files"
            if error.errno in tcp.EXHAUSTED:
                self.exhausted = True
            elif ports:
                hint = f"make portRange {ports[0]}-{ports[-1]} wider"
            log.error("%s: no listener: its clients are refused: %s; %s", name.key, error.strerror, hint)
            return None
        if name.key.protocol == socket.IPPROTO_TCP:
            return tcp.TcpListener(self._path, sock, name.key)
        return udp.UdpListener(self._path, sock, name.key, self._sessions)

    def _bound(self, name: ListenerName) -> socket.socket:
        """Return a listening socket. Raises OSError when no port is free. A UDP listener gets its former port if the
        port is free, because tracked flows of clients may still lead to this port."""
        key, former = name.key, self._former.pop(name, None)
        if former is not None:
            with suppress(OSError):
                return _listening(key, former)
        if not self._ports:
            return _listening(key, 0)
        turns = 0 if key.protocol in self._full else len(self._ports)
        for turn in range(turns):
            at = (self._next + turn) % len(self._ports)
            try:
                sock = _listening(key, self._ports[at])
            except OSError as error:
                if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                    raise
                continue
            self._next = at + 1
            return sock
        self._full.add(key.protocol)
        raise OSError(errno.EADDRINUSE, "all ports of the range are in use")


def _listening(key: ServicePortKey, port: int) -> socket.socket:
    sock = socket.socket(key.family, KINDS[key.protocol])
    try:
        if key.family is Family.IPV6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if key.protocol == socket.IPPROTO_TCP:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.prepare(sock)
        else:
            udp.prepare(sock, key.family)
        sock.bind((_ANY[key.family], port))
        if key.protocol == socket.IPPROTO_TCP:
            sock.listen(tcp.BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
