"""The desired state of ipvs mode: the wishes of all Services together, and the effect of a change. Pure.

Set entries have a reference count: an entry stays until no Service wants it. A virtual server belongs to one Service; a
Service with the same address and port takes precedence over a NodePort, regardless of the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.backends.ipvs.render import NO_WISH, ServiceWish, Virtual
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.plan import ServiceName


class DesiredChange(NamedTuple):
    """The effect of changed Services: virtual servers as they were before, and set entries to add and to remove."""

    servers: Mapping[bytes, Virtual | None]
    added: Mapping[IpsetId, Sequence[SetEntry]]
    removed: Mapping[IpsetId, Sequence[SetEntry]]


class Desired:
    """The union of the wishes of all Services."""

    def __init__(self) -> None:
        self.servers: dict[bytes, Virtual] = {}
        self.touched = 0
        """The number of virtual servers, real servers and entries that may have changed since the last `take`."""
        self._wishes: dict[ServiceName, ServiceWish] = {}
        self._owner: dict[bytes, ServiceName] = {}
        self._rivals: dict[bytes, dict[ServiceName, Virtual]] = {}  # of keys that several Services want
        self._entries: dict[IpsetId, Counter[SetEntry]] = {set_id: Counter() for set_id in IpsetId}
        self._servers_before: dict[bytes, Virtual | None] = {}
        self._entries_before: dict[IpsetId, dict[SetEntry, bool]] = {}

    def load(self, wishes: Iterable[tuple[ServiceName, ServiceWish]]) -> None:
        """Add the wishes of Services that are new to this state; `take` does not return them."""
        for name, wish in wishes:
            self.change(name, wish)
        self._servers_before, self._entries_before, self.touched = {}, {}, 0

    def take(self) -> DesiredChange:
        """Return the effect of all changes since the last call."""
        added: dict[IpsetId, list[SetEntry]] = {}
        removed: dict[IpsetId, list[SetEntry]] = {}
        for set_id, noted in self._entries_before.items():
            for entry, before in noted.items():
                if (entry in self._entries[set_id]) != before:
                    (removed if before else added).setdefault(set_id, []).append(entry)
        change = DesiredChange(self._servers_before, added, removed)
        self._servers_before, self._entries_before, self.touched = {}, {}, 0
        return change

    @property
    def addresses(self) -> Iterable[bytes]:
        """Return the desired addresses of kube-ipvs0."""
        return (entry.ip for entry in self._entries[IpsetId.IPVS_IPS])

    def entries(self, set_id: IpsetId) -> Mapping[SetEntry, bool]:
        """Return the entries of a set, as a place of a state."""
        return dict.fromkeys(self._entries[set_id], True)

    def count(self, set_id: IpsetId) -> int:
        """Return the desired number of entries of a set."""
        return len(self._entries[set_id])

    def owner(self, key: bytes) -> ServiceName | None:
        """Return the Service that a virtual server belongs to, None for no Service."""
        return self._owner.get(key)

    def change(self, name: ServiceName, wish: ServiceWish) -> None:
        """Replace the wish of a Service, NO_WISH for one that is deleted."""
        before = self._wishes.pop(name, NO_WISH)
        if wish is not NO_WISH:
            self._wishes[name] = wish
        for key in before.servers.keys() - wish.servers.keys():
            self._claim(name, key, None)
        for key, virtual in wish.servers.items():
            if before.servers.get(key) != virtual:
                self._claim(name, key, virtual)
        for set_id in before.entries.keys() | wish.entries.keys():
            self._count(set_id, before.entries.get(set_id, set()), wish.entries.get(set_id, set()))

    def _claim(self, name: ServiceName, key: bytes, virtual: Virtual | None) -> None:
        claims = self._rivals.get(key)
        if claims is None:
            owner = self._owner.get(key, name)
            claims = {owner: self.servers[key]} if key in self.servers else {}
        if virtual is None:
            claims.pop(name, None)
        else:
            claims[name] = virtual
        if len(claims) > 1:
            self._rivals[key] = claims
        else:
            self._rivals.pop(key, None)
        if key not in self._servers_before:
            self._servers_before[key] = before = self.servers.get(key)
            self.touched += 1 + len(before.pool if before else ())
        if claims:
            winner = min(claims, key=lambda claimant: (claims[claimant].nodeport, claimant))
            self._owner[key], self.servers[key] = winner, claims[winner]
        else:
            self._owner.pop(key, None)
            self.servers.pop(key, None)

    def _count(self, set_id: IpsetId, before: set[SetEntry], after: set[SetEntry]) -> None:
        if before == after:
            return
        counts, noted = self._entries[set_id], self._entries_before.setdefault(set_id, {})
        self.touched += len(after ^ before)
        for entry in after - before:
            noted.setdefault(entry, entry in counts)
            counts[entry] += 1
        for entry in before - after:
            noted.setdefault(entry, True)
            counts[entry] -= 1
            if not counts[entry]:
                del counts[entry]
