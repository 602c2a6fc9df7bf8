"""The operations that lead virtual servers from one state to the next, and the real servers that drain before deletion.

A real server that is not wanted any more gets weight 0: its connections go on, new ones go elsewhere. It is deleted
when it has no connections left, or when its time is up. UDP and SCTP servers go at once, as in kube-proxy: the kernel
then moves UDP flows to others (expire_nodest_conn), where with weight 0 they would talk to nobody for as long as the
client does not pause.
Pure: the clock and the counts are handed in.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from kubeproxy.backends.ipvs.layout import Scheduler
from kubeproxy.backends.ipvs.render import Virtual
from kubeproxy.kernel import ipvs

DEADLINE: Final = 900.0
"""Seconds a real server may drain: as long as the kernel remembers an idle TCP connection (IP_VS_TCP_S_ESTABLISHED in
net/netfilter/ipvs/ip_vs_proto_tcp.c). kube-proxy waits for as long as any client stays."""

CHECK: Final = 5.0
"""Seconds between looks at the connections of a virtual server with draining real servers; kube-proxy looks each 60."""

WEIGHT: Final = 1  # all endpoints are equal, as in kube-proxy


class Verb(IntEnum):
    """What a change does, as the kernel's command."""

    ADD_SERVICE = ipvs.ADD_SERVICE
    SET_SERVICE = ipvs.SET_SERVICE
    DELETE_SERVICE = ipvs.DELETE_SERVICE
    ADD_SERVER = ipvs.ADD_DESTINATION
    SET_SERVER = ipvs.SET_DESTINATION
    DELETE_SERVER = ipvs.DELETE_DESTINATION


class ServerStep(NamedTuple):
    """One change: of a virtual server (with its affinity), or of one of its real servers (with its weight)."""

    verb: Verb
    key: bytes
    affinity: int = 0
    destination: bytes = b""
    weight: int = WEIGHT


class ActualServer(NamedTuple):
    """A virtual server as the kernel has it: `same` says whether its scheduler and flags are ours; weights."""

    affinity: int
    same: bool
    weights: Mapping[bytes, int]


class Draining:
    """The real servers on their way out, and when their time is up."""

    def __init__(self, scheduler: Scheduler, deadline: float = DEADLINE) -> None:
        self._scheduler = scheduler
        self._patience = deadline
        self._deadlines: dict[bytes, dict[bytes, float]] = {}
        self._next_check = 0.0

    def due(self, now: float) -> bool:
        """Return whether it is time to look at their connections."""
        return bool(self._deadlines) and now >= self._next_check

    def keys(self) -> list[bytes]:
        """Return the virtual servers that have draining real servers."""
        return list(self._deadlines)

    def of(self, key: bytes) -> Iterable[bytes]:
        """Return the draining real servers of a virtual server."""
        return self._deadlines.get(key, {})

    def retain(self, found: Mapping[bytes, ActualServer]) -> None:
        """Forget those that the kernel does not have."""
        for key in self.keys():
            for destination in self._deadlines[key].keys() - found.get(key, _NOTHING).weights.keys():
                self._forget(key, destination)

    def change(self, key: bytes, before: Virtual | None, after: Virtual | None, now: float) -> Iterator[ServerStep]:
        """Yield the operations from one wish for a virtual server to another, newcomers first."""
        if after is None:
            if before is not None:
                self._deadlines.pop(key, None)
                yield ServerStep(Verb.DELETE_SERVICE, key)
            return
        old = frozenset(before.pool) if before else frozenset()
        new = frozenset(after.pool)
        if before is None:
            yield ServerStep(Verb.ADD_SERVICE, key, after.affinity)
        elif before.affinity != after.affinity:
            yield ServerStep(Verb.SET_SERVICE, key, after.affinity)
        draining = self._deadlines.get(key)
        for destination in after.pool:
            if destination not in old:
                verb = Verb.SET_SERVER if draining and self._forget(key, destination) else Verb.ADD_SERVER
                yield ServerStep(verb, key, destination=destination)
        for destination in sorted(old - new):
            yield self._let_go(key, destination, now)

    def adopt(self, key: bytes, found: ActualServer, after: Virtual, now: float) -> Iterator[ServerStep]:
        """Yield the operations from what the kernel has to a wish."""
        if found.affinity != after.affinity or not found.same:
            yield ServerStep(Verb.SET_SERVICE, key, after.affinity)
        new = frozenset(after.pool)
        for destination in after.pool:
            self._forget(key, destination)
            weight = found.weights.get(destination)
            if weight != WEIGHT:
                verb = Verb.ADD_SERVER if weight is None else Verb.SET_SERVER
                yield ServerStep(verb, key, destination=destination)
        for destination in sorted(found.weights.keys() - new):
            operation = self._let_go(key, destination, now)
            if found.weights[destination] or operation.weight:  # else it was let go before
                yield operation

    def finished(self, connections: Mapping[bytes, Mapping[bytes, int]], now: float) -> Iterator[ServerStep]:
        """Yield the deletion of those whose time is up, or that have no connections left.

        `connections` are counts by virtual server and destination; one that is in neither is gone already.
        """
        self._next_check = now + CHECK
        for key in self.keys():
            counts = connections.get(key, {})
            for destination, deadline in list(self._deadlines[key].items()):
                if destination not in counts:
                    self._forget(key, destination)
                elif not counts[destination] or now >= deadline:
                    self._forget(key, destination)
                    yield ServerStep(Verb.DELETE_SERVER, key, destination=destination)

    def _let_go(self, key: bytes, destination: bytes, now: float) -> ServerStep:
        if key[-3] != socket.IPPROTO_TCP or not self._scheduler.skips_draining:
            self._forget(key, destination)
            return ServerStep(Verb.DELETE_SERVER, key, destination=destination)
        if not self._deadlines:
            self._next_check = now + 1.0  # most have no connections at all
        deadlines = self._deadlines.setdefault(key, {})
        deadlines.setdefault(destination, now + self._patience)
        return ServerStep(Verb.SET_SERVER, key, destination=destination, weight=0)

    def _forget(self, key: bytes, destination: bytes) -> bool:
        """Return whether it was draining."""
        deadlines = self._deadlines.get(key, {})
        known = deadlines.pop(destination, None) is not None
        if known and not deadlines:
            del self._deadlines[key]
        return known


_NOTHING: Final = ActualServer(0, same=False, weights={})


def deletions(keys: Iterable[bytes]) -> list[ServerStep]:
    """Return the operations that delete virtual servers."""
    return [ServerStep(Verb.DELETE_SERVICE, key) for key in keys]
