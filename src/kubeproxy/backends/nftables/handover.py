"""Groups of changed Services that must change in one transaction: an address and port moves between them. Pure.

A transaction removes before it adds, so within one the key moves without a gap. With two transactions the later one
could remove the key that the earlier one added, or the kernel could refuse a key that still exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kubeproxy.backends.nftables.render import Placed
from kubeproxy.model.plan import ServiceName, ServicePlan

WantedPlans = tuple[ServiceName, tuple[ServicePlan, ...]]


def groups(
    changes: Iterable[WantedPlans], placed: Mapping[ServiceName, Sequence[Placed]]
) -> Iterable[Sequence[WantedPlans]]:
    """Return the changes in their order, grouped by transaction; a group stands at the place of its first member.

    `placed` has the placement of each Service in the kernel. Shared elements are counted, so they need no group.
    """
    ordered = list(changes)
    lost: dict[bytes, ServiceName] = {}
    gained: list[tuple[bytes, ServiceName]] = []
    if placed and len(ordered) > 1:
        for name, plans in ordered:
            before = [item.plan.frontends for item in placed.get(name, ())]
            after = [plan.frontends for plan in plans]
            if before != after:
                had = {frontend.key for frontends in before for frontend in frontends}
                has = {frontend.key for frontends in after for frontend in frontends}
                lost.update(dict.fromkeys(had - has, name))
                gained += [(key, name) for key in has - had]
    together: dict[ServiceName, set[ServiceName]] = {}
    for key, name in gained:
        giver = lost.get(key)
        if giver is not None:
            _join(together, giver, name)
    if not together:
        return [(change,) for change in ordered]
    found: dict[ServiceName, list[WantedPlans]] = {}
    first: dict[ServiceName, ServiceName] = {}
    for change in ordered:
        name = change[0]
        for member in together.get(name, ()):
            first.setdefault(member, name)
        found.setdefault(first.get(name, name), []).append(change)
    return found.values()


def _join(together: dict[ServiceName, set[ServiceName]], one: ServiceName, other: ServiceName) -> None:
    """Merge the groups of two Services; all members refer to the same set."""
    larger, smaller = (together.setdefault(name, {name}) for name in (one, other))
    if larger is smaller:
        return
    if len(larger) < len(smaller):
        larger, smaller = smaller, larger
    larger |= smaller
    for member in smaller:
        together[member] = larger
