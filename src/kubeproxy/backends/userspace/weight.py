"""How many elements plans are in our table, those for listeners included. Pure."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from itertools import product

from kubeproxy.backends.mode import Weight
from kubeproxy.backends.userspace.layout import elements, merged
from kubeproxy.backends.userspace.listeners import ListenerName, PoolKind
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan


def weigh(
    world: Globals,  # noqa: ARG001 - see backends.mode.Weigh
    family: Family,
    wanted: Mapping[ServiceName, tuple[ServicePlan, ...]],
    local: Sequence[bytes],  # noqa: ARG001
) -> Weight:
    """See backends.mode.Weigh."""
    own = [plan for plans in wanted.values() for plan in plans if plan.key.family is family]
    ports = {
        ListenerName(plan.key, kind): None if plan.key.protocol == socket.IPPROTO_SCTP else number % 0xFFFF + 1
        for number, (plan, kind) in enumerate(product(own, PoolKind))
    }
    all_of = merged(elements(plan, ports) for plan in own)
    return Weight(sum(map(len, all_of.values())), "elements")
