"""Number of elements of plans in our table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubeproxy.backends.mode import Weight
from kubeproxy.backends.nftables.numbering import Numbers
from kubeproxy.backends.nftables.render import Parts, place_all
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan


def weigh(
    world: Globals,  # noqa: ARG001 - see backends.mode.Weigh
    family: Family,
    wanted: Mapping[ServiceName, tuple[ServicePlan, ...]],
    local: Sequence[bytes],  # noqa: ARG001
) -> Weight:
    """See backends.mode.Weigh."""
    numbers = Numbers()
    of_family = ([plan for plan in plans if plan.key.family is family] for plans in wanted.values())
    parts = Parts(item for plans in of_family for item in place_all(plans, (), numbers))
    return Weight(sum(map(len, parts.elements.values())) + sum(map(len, parts.pools.values())), "elements")
