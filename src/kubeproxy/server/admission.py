"""Limits the clients of the HTTP servers: their open connections, and the event loop's time for their answers.

All servers share the process's file descriptors and one limit of connections. Above the limit, the oldest connection of
the client with the most connections is dropped, so a client that opens many connections or sends incomplete requests
loses its own connections first. Answers are computed on the event loop that programs the kernel, and every pod can
reach the health ports. Each client, and all remote clients together, therefore get a limited share of the loop's time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from kubeproxy.kernel.proc.processes import shares
from kubeproxy.model.addresses import MAPPED

_MAX_DELAY: Final = 2.0  # seconds
_LEAVING: Final = 16  # the maximum number of connections that are simultaneously being closed to free descriptors
_SUBNET: Final = 8  # bytes of an IPv6 address that identify a client

SHARE: Final = 0.1  # share of the event loop's time for one client; a scrape of /metrics takes some 10 ms
REMOTE_SHARE: Final = 0.2
"""The share of the event loop's time for all remote clients (pods, other nodes); the kubelet's probes are local."""

BURST: Final = 1.0  # seconds of the event loop that a client may use in a burst
LEAST: Final = 1e-4  # seconds reserved for an answer before its time is measured
_ALL: Final = b"remote"
_MOST: Final = 4096  # recorded clients; above this number, clients that may use a full burst are removed


class Budget:
    """Records the time of the event loop that each client (see `peer_of`) has used beyond its share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at: dict[bytes, float] = {}

    def delay(self, peer: bytes) -> float:
        """Return the seconds until a client's next request may be answered."""
        return max(0.0, self._free_at.get(peer, 0.0) - self._clock())

    def reserve(self, peer: bytes, *, remote: bool) -> float:
        """Charge a client for a small answer; return the seconds until the answer may be made."""
        delay = max(self.delay(peer), self.delay(_ALL)) if remote else self.delay(peer)
        self._charge(peer, LEAST, remote)
        return delay

    def spend(self, peer: bytes, seconds: float, *, remote: bool) -> None:
        """Charge a client for an answer that took `seconds`, less the time that `reserve` charged for it."""
        if seconds > LEAST:
            self._charge(peer, seconds - LEAST, remote)

    def _charge(self, peer: bytes, seconds: float, remote: bool) -> None:
        oldest = self._clock() - BURST
        if len(self._free_at) > _MOST:
            self._free_at = {key: at for key, at in self._free_at.items() if at > oldest}
        for key, share in ((peer, SHARE), (_ALL, REMOTE_SHARE)) if remote else ((peer, SHARE),):
            self._free_at[key] = max(oldest, self._free_at.get(key, oldest)) + seconds / share


class OpenConnection(Protocol):
    """An open connection."""

    def abort(self) -> None:
        """Begin to close the connection; the server calls `Admission.leave` after the close."""


class Admission:
    """Counts the connections of all servers by client, and the listening sockets. `most` returns the maximum numbers of
    connections and of listening sockets."""

    def __init__(self, most: Callable[[], tuple[int, int]]) -> None:
        self.listening = 0
        self.budget = Budget()
        self._most = most
        self._peers: dict[bytes, dict[OpenConnection, None]] = {}
        self._peer_of: dict[OpenConnection, bytes] = {}
        self._leaving: set[OpenConnection] = set()

    @property
    def connected(self) -> int:
        """Number of connections, including those that are closing."""
        return len(self._peer_of) + len(self._leaving)

    def may_listen(self) -> bool:
        """Return whether another socket may listen."""
        return self.listening < self._most()[1]

    def has_room(self) -> bool:
        """Return whether another connection may be accepted now."""
        return self.connected < self._most()[0]

    def make_room(self) -> None:
        """Drop the oldest connection of the client with the most connections; `has_room` is true a moment later."""
        if self._peers and len(self._leaving) < _LEAVING:
            crowd = max(self._peers.values(), key=len)
            oldest = next(iter(crowd))
            self._forget(oldest)
            self._leaving.add(oldest)
            oldest.abort()

    def is_flooding(self, address: str) -> bool:
        """Return whether a client has exceeded its share so much that a request on a new connection would wait long."""
        return self.budget.delay(peer_of(address)) > _MAX_DELAY

    def enter(self, connection: OpenConnection, address: str) -> None:
        """Count an accepted connection from this address."""
        peer = peer_of(address)
        self._peers.setdefault(peer, {})[connection] = None
        self._peer_of[connection] = peer

    def leave(self, connection: OpenConnection) -> None:
        """Remove a closed connection from the count. A second call has no effect."""
        self._leaving.discard(connection)
        self._forget(connection)

    def _forget(self, connection: OpenConnection) -> None:
        peer = self._peer_of.pop(connection, None)
        if peer is not None:
            crowd = self._peers[peer]
            del crowd[connection]
            if not crowd:
                del self._peers[peer]


def peer_of(address: str) -> bytes:
    """Return the part of an address that identifies the client: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in address:
        return socket.inet_pton(socket.AF_INET, address)
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return packed[len(MAPPED) :] if packed.startswith(MAPPED) else packed[:_SUBNET]


PROCESS: Final = Admission(lambda: shares()[:2])
"""The only Admission of this process: the limit of file descriptors applies to the process as a whole."""
