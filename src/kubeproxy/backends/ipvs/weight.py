"""How many virtual servers, real servers and set entries plans are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kubeproxy.backends.ipvs.render import NodeAddresses, render
from kubeproxy.backends.mode import Weight
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan


def weigh(
    world: Globals, family: Family, wanted: Mapping[ServiceName, tuple[ServicePlan, ...]], local: Sequence[bytes]
) -> Weight:
    """See backends.mode.Weigh."""
    ours = world.of(family) or FamilyGlobals()
    nodeports = tuple(local) if ours.nodeport_ips is None else ours.nodeport_ips
    node = NodeAddresses(frozenset(local), nodeports, ours.node_ips)
    wish = render((plan for plans in wanted.values() for plan in plans if plan.key.family is family), node)
    count = sum(1 + len(server.pool) for server in wish.servers.values()) + sum(map(len, wish.entries.values()))
    return Weight(count, "virtual servers, real servers and entries of sets")
