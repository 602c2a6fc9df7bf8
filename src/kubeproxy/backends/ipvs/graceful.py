"""Operations that change a virtual server from one state to the next; the draining of its real servers. Pure.

A real server that is no longer desired gets weight 0: its connections continue, new ones use other real servers. It is
deleted when it has no connections left, or at its deadline. UDP and SCTP real servers are deleted at once, as in the Go
kube-proxy: the kernel then moves UDP flows to other real servers (expire_nodest_conn). With weight 0, a flow would stay
with an endpoint that does not answer as long as its client sends without pause.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from kubeproxy.backends.ipvs.desired import Virtual
from kubeproxy.backends.ipvs.layout import Scheduler
from kubeproxy.kernel import ipvs

DEADLINE: Final = 900.0
"""Seconds a real server may drain: the kernel's timeout of an idle TCP connection (IP_VS_TCP_S_ESTABLISHED in
net/netfilter/ipvs/ip_vs_proto_tcp.c). The Go kube-proxy waits until the last connection ends."""

CHECK: Final = 5.0
"""Seconds between counts of the connections of a virtual server with draining real servers (Go kube-proxy: 60)."""

WEIGHT: Final = 1  # all endpoints have the same weight, as in the Go kube-proxy


class Verb(IntEnum):
    """Commands of the kernel."""

    ADD_SERVICE = ipvs.ADD_SERVICE
    SET_SERVICE = ipvs.SET_SERVICE
    DELETE_SERVICE = ipvs.DELETE_SERVICE
    ADD_SERVER = ipvs.ADD_DESTINATION
    SET_SERVER = ipvs.SET_DESTINATION
    DELETE_SERVER = ipvs.DELETE_DESTINATION


class ServerStep(NamedTuple):
    """An operation on a virtual server (with its affinity), or on one of its real servers (with its weight)."""

    verb: Verb
    key: bytes
    affinity: int = 0
    destination: bytes = b""
    weight: int = WEIGHT


class ActualServer(NamedTuple):
    """A virtual server in the kernel: affinity (s), whether scheduler and flags are ours, weights by real server."""

    affinity: int
    same: bool
    weights: Mapping[bytes, int]


class Draining:
    """The real servers that drain, with their deadlines."""

    def __init__(self, scheduler: Scheduler, deadline: float = DEADLINE) -> None:
        self._scheduler = scheduler
        self._deadline = deadline
        self._deadlines: dict[bytes, dict[bytes, float]] = {}
        self._next_check = 0.0

    def due(self, now: float) -> bool:
        """Return whether the connections of draining real servers are to be counted now."""
        return bool(self._deadlines) and now >= self._next_check

    def keys(self) -> list[bytes]:
        """Return the virtual servers with draining real servers."""
        return list(self._deadlines)

    def expected(self, key: bytes, virtual: Virtual | None) -> ActualServer | None:
        """Return the virtual server that the kernel has after a desired one is written."""
        if virtual is None:
            return None
        weights = dict.fromkeys(virtual.pool, WEIGHT) | dict.fromkeys(self._deadlines.get(key, ()), 0)
        return ActualServer(virtual.affinity, same=True, weights=weights)

    def retain(self, found: Mapping[bytes, ActualServer]) -> None:
        """Remove the entries of real servers that the kernel does not have."""
        for key in self.keys():
            there = found[key].weights if key in found else {}
            for destination in self._deadlines[key].keys() - there.keys():
                self._forget(key, destination)

    def change(
        self, key: bytes, found: ActualServer | None, wanted: Virtual | None, now: float
    ) -> Iterator[ServerStep]:
        """Yield the operations from the found virtual server to the wanted one, additions of real servers first."""
        if wanted is None:
            self._deadlines.pop(key, None)
            if found is not None:
                yield ServerStep(Verb.DELETE_SERVICE, key)
            return
        weights: Mapping[bytes, int] = {}
        if found is None:
            yield ServerStep(Verb.ADD_SERVICE, key, wanted.affinity)
        else:
            weights = found.weights
            if found.affinity != wanted.affinity or not found.same:
                yield ServerStep(Verb.SET_SERVICE, key, wanted.affinity)
        for destination in wanted.pool:
            self._forget(key, destination)
            weight = weights.get(destination)
            if weight != WEIGHT:
                verb = Verb.ADD_SERVER if weight is None else Verb.SET_SERVER
                yield ServerStep(verb, key, destination=destination)
        for destination in sorted(weights.keys() - frozenset(wanted.pool)):
            operation = self._let_go(key, destination, now)
            if weights[destination] or operation.weight:  # else it drains already
                yield operation

    def finished(self, connections: Mapping[bytes, Mapping[bytes, int]], now: float) -> Iterator[ServerStep]:
        """Yield the deletion of real servers past their deadline or without connections.

        `connections` are counts by virtual server and real server; a real server without a count is already deleted.
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
            self._next_check = now + 1.0  # most real servers have no connections
        deadlines = self._deadlines.setdefault(key, {})
        deadlines.setdefault(destination, now + self._deadline)
        return ServerStep(Verb.SET_SERVER, key, destination=destination, weight=0)

    def _forget(self, key: bytes, destination: bytes) -> None:
        deadlines = self._deadlines.get(key, {})
        if deadlines.pop(destination, None) is not None and not deadlines:
            del self._deadlines[key]
