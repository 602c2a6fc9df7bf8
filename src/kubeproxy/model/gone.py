"""Tracks gone endpoints: endpoints that were terminating when they left their slices. Pure. An endpoint that leaves its
slices in another state (its label changed, or it is not ready) may still serve its connections. The tracker stores the
last state of each endpoint, because no object contains the state of an endpoint that left."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.model.addresses import PORT_BYTES
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.plan import ServiceName

UPDATED: Final = 0.5
"""Seconds until an endpoint that an update removed from its slice counts as deleted: the update that adds the
endpoint to another slice may arrive later."""

DELETED: Final = 5.0
"""Seconds from the deletion of a slice until its endpoints count as deleted: a deleted namespace's slices, Services and
pods disappear in any order, and its pods may still finish their work."""

SECONDS: Final = 3600
"""Seconds for which connections to a gone endpoint are reset. A TCP client that sends gives up after a quarter of an
hour (tcp_retries2), but an idle client may send data or a keepalive only later."""

MOST: Final = 1 << 16  # the maximum number of gone endpoints; beyond this number, the oldest are removed


class Departed(NamedTuple):
    """Endpoints that were deleted or added since the last `look`."""

    gone: tuple[bytes, ...] = ()  # deleted endpoints: address, protocol (1 byte) and port (2 bytes)
    taken: frozenset[bytes] = frozenset()  # addresses that new endpoints use


class _Missing(Struct, gc=False):
    """A terminating endpoint that left its slices: Service, ports, and the time from which it counts as deleted."""

    service: ServiceName
    keys: set[bytes]
    grace: float
    due: float = 0.0


class Departures:
    """Tracks endpoints by address over all slices, because a pod terminates with all its ports."""

    def __init__(self) -> None:
        self._slices: dict[bytes, int] = {}  # by address: the number of slices that contain the address
        self._terminating: dict[bytes, set[bytes]] = {}  # by address: keys of terminating endpoints, as in Departed
        self._fresh: dict[bytes, _Missing] = {}  # endpoints that left since the last `look`
        self._missing: dict[bytes, _Missing] = {}
        self._gone: dict[bytes, _Missing] = {}  # reported endpoints, oldest first, while their connections are reset
        self.due: float | None = None  # the latest time for the next `look`, in seconds; None: no `look` is due
        self._taken: set[bytes] = set()

    def in_use(self, address: bytes) -> bool:
        """Return whether a slice has an endpoint with this packed address."""
        return address in self._slices

    def gone_from(self, service: ServiceName) -> Iterator[bytes]:
        """Yield the deleted endpoints of a Service, in the form of Departed."""
        for one in self._gone.values():
            if one.service == service:
                yield from sorted(one.keys)

    def replace(self, service: ServiceName, before: Slice | None, after: Slice | None) -> None:
        """Replace a slice of a Service. `before` is None for a new slice, `after` is None for a deleted slice."""
        had, has = _states(before), _states(after)
        for address in had.keys() - has.keys():
            self._lose(service, address, before, after)
        for address, terminating in has.items() - had.items():
            if address not in had:
                self._gain(address)
            if terminating and after is not None:
                self._terminating.setdefault(address, set()).update(_keys(address, after))
            else:  # a new pod uses the address of the terminating pod
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
            serves.update(_keys(address, before))  # a slice of another Service may not show the termination yet
        self._slices[address] -= 1
        if self._slices[address]:
            return
        del self._slices[address]
        self._taken.discard(address)
        if serves is not None:
            del self._terminating[address]
            self._fresh[address] = _Missing(service, serves, UPDATED if after is not None else DELETED)

    def look(self, now: float, services: Container[ServiceName]) -> Departed:
        """Return the changes since the last call. `now` is in seconds; `services` are the existing Services. The
        deletion of slices together with their Service does not prove that the endpoints are deleted."""
        for missing in self._fresh.values():
            missing.due = now + missing.grace
            self.due = missing.due if self.due is None else min(self.due, missing.due)
        self._missing |= self._fresh
        self._fresh = {}
        gone: list[bytes] = []
        if self.due is not None and now >= self.due:
            ripe = {address: one for address, one in self._missing.items() if one.due <= now}
            for address, one in ripe.items():
                del self._missing[address]
                if one.service in services:
                    gone += sorted(one.keys)
                    one.due = now + SECONDS
                    self._gone[address] = one
            self.due = min((one.due for one in self._missing.values()), default=None)
        while self._gone and (len(self._gone) > MOST or next(iter(self._gone.values())).due <= now):
            del self._gone[next(iter(self._gone))]
        taken, self._taken = frozenset(self._taken), set()
        return Departed(tuple(gone), taken)


def _states(piece: Slice | None) -> dict[bytes, bool]:
    if piece is None:
        return {}
    if piece.particular is None:
        return dict.fromkeys([destination[:-2] for destination in piece.destinations[0]], False)
    found: dict[bytes, bool] = {}
    for endpoint in piece.particular:
        found[endpoint.address] = endpoint.terminating and found.get(endpoint.address, True)
    return found


def _keys(address: bytes, piece: Slice) -> list[bytes]:
    return [address + bytes((port.protocol,)) + PORT_BYTES[port.port] for port in piece.ports]
