"""Which endpoints are gone for good: those that were terminating when they left the slices. Events in; pure.

An endpoint that leaves while it is well (its label changed, it is not ready) may go on serving whom it serves. Its last
state is in no object any more, so this is remembered: the one thing here that depends on what was before.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.model.addresses import PORT_BYTES
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.plan import ServiceName

UPDATED: Final = 0.5
"""Seconds that an endpoint has to be missing after a slice was written without it: it may be on its way to another
slice, as the slices of a Service are written one after the other."""

DELETED: Final = 5.0
"""Seconds after its slice was deleted: a namespace that is deleted loses slices, Services and pods in any order, and
the pods finish what they do."""


SECONDS: Final = 3600
"""How long connections to an endpoint are reset: a TCP client gives up after a quarter of an hour (tcp_retries2), and
one that only waits is heard of again when it sends, or by a keepalive."""

MOST: Final = 1 << 16
"""Endpoints that are known to be gone; beyond it the first are let go."""


class Departed(NamedTuple):
    """What happened since the last look.

    `gone` are endpoints that are gone for good: address, protocol (1 byte) and port (2 bytes, network order). `taken`
    are the addresses that endpoints have now and nobody had before.
    """

    gone: tuple[bytes, ...] = ()
    taken: frozenset[bytes] = frozenset()


class _Missing(Struct, gc=False):
    """A terminating endpoint that no slice has any more: its Service, what it served, and when it counts as gone."""

    service: ServiceName
    keys: set[bytes]
    patience: float
    due: float = 0.0


class Departures:
    """Follows the addresses of endpoints through all slices. A pod is terminating as a whole, so addresses count."""

    def __init__(self) -> None:
        self._slices: dict[bytes, int] = {}  # address to the number of slices that have it
        self._terminating: dict[bytes, set[bytes]] = {}  # address to what it serves
        self._fresh: dict[bytes, _Missing] = {}  # since the last look
        self._missing: dict[bytes, _Missing] = {}
        self._gone: dict[bytes, _Missing] = {}  # those that were told to be, the first first; until they are due
        self._due: float | None = None
        self._taken: set[bytes] = set()

    @property
    def due(self) -> float | None:
        """Return when to look again at the latest, in the seconds of `look`; None when that is not needed."""
        return self._due

    def in_use(self, address: bytes) -> bool:
        """Return whether a slice has an endpoint with this packed address."""
        return address in self._slices

    def gone_from(self, service: ServiceName) -> Iterator[bytes]:
        """Yield what endpoints served that are gone from a Service, as in Departed: for who asks."""
        for one in self._gone.values():
            if one.service == service:
                yield from sorted(one.keys)

    def replace(self, service: ServiceName, before: Slice | None, after: Slice | None) -> None:
        """Take in that a slice of a Service is another one now; None is one that is not there."""
        had, has = _states(before), _states(after)
        for address in had.keys() - has.keys():
            self._lose(service, address, before, after)
        for address, terminating in has.items() - had.items():
            if address not in had:
                self._gain(address)
            if terminating and after is not None:
                self._terminating.setdefault(address, set()).update(_keys(address, after))
            else:  # it is not the same that was terminating before
                self._terminating.pop(address, None)

    def _gain(self, address: bytes) -> None:
        slices = self._slices[address] = self._slices.get(address, 0) + 1
        if slices == 1:
            self._taken.add(address)
            self._gone.pop(address, None)
            self._fresh.pop(address, None)
            self._missing.pop(address, None)

    def _lose(self, service: ServiceName, address: bytes, before: Slice | None, after: Slice | None) -> None:
        serves = self._terminating.get(address)
        if serves is not None and before is not None:
            serves.update(_keys(address, before))  # another Service's slice may not have said yet that it terminates
        self._slices[address] -= 1
        if self._slices[address]:
            return
        del self._slices[address]
        self._taken.discard(address)
        if serves is not None:
            del self._terminating[address]
            self._fresh[address] = _Missing(service, serves, UPDATED if after is not None else DELETED)

    def look(self, now: float, services: Container[ServiceName]) -> Departed:
        """Return what happened since the last look; `now` is in seconds, `services` are those that there are.

        Slices that went with their Service say nothing of its endpoints.
        """
        for missing in self._fresh.values():
            missing.due = now + missing.patience
            self._due = missing.due if self._due is None else min(self._due, missing.due)
        self._missing |= self._fresh
        self._fresh = {}
        gone: list[bytes] = []
        if self._due is not None and now >= self._due:
            ripe = {address: one for address, one in self._missing.items() if one.due <= now}
            for address, one in ripe.items():
                del self._missing[address]
                if one.service in services:
                    gone += sorted(one.keys)
                    one.due = now + SECONDS
                    self._gone[address] = one
            self._due = min((one.due for one in self._missing.values()), default=None)
        while self._gone and (len(self._gone) > MOST or next(iter(self._gone.values())).due <= now):
            del self._gone[next(iter(self._gone))]
        taken, self._taken = frozenset(self._taken), set()
        return Departed(tuple(gone), taken)


def _states(piece: Slice | None) -> dict[bytes, bool]:
    """Return the addresses of a slice, and whether what has them is terminating: of two alike, both."""
    if piece is None:
        return {}
    if piece.particular is None:
        return dict.fromkeys([destination[:-2] for destination in piece.destinations[0]], False)
    found: dict[bytes, bool] = {}
    for endpoint in piece.particular:
        found[endpoint.address] = endpoint.terminating and found.get(endpoint.address, True)
    return found


def _keys(address: bytes, piece: Slice) -> list[bytes]:
    """Return what an endpoint serves by a slice."""
    return [address + bytes((port.protocol,)) + PORT_BYTES[port.port] for port in piece.ports]
