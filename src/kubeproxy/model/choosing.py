"""Who of a pool is picked for a client, and how that is told: evenly, by weights, or by a hash of the client. Pure.

What answer.py says of a Service that is served, and balancing.py has decided for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from kubeproxy.model import maglev
from kubeproxy.model.plan import Hashing, HashKey, Policy, Pool, ServicePlan


class ClientAddress(NamedTuple):
    """Who asks: a packed address, None if the node picks one of its own; 0 where the port is unknown."""

    address: bytes | None
    port: int


def shares(plan: ServicePlan, pool: Pool, policy: Policy, client: ClientAddress) -> Iterable[tuple[bytes, float]]:
    """Return who of a pool may be picked, with the probability of each."""
    weights, hashing = plan.weights(policy), plan.balance.hashing if plan.balance is not None else None
    if hashing is None:
        whole = sum(weights) or len(pool)
        return [(d, weight / whole) for d, weight in zip(pool, weights or (1,) * len(pool), strict=True)]
    table, slot = maglev.fill(pool, weights, hashing.size), _slot(hashing, client)
    if slot is not None:
        return [(table[slot], 1.0)]
    counts = Counter(table)
    return [(d, counts[d] / hashing.size) for d in pool if counts[d]]


def carried(plan: ServicePlan) -> ServicePlan:
    """Return a plan as the proxy shares the connections that it carries itself: by weights, and nothing is hashed."""
    return plan if plan.balance is None else replace(plan, balance=replace(plan.balance, hashing=None))


def told(plan: ServicePlan, policy: Policy, client: ClientAddress) -> Iterator[str]:
    """Yield how connections are shared, where that is not evenly."""
    weights = plan.weights(policy)
    if weights:
        yield f"they have weights from {min(weights)} to {max(weights)}, and get as much of the connections"
    if plan.balance is None:
        return
    if plan.balance.drained:
        yield f"{counted(plan.balance.drained)} drained: weight 0, no new connections"
    if plan.balance.hashing is not None:
        yield _hashed(plan.balance.hashing, client)


def counted(endpoints: Collection[bytes]) -> str:
    """Return how many endpoints that are, in words."""
    return f"{len(endpoints)} endpoint{'s' * (len(endpoints) != 1)}"


def _slot(hashing: Hashing, client: ClientAddress) -> int | None:
    """Return the slot of a client in a table, None where not enough is known of it."""
    return maglev.slot_of(hashing, client.address, client.port) if client.address is not None else None


def _hashed(hashing: Hashing, client: ClientAddress) -> str:
    decides = "address decides" if hashing.key is HashKey.CLIENT else "address and port decide"
    slot = _slot(hashing, client)
    where = f"which is slot {slot} of {hashing.size}" if slot is not None else f"by a table of {hashing.size} slots"
    return f"Maglev: the client's {decides}, on every node alike, {where}"
