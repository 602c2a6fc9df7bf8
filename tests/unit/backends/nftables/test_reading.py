"""Elements read back: endpoints by key, some Services at a time, all others by dumps, which may repeat themselves."""

import pytest
from hypothesis import given

from kubeproxy.backends.nftables import reading
from kubeproxy.backends.nftables.layout import BELOW, CLASSES, ENDPOINT_MAPS, Layout, SetId, packed_class, slot_bytes
from kubeproxy.backends.nftables.render import render
from kubeproxy.errors import ApplyError
from support.nftables_ground import FakeGround, resync
from support.nftables_plans import V4, cluster, plans_of
from support.random_plans import histories

WHOLE = [(b"a", b"1"), (b"b", b"2")]
TORN = [WHOLE[0], WHOLE[0]]  # as while a hash table is resized: one twice, another one not at all
NAMES = tuple(Layout(V4).shapes)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(reading, "PAUSE", 0)


class Dumps:
    """A table that gives these dumps of its cluster IPs, one after the other, the last one for ever."""

    def __init__(self, *dumps):
        self.queue = list(dumps)

    def pairs(self, name):
        if name != SetId.CLUSTER_IPS:
            return []
        return [self.queue.pop(0) if len(self.queue) > 1 else self.queue[0]]


def test_a_dump_that_repeats_itself_is_read_again():
    table = Dumps(TORN, TORN, WHOLE)
    read = reading.frontends_and_sets(table, NAMES)
    assert read == {name: dict(WHOLE) if name == SetId.CLUSTER_IPS else {} for name in NAMES}
    assert not table.queue[1:]


def test_a_dump_that_never_becomes_whole_is_an_error():
    with pytest.raises(ApplyError, match="of cluster-ips completely"):
        reading.frontends_and_sets(Dumps(TORN), NAMES)


class Watched:
    """A table, with the names of the sets that are dumped, and a look at each question for elements by key."""

    def __init__(self, table, asked=lambda: None):
        self.table = table
        self.dumped = []
        self.asked = asked

    def count(self, name):
        return self.table.count(name)

    def lookup(self, name, keys):
        self.asked()
        return self.table.lookup(name, keys)

    def pairs(self, name):
        self.dumped.append(name)
        return self.table.pairs(name)


def read(ground, family=V4):
    """Return all elements, as an adoption without any Service reads them, and the table; they are those of dumps."""
    table = Watched(ground.table(family))
    found = reading.frontends_and_sets(table, NAMES)
    reading.EndpointReader(table, found).rest(dict)
    assert found == {name: dict(*table.table.pairs(name)) for name in NAMES}
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
        assert name == SetId.ENDPOINTS or not keys
        self.asked += len(keys)
        return {key: self.entries[key] for key in keys if key in self.entries}

    def pairs(self, name):
        assert name not in ENDPOINT_MAPS
        return [list(self.services.items())] if name == SetId.CLUSTER_SERVICES else []


@pytest.mark.parametrize("count", [1, 2, 8, 9, 10, 11, 13, 24, 25, 33, 128, 129, 256, 300, 1025, 5000, 20_000, 70_000])
def test_endpoints_are_read_by_key_and_few_are_asked_for_in_vain(count):
    table = OneFrontend(count)
    found = reading.frontends_and_sets(table, NAMES)
    reading.EndpointReader(table, found).rest(dict)
    assert found[SetId.ENDPOINTS] == table.entries
    assert table.asked <= count + 1 + count // 8


def test_every_class_but_the_first_has_one_below():
    assert all(BELOW[size] < size for size in CLASSES[1:])


STRAYS = [
    "add element ip kube-proxy endpoints { 10.96.9.9 . tcp . 80 . 0 : 10.244.0.9 . 80 }",  # of no frontend
    "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 7 : 10.244.0.9 . 80 }",  # beyond its class
    "flush map ip kube-proxy cluster-services",  # of none any more
]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("line", STRAYS)
def test_elements_that_no_class_accounts_for_are_found_by_a_dump(line, counts):
    with FakeGround.fresh() as ground:
        ground.kernel.counts = counts
        plans = cluster("a", "b")
        backend = ground.start()
        resync(backend, plans)
        ground.disturb(line)
        assert SetId.ENDPOINTS in read(ground)[1].dumped
        resync(backend, plans)
        ground.is_clean(backend, plans)


def test_a_slot_that_is_missing_is_no_gap_in_what_is_read():
    with FakeGround.fresh() as ground:
        resync(ground.start(), {("default", "a"): plans_of("a", 1, 20)})
        ground.disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 17 }")
        assert len(read(ground)[0][SetId.ENDPOINTS]) == 19


def test_an_adoption_holds_the_endpoints_of_some_services_at_a_time(monkeypatch):
    many = {("default", f"s{n}"): plans_of(f"s{n}", n, 20) for n in range(1, 41)}
    monkeypatch.setattr(reading, "SERVICES", 4)
    with FakeGround.fresh() as ground:
        resync(ground.start(), many)
        table = Watched(ground.table(V4))
        found = reading.frontends_and_sets(table, NAMES)
        held = []
        table.asked = lambda: held.append(len(found[SetId.ENDPOINTS]))
        for _ in reading.EndpointReader(table, found).ahead(many.items()):
            found[SetId.ENDPOINTS].clear()
        assert max(held) <= 4 * 20


def test_an_inspection_asks_for_a_part_of_the_endpoints_at_a_time(monkeypatch):
    many = {("default", f"s{n}"): plans_of(f"s{n}", n, 20) for n in range(1, 41)}
    monkeypatch.setattr(reading, "AT_ONCE", 50)
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, many)
        table, asked = ground.table(V4), []
        desired = (render(placed) for placed in backend._placed.values())
        monkeypatch.setattr(
            table, "lookup", lambda name, keys, ask=table.lookup: asked.append(len(keys)) or ask(name, keys)
        )
        assert reading.differing(table, [SetId.CLUSTER_SERVICES, SetId.ENDPOINTS], desired) == ""
        assert sum(asked) == 40 * 20
        assert max(asked) < 50 + 20


@given(histories(max_size=2))
def test_all_elements_are_read(history):
    world, states = history
    with FakeGround.fresh() as ground:
        backend = ground.start(world)
        for plans in states:
            resync(backend, plans)
            read(ground, backend.family)
