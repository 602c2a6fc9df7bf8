"""The rows of the page's list of Services: short, as there may be 10,000 of them."""

from __future__ import annotations

from typing import Final

from kubeproxy.ask.listing import addresses, changed_at, endpoints, flags
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.model.plan import NOTHING, ServiceName
from kubeproxy.model.planner import Change

Row = tuple[str, str, int, int, str, str, list[str], float]
"""Name, state, ready and all endpoints, type, letters of its policies, addresses, and the time of the last change."""

_LEAVING: Final = {"deleting": "pending"}
"""States of /debug/state that the page does not distinguish."""


class Rows:
    """Makes rows of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def one(self, name: ServiceName, seen: float = 0.0) -> Row | None:
        """Return the row of a Service, None if deleted; `seen` is the time of its last observed change, or 0."""
        verdict = self._snapshot.verdict(name)
        if verdict is None:
            return None
        planner = self._snapshot.planner
        service = planner.services.get(name)
        slices = planner.slices.get(name, {}).values()
        plans = planner.compiled.get(name, NOTHING).plans
        count = endpoints(slices)
        return (
            f"{name[0]}/{name[1]}",
            _LEAVING.get(verdict[0], verdict[0]),
            count.ready,
            count.total,
            (service.spec.type or "ClusterIP") if service is not None else "",
            flags(plans, slices),
            list(addresses(plans)),
            max(seen, changed_at(service, slices)),
        )


def what(change: Change) -> str:
    """Return a short text about a change."""
    before, after = change.before.plans, change.after.plans
    if not before or not after:
        return "added" if after else "removed" if before else "changed"
    if [plan.frontends for plan in before] != [plan.frontends for plan in after]:
        return "addresses or ports"
    old, new = ({one for plan in plans for one in (*plan.cluster, *plan.local)} for plans in (before, after))
    if words := _difference(old, new):
        return f"endpoints {words}, {len(new)} now"
    old, new = ({one for plan in plans for one in plan.serving} for plans in (before, after))
    if words := _difference(old, new):
        return f"endpoints out of use {words}"
    return "policy" if before != after else "health check port"


def _difference(old: set[bytes], new: set[bytes]) -> str:
    return " ".join(f"{sign}{len(some)}" for sign, some in (("+", new - old), ("-", old - new)) if some)
