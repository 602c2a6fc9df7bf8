"""The Services and endpoints of a soak, and their changes, determined by a seed. Pure.

Their number does not grow: if the proxy grows, the proxy itself is the cause.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from bench import objects

PORT = 8084
"""The network of the endpoints: far.py."""

FEWEST, MOST = 6, 14
"""The numbers of endpoints of a Service that scales: ten at first, later each number of this range."""

EXTRA = 50
"""One of this number of Services is deleted and created repeatedly; the others keep their open connections."""

_FIRST_ADDRESS = 0x0A800000  # 10.128.0.0
_ADDRESSES = 64  # the endpoints of each Service, so that an answer identifies the Service


class Write(NamedTuple):
    """One write to the API server; `body` is empty for a deletion."""

    resource: str
    key: tuple[str, str]
    body: str = ""


def is_udp(number: int) -> bool:
    """Return whether a Service uses UDP: one in ten does."""
    return number % 10 == 7


def owner(address: bytes) -> int:
    """Return the number of the Service of an endpoint's packed address."""
    return (int.from_bytes(address, "big") - _FIRST_ADDRESS) // _ADDRESSES


def endpoint(number: int, place: int) -> str:
    """Return one of a Service's addresses."""
    return objects.dotted(_FIRST_ADDRESS + number * _ADDRESSES + place)


class Cluster:
    """The present objects. `steady` Services remain; those from `coming` on are deleted and created."""

    def __init__(self, size: objects.Size, seed: int) -> None:
        self._chance = random.Random(seed)
        self.steady = size.services
        self._extra = range(size.services, size.services + max(2, size.services // EXTRA))
        self._places = {number: list(range(1, size.endpoints + 1)) for number in range(size.services)}
        self._places |= {number: list(range(1, size.endpoints + 1)) for number in self._extra[::2]}
        self._endpoints = size.endpoints
        self._next = dict.fromkeys([*range(size.services), *self._extra], size.endpoints)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of Services and endpoints."""
        return len(self._places), sum(map(len, self._places.values()))

    def beginning(self) -> Iterator[Write]:
        """Yield the writes that create the present objects."""
        for number in self._places:
            yield self._service(number)
            yield self._slice(number, "")

    def change(self, trigger: str) -> list[Write]:
        """Change one object; return its writes.

        `trigger` is the time of the change, as endpoint controllers record it.
        """
        kind = self._chance.random()
        if kind < 0.06:
            return self._come_or_go(self._chance.choice(self._extra), trigger)
        number = self._chance.randrange(self.steady)
        places = self._places[number]
        if kind < 0.17 and len(places) < MOST:
            places.append(self._fresh(number))
        elif 0.17 <= kind < 0.28 and len(places) > FEWEST:
            places.pop(self._chance.randrange(len(places)))
        else:
            places[self._chance.randrange(len(places))] = self._fresh(number)
        return [self._slice(number, trigger)]

    def _fresh(self, number: int) -> int:
        """Return an endpoint that the Service has not had for long, so that adding it is a change."""
        places, at = self._places[number], self._next[number]
        while (at := at % (_ADDRESSES - 2) + 1) in places:
            pass
        self._next[number] = at
        return at

    def _come_or_go(self, number: int, trigger: str) -> list[Write]:
        if number in self._places:
            namespace, name = objects.names(number)
            del self._places[number]
            keys = ("endpointslices", (namespace, f"{name}-0")), ("services", (namespace, name))
            return [Write(resource, key) for resource, key in keys]
        self._places[number] = []
        while len(self._places[number]) < self._endpoints:
            self._places[number].append(self._fresh(number))
        return [self._service(number), self._slice(number, trigger)]

    def _service(self, number: int) -> Write:
        protocol = "UDP" if is_udp(number) else "TCP"
        return Write("services", objects.names(number), objects.service(number, protocol=protocol))

    def _slice(self, number: int, trigger: str) -> Write:
        namespace, name = objects.names(number)
        addresses = [endpoint(number, place) for place in self._places[number]]
        protocol = "UDP" if is_udp(number) else "TCP"
        body = objects.endpoint_slice(number, addresses, trigger=trigger, protocol=protocol, port=PORT)
        return Write("endpointslices", (namespace, f"{name}-0"), body)
