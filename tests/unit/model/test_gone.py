"""Deleted endpoints: tables of changes of slices, and properties that hold for all changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model.addresses import pack
from kubeproxy.model.answer import Packet, answer
from kubeproxy.model.choosing import Absent
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.gone import DELETED, SECONDS, UPDATED, Departed, Departures
from kubeproxy.model.objects import EndpointConditions, EndpointPort, EndpointSlice, Labels, ObjectMeta, SliceEndpoint
from kubeproxy.model.planner import Planner
from support.cluster_objects import dest, service, world

STATES = {
    "": EndpointConditions(ready=True, serving=True, terminating=False),
    "unready": EndpointConditions(ready=False, serving=False, terminating=False),
    "draining": EndpointConditions(ready=False, serving=True, terminating=True),
    "failed": EndpointConditions(ready=False, serving=False, terminating=True),
}


class Scene:
    """A planner with Services a and b, a clock, and slices as words: "1 2/draining"."""

    def __init__(self) -> None:
        self.departures = Departures()
        self.planner = Planner(world(), self.departures)
        self.now = 100.0
        self.planner.apply([Replaced("services", [service(name) for name in "ab"]), Replaced("endpointslices", [])])

    def write(self, name: str, text: str, port: int = 80) -> None:
        """Write a slice; the Service's name is its first letter."""
        self.planner.apply([Upserted("endpointslices", piece(name, text, port))])

    def delete(self, name: str, resource: str = "endpointslices") -> None:
        self.planner.apply([Deleted(resource, "default", name)])

    def look(self, seconds: float = 0.0) -> Departed:
        """Check immediately, and once more after this time."""
        first = self.departures.look(self.now, self.planner.services)
        self.now += seconds
        second = self.departures.look(self.now, self.planner.services)
        return Departed(first.gone + second.gone, first.taken | second.taken)

    def gone(self, seconds: float = UPDATED) -> set[str]:
        return words(self.look(seconds))

    def told(self) -> set[str]:
        """Return the report about Service a to a subscriber."""
        return words(Departed(tuple(self.departures.gone_from(("default", "a")))))


def piece(name: str, text: str, port: int = 80) -> EndpointSlice:
    parts = [word.partition("/") for word in text.split()]
    members = [SliceEndpoint([f"10.244.0.{number}"], STATES[state]) for number, _, state in parts]
    meta = ObjectMeta(name=name, namespace="default", labels=Labels(service_name=name[0]))
    return EndpointSlice(meta, "IPv4", members, [EndpointPort(port=port)])


def words(departed: Departed) -> set[str]:
    return {f"{key[3]}:{int.from_bytes(key[5:], 'big')}" for key in departed.gone}


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("1 2/draining", "1", {"2:80"}),
        ("1 2/failed", "1", {"2:80"}),
        ("1 2", "1", set()),  # a label changed, or the pod was killed before its end was visible
        ("1 2/unready", "1", set()),
        ("1 2/draining", "1 2", set()),  # another pod has the address
        ("1 2/draining 3/draining", "", {"2:80", "3:80"}),
        ("2 2/draining", "", set()),  # a healthy endpoint of another Service has it too
    ],
)
def test_the_last_state_decides(scene, before, after, gone):
    scene.write("a1", before)
    scene.look()
    scene.write("a1", after)
    assert scene.gone() == gone


def test_an_endpoint_that_moves_to_another_slice_is_not_deleted(scene):
    scene.write("a1", "1 2/draining")
    scene.write("a1", "1")
    assert scene.gone(UPDATED - 0.1) == set()
    scene.write("a2", "2/draining")
    assert scene.gone(9) == set()
    scene.write("a2", "")
    assert scene.gone() == {"2:80"}


def test_a_deleted_endpoint_is_deleted_for_all_ports_and_services(scene):
    scene.write("a1", "2/draining")
    scene.write("b1", "2/draining", port=9090)
    scene.write("a1", "")
    assert scene.gone(9) == set(), "b still has it"
    scene.write("b1", "")
    assert scene.gone() == {"2:80", "2:9090"}


