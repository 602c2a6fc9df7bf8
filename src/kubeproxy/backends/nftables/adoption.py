"""Fast path of adoption: Services whose elements in the kernel are as planned, nearly all after a restart. Pure.

Each element is compared once, without building the desired elements. Services that differ take the slow path in
`backend`.
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
_NONE = repeat(None)
_LOCAL = Policy.LOCAL  # looked up once, see model.compile


def adopted(plans: Iterable[ServicePlan], actual: Elements, users: Users) -> tuple[Placed, ...] | None:
    """Return a Service's plans in the slots of the kernel, and remove their elements from `actual`.

    Returns None, and changes nothing, if an element is missing or different, or if a plan has weights, affinity or
    source ranges. `users` counts the Services that use each shared element.
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
    """A recipient that removes each planned element from the elements of the kernel, and notes if one differs."""

    def __init__(self, actual: Elements) -> None:
        self.shared: set[tuple[str, bytes]] = set()  # each counts once for a Service
        self._right = True
        self._actual = actual
        self._taken: list[tuple[dict[bytes, bytes], list[bytes], list[bytes | None]]] = []
        self._pools: set[tuple[str, bytes]] = set()

    def placed(self, plan: ServicePlan) -> Placed | None:
        """Return a plan with its endpoints in the slots of the kernel; None if any element differs."""
        if plan.affinity or plan.balance is not None or plan.source_ranges is not None:
            return None
        cluster: Pool | None = None
        local: Pool | None = None
        for frontend in plan.frontends:
            for endpoint_map, _, _, policy in way_of(frontend.kind, plan.traffic(frontend)).picked:
                # `pool` below compares the other frontends with these slots.
                if policy is _LOCAL and local is None:
                    local = self._order(endpoint_map, service_key(frontend.key), plan.local)
                elif policy is not _LOCAL and cluster is None:
                    cluster = self._order(endpoint_map, service_key(frontend.key), plan.cluster)
        found = Placed(plan, plan.cluster if cluster is None else cluster, plan.local if local is None else local, 0)
        if self._right:
            translate(found, self)
        return found if self._right else None

    def _order(self, set_id: str, key: bytes, pool: Pool) -> Pool:
        """Remove the endpoints of a pool from `actual`; return them in slot order."""
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
        if set_id in SHARED:  # other Services may use it too
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
        """Add the removed elements to `actual` again."""
        for entries, keys, present in self._taken:
            entries.update({key: data for key, data in zip(keys, present, strict=True) if data is not None})
