"""Runs a planner and the nftables backend through a history of steps as the engine does, on either ground.

A step is an event, a world, or a word: 'sync', 'restart', 'inspect'. After a refusal the backend compares everything.
"""

from __future__ import annotations

from collections.abc import Iterable

from kubeproxy.backends.mode import Depth
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan
from kubeproxy.model.planner import Planner
from support.nftables_ground import Ground

Plans = dict[ServiceName, tuple[ServicePlan, ...]]


class History:
    """The state of one family's backend, and whether a full comparison is due."""

    def __init__(self, ground: Ground, family: Family, world: Globals) -> None:
        self.ground = ground
        self.family = family
        self.planner = Planner(world)
        self.backend = ground.start(world, family)
        self.refused: ApplyError | None = None
        self._full = True

    def go(self, step: Globals | Event | str) -> None:
        """Do one step; `refused` is called with the kernel's refusal."""
        self.refused = None
        if isinstance(step, Globals):
            self.planner.set_world(step)
            self._full |= self.backend.set_world(step)
        elif step == "restart":
            self.backend = self.ground.start(self.planner.world, self.family)
            self._full = True
        elif step == "sync":
            self._apply()
        elif step == "inspect":
            if not self._full:
                self._inspect()
        else:
            assert not isinstance(step, str), step
            self.planner.apply([step])

    def recover(self) -> None:
        """Sync, and inspect all changes by other programs, until nothing is left to do.

        This takes two rounds at most, because the kernel refuses nothing any more.
        """
        for _ in range(2):
            self.go("sync")
            if self.refused is not None:
                raise self.refused
            self.go("inspect")
            if not self._full:
                return
        raise AssertionError("the kernel is not as it should be after it was repaired")

    @property
    def plans(self) -> Plans:
        """The expected state of the kernel, as of the last sync."""
        plans = {name: self._of(compiled.plans) for name, compiled in self.planner.compiled.items()}
        return {name: found for name, found in plans.items() if found}

    def _apply(self) -> None:
        changes = self.planner.take()
        try:
            if self._full:
                steps = self.backend.resync(self.plans)
            else:
                steps = self.backend.sync([(change.name, self._of(change.after.plans)) for change in changes])
            self._full = True  # until nothing is left to do
            for _ in steps:
                pass
            self._full = False
        except ApplyError as error:
            self.refused = error

    def _inspect(self) -> None:
        try:
            self._full |= self.backend.inspect(Depth.THOROUGH) is not None
        except ApplyError as error:
            self.refused = error

    def _of(self, plans: Iterable[ServicePlan]) -> tuple[ServicePlan, ...]:
        return tuple(plan for plan in plans if plan.key.family is self.family)