def test_a_slice_that_lags_behind_does_not_hide_it(scene):
    scene.write("b1", "2", port=9090)
    scene.write("a1", "2/draining")
    scene.write("a1", "")
    scene.write("b1", "", port=9090)
    assert scene.gone() == {"2:80", "2:9090"}


def test_missed_deletions_show_in_the_next_list(scene):
    scene.write("a1", "1 2/draining")
    scene.write("a2", "3/draining 4")
    scene.planner.apply([Replaced("endpointslices", [piece("a1", "1")])])
    assert scene.gone() == {"2:80"}
    assert scene.gone(DELETED) == {"3:80"}


def test_slices_that_go_with_their_service_say_nothing(scene):
    scene.write("a1", "2/draining")
    scene.delete("a1")
    assert scene.gone(DELETED - 0.1) == set(), "Services and slices go in any order"
    scene.delete("a", "services")
    assert scene.gone(DELETED) == set()
    assert scene.departures.due is None


def test_a_slice_that_is_deleted_alone_counts(scene):
    scene.write("a1", "2/draining")
    scene.delete("a1")
    scene.look()
    assert scene.departures.due == pytest.approx(scene.now + DELETED)
    assert scene.gone(DELETED) == {"2:80"}


def test_an_address_is_in_use_for_any_next_owner(scene):
    scene.write("a1", "2/draining")
    scene.write("a1", "")
    scene.gone()
    scene.write("b7", "2/unready", port=9090)
    departed = scene.look()
    assert departed == Departed((), frozenset({pack("10.244.0.2")}))
    assert scene.departures.in_use(pack("10.244.0.2"))
    assert not scene.departures.in_use(pack("10.244.0.1"))


def test_by_default_deleted_endpoints_are_not_tracked():
    planner = Planner(world())
    planner.apply([Upserted("endpointslices", piece("a1", "1 2/draining"))])
    assert planner.departures is None


_TEXTS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(sorted(STATES))).map(lambda pair: f"{pair[0]}/{pair[1]}"), max_size=4
).map(" ".join)
_STEPS = st.lists(st.tuples(st.sampled_from(["a1", "a2", "b1"]), st.one_of(st.none(), _TEXTS)), max_size=12)


@given(_STEPS)
def test_an_endpoint_in_a_slice_or_last_seen_ready_is_not_deleted(steps):
    scene, there, terminated = Scene(), {}, set()
    for name, text in steps:
        if text is None:
            scene.delete(name)
            there.pop(name, None)
        else:
            scene.write(name, text)
            there[name] = text
            terminated |= {word.partition("/")[0] for word in text.split() if word.endswith(("draining", "failed"))}
        addresses = {word.partition("/")[0] for each in there.values() for word in each.split()}
        gone = {word.partition(":")[0] for word in scene.gone(DELETED)}
        assert not gone & addresses
        assert gone <= terminated
        assert all(scene.departures.in_use(pack(f"10.244.0.{n}")) == (str(n) in addresses) for n in range(1, 5))
    assert scene.departures.due is None


@given(_STEPS)
def test_when_all_slices_are_gone_nothing_is_remembered(steps):
    scene = Scene()
    for name, text in steps:
        scene.write(name, text or "")
    for name in ("a1", "a2", "b1"):
        scene.delete(name)
    scene.look(DELETED)
    scene.look(SECONDS)
    left = vars(scene.departures)
    assert not any(left.values()), left


def test_deleted_endpoints_are_listed_until_they_expire_or_return():
    scene = Scene()
    scene.write("a1", "1/draining 2/draining 3")
    scene.write("b1", "4/draining")
    scene.look()
    scene.write("a1", "")
    scene.write("b1", "")
    assert scene.told() == set()
    assert scene.gone() == {"1:80", "2:80", "4:80"}
    assert scene.told() == {"1:80", "2:80"}
    assert {one.destination: one.field for one in asked(scene)} == {
        dest(f"10.244.0.{n}:80"): "--reset-gone-endpoints" for n in (1, 2)
    }
    scene.write("b1", "1")
    assert scene.told() == {"2:80"}
    scene.look(SECONDS)
    assert scene.told() == set()


def asked(scene: Scene) -> tuple[Absent, ...]:
    scene.planner.take()
    return answer(scene.planner, Packet(None, pack("10.96.0.1") or b"", 6, 80), []).absent
