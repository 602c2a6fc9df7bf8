"""Properties of the planner: incremental equals full compilation, independence of order and repetition, no errors."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kubeproxy.model import planner as planner_module
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.plan import NOTHING
from kubeproxy.model.planner import Planner
from support.cluster_objects import world as simple_world
from support.cluster_strategies import events, rival_worlds, rivalries, services, slices, worlds
from support.compiled import compile_service
from support.effort import examples


def full(objects, world):
    """Return the state of a planner that gets only the final objects."""
    planner = Planner(world)
    planner.apply([Replaced(resource, list(found.values())) for resource, found in objects.items()])
    planner.take()
    return planner.compiled


def record(objects, event):
    """Keep the last state of each object according to the events."""
    if isinstance(event, Upserted):
        objects[event.resource][identity(event.object)] = event.object
    elif isinstance(event, Deleted):
        objects[event.resource].pop((event.namespace, event.name), None)
    elif isinstance(event, Replaced):
        known = objects[event.resource]
        kept = {name: obj for name, obj in known.items() if name in event.kept}
        objects[event.resource] = kept | {identity(obj): obj for obj in event.objects}


def identity(obj):
    return obj.metadata.namespace, obj.metadata.name


steps = st.lists(events | st.sampled_from(["take", "take", "mark all"]) | worlds, max_size=25)


def check_incremental(data, world, sequence):
    planner = Planner(world)
    objects = {"services": {}, "endpointslices": {}}
    programmed = {}
    for step in [*sequence, "take"]:
        if step == "take":
            for change in planner.take():
                assert change.before == programmed.get(change.name, NOTHING)
                assert change.after != change.before
                programmed[change.name] = change.after
            assert planner.take() == []
            assert planner.dirty == 0
        elif step == "mark all":
            planner.mark_all()
        elif isinstance(step, type(world)):
            world = step
            planner.set_world(world)
        else:
            planner.apply([step])
            record(objects, step)
    shuffled = {kind: dict(data.draw(st.permutations(list(found.items())))) for kind, found in objects.items()}
    expected = full(shuffled, world)
    assert planner.compiled == expected
    assert {n: c for n, c in programmed.items() if c != NOTHING} == {n: c for n, c in expected.items() if c != NOTHING}


@examples(150)
@given(st.data(), worlds, steps)
def test_incremental_equals_full(data, world, sequence):
    check_incremental(data, world, sequence)


@examples(200)
@given(st.data(), st.lists(rivalries | st.just("take") | rival_worlds, min_size=5, max_size=20))
def test_incremental_equals_full_among_rivals(data, sequence):
    check_incremental(data, simple_world(), sequence)


@st.composite
def works(draw):
    """Return lists and changes of two resources as long tasks, each in the order of its resource, and takes."""
    found = draw(st.lists(rivalries | events, min_size=3, max_size=20))
    return found, draw(st.lists(st.sampled_from(["services", "endpointslices", "take"]), max_size=80))


@examples(200)
@given(st.data(), works())
def test_steps_of_work_may_come_between_each_other(data, pair):
    found, turns = pair
    world, objects = simple_world(), {"services": {}, "endpointslices": {}}
    planner, programmed = Planner(world), {}
    for event in found:
        record(objects, event)

    def program(changes):
        for change in changes:
            assert change.before == programmed.get(change.name, NOTHING)
            programmed[change.name] = change.after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "STEP", 1)
        work = {
            resource: planner.applying([event for event in found if event.resource == resource])
            for resource in ("services", "endpointslices")
        }
        taking = iter(())
        for turn in turns:
            if turn == "take":
                changes = next(taking, None)
                if changes is None:
                    taking = planner.taking()
                program(changes or ())
            else:
                next(work[turn], None)
        for steps in work.values():
            for _ in steps:
                pass
        for changes in itertools.chain(taking, planner.taking()):
            program(changes)
    shuffled = {kind: dict(data.draw(st.permutations(list(known.items())))) for kind, known in objects.items()}
    expected = full(shuffled, world)
    assert planner.compiled == expected
    assert {n: c for n, c in programmed.items() if c != NOTHING} == {n: c for n, c in expected.items() if c != NOTHING}


@st.composite
def interleavings(draw):
    """Return two interleavings of the same histories, one history per object; the second one repeats events."""
    histories = {}
    for event in draw(st.lists(events.filter(lambda e: isinstance(e, Upserted | Deleted)), max_size=12)):
        name = identity(event.object) if isinstance(event, Upserted) else (event.namespace, event.name)
        histories.setdefault((event.resource, name), []).append(event)
    order = [owner for owner, history in histories.items() for _ in history]

    def merged(sequence):
        left = {owner: iter(history) for owner, history in histories.items()}
        return [next(left[owner]) for owner in sequence]

    one, two = merged(draw(st.permutations(order))), merged(draw(st.permutations(order)))
    return one, [event for event in two for _ in range(draw(st.integers(1, 2)))]


@examples(40)
@given(worlds, interleavings(), st.integers(1, 5))
def test_the_order_of_different_objects_and_repetition_do_not_matter(world, pair, chunk):
    one, two = pair
    first, second = Planner(world), Planner(world)
    first.apply(one)
    for start in range(0, len(two), chunk):
        second.apply(two[start : start + chunk])
        second.take()
    first.take()
    assert first.compiled == second.compiled


@examples(100)
@given(services(), st.lists(slices(), max_size=3), worlds)
def test_plans_are_well_formed(service, found, world):
    pieces = [piece for piece in map(parse_slice, found) if piece is not None]
    compiled = compile_service(service, pieces, world)
    assume(compiled.plans)
    keys = [(plan.key.family, frontend.key) for plan in compiled.plans for frontend in plan.frontends]
    assert len(keys) == len(set(keys))
    for plan in compiled.plans:
        for pool in (plan.cluster, plan.local, plan.serving, plan.hairpin):
            assert list(pool) == sorted(set(pool))
        size = plan.key.family.address_size
        assert {len(d) for d in (*plan.cluster, *plan.local, *plan.serving)} <= {size + 2}
        assert {len(a) for a in plan.hairpin} <= {size}
        assert set(plan.cluster) | set(plan.local) <= set(plan.serving)
        drained = plan.balance.drained if plan.balance is not None else ()
        assert set(plan.hairpin) <= {d[:-2] for d in (*plan.cluster, *plan.local, *drained)}
        for frontend in plan.frontends:
            for action in plan.traffic(frontend):
                pool = plan.local if action.picks_local else plan.cluster
                assert bool(pool) or not action.forwards
    assert all(problem.field and len(problem.reason) < 300 for problem in compiled.problems)
