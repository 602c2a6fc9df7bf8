"""The plans of a full sync, taken when the backend has read the kernel."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from functools import cached_property

from kubeproxy.model.plan import ServiceName, ServicePlan

Plans = dict[ServiceName, tuple[ServicePlan, ...]]


class LatestPlans(Mapping[ServiceName, tuple[ServicePlan, ...]]):
    """The plans of each Service, made by `take` at the first access, on the thread of the access.

    To read a kernel takes a tenth of a second or more, in which another kube-proxy may write newer plans: earlier plans
    would restore an endpoint that was removed.
    """

    def __init__(self, take: Callable[[], Plans]) -> None:
        self._take = take

    @cached_property
    def _plans(self) -> Plans:
        return self._take()

    def __getitem__(self, name: ServiceName) -> tuple[ServicePlan, ...]:
        return self._plans[name]

    def __iter__(self) -> Iterator[ServiceName]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def items(self) -> ItemsView[ServiceName, tuple[ServicePlan, ...]]:
        """Return names and plans, as quickly as a dict does."""
        return self._plans.items()
