"""Elements read back: by key where the kernel counts them, and by dumps, in which it may repeat itself."""

import pytest
from hypothesis import given

from kubeproxy.backends.nftables import reading
from kubeproxy.backends.nftables.layout import BELOW, CLASSES, ENDPOINT_MAPS, Layout, SetId, packed_class, slot_bytes
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nfnetlink import Element
from kubeproxy.kernel.nft_contents import Contents
from kubeproxy.model.addresses import Family
from support.nftables_ground import FakeGround, resync
from support.nftables_plans import V4, cluster, plans_of
from support.random_plans import histories

WHOLE = [Element(b"a", b"1", 0, 0), Element(b"b", b"2", 0, 0)]
TORN = [WHOLE[0], WHOLE[0]]  # as while a hash table is resized: one twice, another one not at all


class Dumps:
    """A table that gives these dumps of its endpoints, one after the other, the last one for ever."""

    def __init__(self, *dumps):
        self.queue = list(dumps)

    def count(self, name):
        return None

    def contents(self, name):
        if name != "endpoints":
            return Contents.of(())
        return Contents.of(self.queue.pop(0) if len(self.queue) > 1 else self.queue[0])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(reading, "PAUSE", 0)


def test_a_dump_that_repeats_itself_is_read_again():
    table = Dumps(TORN, TORN, WHOLE)
    names = Layout(Family.IPV4).shapes
    read = reading.elements(table, names)
    assert read == {name: {b"a": b"1", b"b": b"2"} if name == "endpoints" else {} for name in names}
    assert not table.queue[1:]


def test_a_dump_that_never_becomes_whole_is_an_error():
    with pytest.raises(ApplyError, match="of endpoints completely"):
        reading.elements(Dumps(TORN), ["cluster-services", "endpoints"])


NAMES = tuple(Layout(V4).shapes)


class Counted:
    """A table, and what is asked of it."""

    def __init__(self, table):
        self.table = table
        self.dumped = []

    def count(self, name):
        return self.table.count(name)

    def lookup(self, name, keys):
        return self.table.lookup(name, keys)

    def contents(self, name):
        self.dumped.append(name)
        return self.table.contents(name)


def read(ground, family=V4):
    """Return the elements, and what was asked for them; they are those of dumps."""
    table = Counted(ground.table(family))
    found = reading.elements(table, NAMES)
    assert found == {name: table.table.contents(name).entries for name in NAMES}
    return found, table


class OneFrontend:
    """A table with one frontend that has so many endpoints."""

    def __init__(self, count):
        taken = min(count, CLASSES[-1])
        self.entries = {b"frontend" + slot: b"there" for slot in slot_bytes(taken)[:taken]}
        self.services = {b"frontend": packed_class(count)}
        self.asked = 0

    def count(self, name):
        return len(self.entries) if name == SetId.ENDPOINTS else 0

    def lookup(self, name, keys):
        assert name == SetId.ENDPOINTS
        self.asked += len(keys)
        return {key: self.entries[key] for key in keys if key in self.entries}

    def contents(self, name):
        assert name not in ENDPOINT_MAPS
        found = self.services if name == SetId.CLUSTER_SERVICES else {}
        return Contents(len(found), found)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 10, 11, 13, 24, 25, 33, 128, 129, 256, 300, 1025, 5000, 20_000, 70_000])
def test_endpoints_are_read_by_key_and_few_are_asked_for_in_vain(count):
    table = OneFrontend(count)
    assert reading.elements(table, NAMES)[SetId.ENDPOINTS] == table.entries
    assert table.asked <= count + 1 + count // 8


def test_every_class_but_the_first_has_one_below():
    assert all(BELOW[size] < size for size in CLASSES[1:])


@pytest.mark.parametrize(
    "line",
    [
        "add element ip kube-proxy endpoints { 10.96.9.9 . tcp . 80 . 0 : 10.244.0.9 . 80 }",  # of no frontend
        "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 7 : 10.244.0.9 . 80 }",  # beyond its class
        "flush map ip kube-proxy cluster-services",  # of none any more
    ],
)
def test_elements_that_no_class_accounts_for_are_found_by_a_dump(line):
    with FakeGround.fresh() as ground:
        resync(ground.start(), cluster("a", "b"))
        ground.disturb(line)
        assert SetId.ENDPOINTS in read(ground)[1].dumped


def test_a_slot_that_is_missing_is_no_gap_in_what_is_read():
    with FakeGround.fresh() as ground:
        resync(ground.start(), {("default", "a"): plans_of("a", 1, 20)})
        ground.disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 17 }")
        assert len(read(ground)[0][SetId.ENDPOINTS]) == 19


def test_kernels_that_do_not_count_are_asked_for_dumps():
    with FakeGround.fresh() as ground:
        resync(ground.start(), cluster("a", "b"))
        ground.kernel.counts = False
        assert set(read(ground)[1].dumped) == set(NAMES)


@given(histories(max_size=2))
def test_whatever_there_is_is_read(history):
    world, states = history
    with FakeGround.fresh() as ground:
        backend = ground.start(world)
        for plans in states:
            resync(backend, plans)
            read(ground, backend.family)
