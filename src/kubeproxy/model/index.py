"""Indexes of the plans of all Services, for the answers of model/answer.py. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from kubeproxy.model.plan import Frontend, ServiceName
from kubeproxy.model.planner import Planner


class Index:
    """Finds Services by address and by health check port. The indexes are built at their first use; the planner's plans
    must not change afterwards."""

    def __init__(self, planner: Planner) -> None:
        self._compiled = planner.compiled

    @cached_property
    def by_address(self) -> Mapping[bytes, Mapping[ServiceName, Sequence[Frontend]]]:
        """The frontends and ranges of ports at each packed address, by Service; b'' stands for NodePorts."""
        found: dict[bytes, dict[ServiceName, list[Frontend]]] = {}
        for name, compiled in self._compiled.items():
            for plan in compiled.plans:
                for frontend in plan.all_frontends:
                    found.setdefault(frontend.address, {}).setdefault(name, []).append(frontend)
        return found

    @cached_property
    def hairpins(self) -> frozenset[bytes]:
        """The addresses of all Services' endpoints with masqueraded connections to themselves."""
        return frozenset(one for each in self._compiled.values() for plan in each.plans for one in plan.hairpin)

    @cached_property
    def by_health_port(self) -> Mapping[int, Collection[ServiceName]]:
        """The Services with a health check port, by port."""
        found: dict[int, list[ServiceName]] = {}
        for name, compiled in self._compiled.items():
            if compiled.health is not None:
                found.setdefault(compiled.health.port, []).append(name)
        return found
