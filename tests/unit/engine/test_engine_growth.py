"""Slow start: the loop schedules itself while a share grows, and at no other time."""

import asyncio

from kubeproxy.model.objects import Annotations
from kubeproxy.model.plan import Policy
from support.staged_engine import endpoints, play, service, started


def test_shares_of_new_endpoints_grow_without_any_event():
    async def scene(stage):
        await started(stage, service("a", annotations=Annotations(slow_start="1")), endpoints("a", 1))
        stage.tell(endpoints("a", 1, 2))
        seen = []

        def grown():
            (plan,) = stage.programmed()["a"]
            weights = plan.weights(Policy.CLUSTER)
            if weights and weights not in seen:
                seen.append(weights)
            return len(plan.cluster) == 2 and not weights

        await stage.until(grown)
        assert len(seen) >= 2
        assert seen == sorted(seen)
        assert len(stage.backend.calls) <= 11
        assert stage.engine.planner.due is None
        assert stage.engine._alarm is None

    play(scene)


def test_without_slow_start_there_is_no_timer():
    async def scene(stage):
        await started(stage, service("a"), endpoints("a", 1))
        stage.tell(endpoints("a", 1, 2))
        await stage.settled()
        assert stage.engine._alarm is None
        await asyncio.sleep(0)

    play(scene)
