"""The state of a node, from which all answers are computed. It is the state of a running proxy, or it is built from
objects of a folder or an API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kubeproxy.engine.backlog import WORST_FIRST, FamilyStanding
from kubeproxy.features import PROXY_NAME
from kubeproxy.model.compile import of_another_proxy, skipped
from kubeproxy.model.plan import NOTHING, ServiceName, ServicePlan

if TYPE_CHECKING:  # commands that query a running proxy do not need all these modules
    from kubeproxy.api.source import Reach
    from kubeproxy.backends.mode import Mode
    from kubeproxy.config.options import Options
    from kubeproxy.engine.engine import Engine
    from kubeproxy.model.addresses import Family
    from kubeproxy.model.planner import Change, Planner
    from kubeproxy.report.health import ProxyHealth
    from kubeproxy.report.journal import Journal


class Planned:
    """Takes the place of engine and health if no proxy runs; no change is queued, and every plan is committed."""

    awaits = ""
    queued: Mapping[ServiceName, Change] = {}
    standings: tuple[FamilyStanding, ...] = ()

    def __init__(self, planner: Planner, local_addresses: Mapping[Family, Sequence[bytes]]) -> None:
        self.planner = planner
        self.local_addresses = local_addresses

    def committed(self, name: ServiceName) -> Sequence[ServicePlan]:
        """See Engine."""
        return self.planner.compiled.get(name, NOTHING).plans

    def unready(self) -> dict[str, str]:
        """See ProxyHealth."""
        return {}

    def last_updated(self, family: str) -> str | None:  # noqa: ARG002
        """See ProxyHealth."""
        return None


FINE_STATES: Final = ("programmed", "planned", "ignored")
"""States of a Service that need no further explanation."""


class Snapshot(NamedTuple):
    """The state of a node."""

    options: Options
    mode: Mode
    engine: Engine | Planned
    health: ProxyHealth | Planned
    reach: Callable[[], Reach | None]  # None if objects come from files
    started: float  # seconds since the epoch
    complete: Literal["programmed", "planned"] = "programmed"  # state of a Service without problem or queued change
    journal: Journal | None = None  # None without a running proxy

    @property
    def planner(self) -> Planner:
        """The objects, and the plans compiled from them."""
        return self.engine.planner

    @property
    def addresses(self) -> set[bytes]:
        """The node's own addresses, packed."""
        return {address for addresses in self.engine.local_addresses.values() for address in addresses}

    @property
    def names(self) -> list[ServiceName]:
        """All Services, including deleted Services that still have rules in the kernel."""
        return list({**self.planner.services, **self.engine.queued})

    @property
    def pending(self) -> int:
        """The number of Services with an uncommitted change."""
        return len(self.engine.queued) + self.planner.dirty

    def verdict(self, name: ServiceName) -> tuple[str, str] | None:
        """Return the state of a Service and its reason ('' for none), or None if the Service is unknown."""
        planner, queued = self.planner, name in self.engine.queued
        service, compiled = planner.services.get(name), planner.compiled.get(name)
        if service is None and not queued and not self._other_proxies(name):
            return None
        plans = (*(compiled or NOTHING).plans, *self.engine.committed(name))
        families = {plan.key.family for plan in plans}
        troubles = ((one.family, one.trouble) for one in self.engine.standings if one.family in families)
        unsound = [(trouble[0], family.label, trouble[1]) for family, trouble in troubles if trouble is not None]
        reasons = "; ".join(f"{family}: {why}" for _, family, why in unsound)
        if service is None and queued:
            return "deleting", reasons
        if unsound:
            return min((state for state, _, _ in unsound), key=WORST_FIRST.index), reasons
        if queued or (service is not None and (compiled is None or planner.is_dirty(name))):
            return "pending", ""
        if not (compiled or NOTHING).plans:
            return "ignored", self._why_ignored(name)
        return self.complete, ""

    def _why_ignored(self, name: ServiceName) -> str:
        service = self.planner.services.get(name)
        if service is None:
            return of_another_proxy(self._other_proxies(name)[0])
        families = " and ".join(family.label for family in self.planner.world.families)
        unusable = f"it has no port and address that can be used on this node ({families})"
        return skipped(service, self.planner.world) or unusable

    def _other_proxies(self, name: ServiceName) -> list[str]:
        ours = PROXY_NAME.value(self.planner.world) or None
        names = [piece.proxy_name for piece in self.planner.slices.get(name, {}).values()]
        return [each for each in names if each is not None and each != ours]


def unwatched(name: ServiceName) -> str:
    """Return a sentence about the reason why a Service is unknown."""
    return (
        f"no Service {name[0]}/{name[1]} that is watched: there is none, it is headless (spec.clusterIP is None), or"
        " another proxy's (label service.kubernetes.io/service-proxy-name)"
    )
