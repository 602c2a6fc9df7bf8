"""Who may be connected to the HTTP servers: so many at a time over all of them, and who goes when there are more.

Descriptors belong to the process, so that there is one count for it. A client that opens many connections, or half-open
requests, takes places from itself first: others are served, and so is the kernel.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, Protocol

from kubeproxy.kernel.proc.descriptors import shares
from kubeproxy.server.budget import Budget

_PATIENCE: Final = 2.0  # seconds
_LEAVING: Final = 16  # at most so many are on their way out: each of them makes one place
_MAPPED: Final = b"\0" * 10 + b"\xff" * 2  # ::ffff:0:0/96, IPv4 on a socket of both families
_SUBNET: Final = 8  # bytes of an IPv6 address that one client has to itself


class OpenConnection(Protocol):
    """An open connection."""

    def abort(self) -> None:
        """Drop it; it is gone, and says so, a moment later."""


class Admission:
    """The connections of all servers, by peer, and the sockets that listen for them. `most` of each there may be."""

    def __init__(self, most: Callable[[], tuple[int, int]]) -> None:
        self.listening = 0
        self.budget = Budget()
        self._most = most
        self._peers: dict[bytes, dict[OpenConnection, None]] = {}
        self._peer_of: dict[OpenConnection, bytes] = {}
        self._leaving: set[OpenConnection] = set()

    @property
    def connected(self) -> int:
        """How many connections there are, those that are about to go included."""
        return len(self._peer_of) + len(self._leaving)

    def may_listen(self) -> bool:
        """Whether one more socket may listen."""
        return self.listening < self._most()[1]

    def has_room(self) -> bool:
        """Whether one more may be accepted now."""
        return self.connected < self._most()[0]

    def make_room(self) -> None:
        """Have somebody go for one who waits; that takes a moment, so ask again for room."""
        if self._peers and len(self._leaving) < _LEAVING:
            # The oldest of the peer with the most: idle, half open, or one of a crowd that keeps others out.
            crowd = max(self._peers.values(), key=len)
            oldest = next(iter(crowd))
            self._forget(oldest)
            self._leaving.add(oldest)
            oldest.abort()

    def is_flooding(self, address: str) -> bool:
        """Whether a client's requests already wait for so long that one more connection of it would only wait."""
        return self.budget.delay(peer_of(address)) > _PATIENCE

    def enter(self, connection: OpenConnection, address: str) -> None:
        """Count a connection in that was accepted from this address."""
        peer = peer_of(address)
        self._peers.setdefault(peer, {})[connection] = None
        self._peer_of[connection] = peer

    def leave(self, connection: OpenConnection) -> None:
        """Count a connection out whose socket is closed. Safe to call twice."""
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
    """Return what addresses of one client have in common: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in address:
        return socket.inet_pton(socket.AF_INET, address)
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return packed[len(_MAPPED) :] if packed.startswith(_MAPPED) else packed[:_SUBNET]


PROCESS: Final = Admission(lambda: shares()[:2])
"""The one of this process, as its descriptors are its own."""
