"""Plans that the kernel has just as they should be: after a restart nearly all. Pure.

Each element is compared once, and nothing is made to find a difference in: that is left to who has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from kubeproxy.backends.nftables.layout import SHARED, service_key, slot_bytes
from kubeproxy.backends.nftables.packing import Users
from kubeproxy.backends.nftables.render import Placed, translate, way_of
from kubeproxy.backends.state import Elements
from kubeproxy.model.plan import Policy, Pool, ServicePlan

_PAD = b"\0\0"
_NONE = repeat(None)  # without end
_LOCAL = Policy.LOCAL  # looked up once, see model.compile


def adopted(plans: Iterable[ServicePlan], actual: Elements, users: Users) -> tuple[Placed, ...] | None:
    """Return a Service's plans as the kernel has them, and take their elements out of `actual`.

    None when the kernel does not have all of them just so, or when there is more to look at (weights, affinity, source
    ranges); then nothing has changed. `users` counts who asks for what is shared.
    """
    taking = _Taking(actual)
    found: list[Placed] = []
    for plan in plans:
        placed = taking.placed(plan)
        if placed is None:
            taking.put_back()
            return None
        found.append(placed)
    for set_id, key in taking.shared:
        users[set_id][key] += 1
    return tuple(found)


class _Taking:
    """A recipient that takes what it is given out of what the kernel has. `right` as long as all of it is there."""

    def __init__(self, actual: Elements) -> None:
        self.shared: set[tuple[str, bytes]] = set()  # of a Service: each counts once
        self._right = True
        self._actual = actual
        self._taken: list[tuple[dict[bytes, bytes], list[bytes], list[bytes | None]]] = []
        self._pools: set[tuple[str, bytes]] = set()

    def placed(self, plan: ServicePlan) -> Placed | None:
        """Return a plan with its endpoints in the slots that they have, None if not all of it is as it should be."""
        if plan.affinity or plan.balance is not None or plan.source_ranges is not None:
            return None
        cluster: Pool | None = None
        local: Pool | None = None
        for frontend in plan.frontends:
            for endpoint_map, _, _, policy in way_of(frontend.kind, plan.traffic(frontend)).picked:
                # The other frontends have the same endpoints in the same slots, or they are not as they should be.
                if policy is _LOCAL and local is None:
                    local = self._order(endpoint_map, service_key(frontend.key), plan.local)
                elif policy is not _LOCAL and cluster is None:
                    cluster = self._order(endpoint_map, service_key(frontend.key), plan.cluster)
        found = Placed(plan, plan.cluster if cluster is None else cluster, plan.local if local is None else local, 0)
        if self._right:
            translate(found, self)
        return found if self._right else None

    def _order(self, set_id: str, key: bytes, pool: Pool) -> Pool:
        """Take the destinations of a pool; return them in their slots."""
        present = self._take(set_id, key, len(pool))
        self._pools.add((set_id, key))
        wanted = [destination + _PAD for destination in pool]
        if present == wanted:
            return pool
        own = dict(zip(wanted, pool, strict=True))
        found = tuple([own[destination] for destination in present if destination in own])
        self._right &= len(found) == len(set(found)) == len(pool)
        return found

    def _take(self, set_id: str, key: bytes, count: int) -> list[bytes | None]:
        entries = self._actual[set_id]
        keys = [key + slot for slot in slot_bytes(count)[:count]]
        present = list(map(entries.pop, keys, _NONE))
        self._taken.append((entries, keys, present))
        return present

    def entry(self, set_id: str, key: bytes, data: bytes) -> None:
        entries = self._actual[set_id]
        if set_id in SHARED:  # others may ask for it as well
            self._right &= key in entries
            self.shared.add((set_id, key))
            return
        present = entries.pop(key, None)
        self._taken.append((entries, [key], [present]))
        self._right &= present == data

    def pool(self, set_id: str, key: bytes, pool: Pool) -> None:
        if (set_id, key) not in self._pools:
            self._right &= self._take(set_id, key, len(pool)) == [destination + _PAD for destination in pool]

    def put_back(self) -> None:
        """Undo what was taken."""
        for entries, keys, present in self._taken:
            entries.update({key: data for key, data in zip(keys, present, strict=True) if data is not None})
