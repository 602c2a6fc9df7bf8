"""The desired state of ipvs mode: what all Services together want, and what changes when one of them does. Pure.

Set entries are counted: each stays until no Service wants it. A virtual server belongs to one Service; a NodePort gives
way to a Service that names the same address and port, whoever came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.backends.ipvs.render import NO_WISH, ServiceWish, Virtual
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.plan import ServiceName


class Touched(NamedTuple):
    """What may have changed, as it was before the first change: to be compared with the desired state."""

    servers: dict[bytes, Virtual | None]
    entries: dict[IpsetId, dict[SetEntry, bool]]

    @property
    def size(self) -> int:
        """Return how many things were touched."""
        servers = sum(1 + len(before.pool) if before else 1 for before in self.servers.values())
        return servers + sum(map(len, self.entries.values()))


def untouched() -> Touched:
    """Return that nothing was touched yet."""
    return Touched({}, {})


class Desired:
    """The wishes of all Services, put together."""

    def __init__(self) -> None:
        self.servers: dict[bytes, Virtual] = {}
        self._wishes: dict[ServiceName, ServiceWish] = {}
        self._owner: dict[bytes, ServiceName] = {}
        self._rivals: dict[bytes, dict[ServiceName, Virtual]] = {}  # of the keys that several ask for
        self._entries: dict[IpsetId, Counter[SetEntry]] = {set_id: Counter() for set_id in IpsetId}

    @property
    def addresses(self) -> Iterable[bytes]:
        """Return the addresses that kube-ipvs0 should carry."""
        return (entry.ip for entry in self._entries[IpsetId.IPVS_IPS])

    def entries(self, set_id: IpsetId) -> Mapping[SetEntry, bool]:
        """Return the entries of a set, as a place of a state."""
        return dict.fromkeys(self._entries[set_id], True)

    def count(self, set_id: IpsetId) -> int:
        """Return how many entries a set should hold."""
        return len(self._entries[set_id])

    def has_entry(self, set_id: IpsetId, entry: SetEntry) -> bool:
        """Return whether a set should hold an entry."""
        return entry in self._entries[set_id]

    def owner(self, key: bytes) -> ServiceName | None:
        """Return the Service that a virtual server belongs to, None for no Service."""
        return self._owner.get(key)

    def change(self, name: ServiceName, wish: ServiceWish, touched: Touched) -> None:
        """Replace what a Service wants (NO_WISH: it is gone), and note what that touches."""
        before = self._wishes.pop(name, NO_WISH)
        if wish is not NO_WISH:
            self._wishes[name] = wish
        for key in before.servers.keys() - wish.servers.keys():
            self._claim(name, key, None, touched)
        for key, virtual in wish.servers.items():
            if before.servers.get(key) != virtual:
                self._claim(name, key, virtual, touched)
        for set_id in before.entries.keys() | wish.entries.keys():
            self._count(set_id, before.entries.get(set_id, set()), wish.entries.get(set_id, set()), touched)

    def _claim(self, name: ServiceName, key: bytes, virtual: Virtual | None, touched: Touched) -> None:
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
        touched.servers.setdefault(key, self.servers.get(key))
        if claims:
            winner = min(claims, key=lambda claimant: (claims[claimant].nodeport, claimant))
            self._owner[key], self.servers[key] = winner, claims[winner]
        else:
            self._owner.pop(key, None)
            self.servers.pop(key, None)

    def _count(self, set_id: IpsetId, before: set[SetEntry], after: set[SetEntry], touched: Touched) -> None:
        if before == after:
            return
        counts, noted = self._entries[set_id], touched.entries.setdefault(set_id, {})
        for entry in after - before:
            noted.setdefault(entry, entry in counts)
            counts[entry] += 1
        for entry in before - after:
            noted.setdefault(entry, True)
            counts[entry] -= 1
            if not counts[entry]:
                del counts[entry]
