"""How many rules plans are in iptables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.render import Dispatch, Style
from kubeproxy.backends.mode import Weight
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan


def weigh(
    world: Globals,
    family: Family,
    wanted: Mapping[ServiceName, tuple[ServicePlan, ...]],
    local: Sequence[bytes],  # noqa: ARG001 - see backends.mode.Weigh
) -> Weight:
    """See backends.mode.Weigh."""
    ours = world.of(family) or FamilyGlobals()
    contents = Contents(Style.of(family, ours.detector, localhost_counter=False))
    own = {name: tuple(plan for plan in plans if plan.key.family is family) for name, plans in wanted.items()}
    contents.load(own)
    rules = sum(rules.count("\n") for chains in contents.own_chains() for rules in chains.values())
    rules += sum(contents.shared(position).count("\n") for position in range(len(Dispatch._fields)))
    return Weight(rules, "rules")
