"""Elements read from the kernel: endpoints by key, a few Services at a time, all others by dumps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables import found as found_module
from kubeproxy.backends.nftables.found import recall
from kubeproxy.backends.nftables.layout import (
    BELOW,
    CLASSES,
    ENDPOINT_MAPS,
    FIRST_ENDPOINT,
    NUMBER_MAPS,
    OF_RANGES,
    SESSION_SETS,
    Layout,
    SetId,
    list_number,
    packed_class,
    slot_bytes,
)
from kubeproxy.backends.nftables.render import Numbers, Parts, place, render, slots
from kubeproxy.errors import ApplyError
from kubeproxy.model.plan import Policy
from support.nftables_ground import FakeGround, resync
from support.nftables_plans import V4, cluster, placed, plans_of
from support.random_plans import histories

WHOLE = [(b"a", b"1"), (b"b", b"2")]
TORN = [WHOLE[0], WHOLE[0]]  # as during the resize of a hash table: one element twice, another one not at all
NAMES = tuple(Layout(V4).sets)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(found_module, "PAUSE", 0)


class Dumps:
    """A table that returns these dumps of its cluster IPs in turn, and then repeats the last one."""

    def __init__(self, *dumps):
        self.queue = list(dumps)

    def count(self, name):
        return 0

    def pairs(self, name):
        if name != SetId.CLUSTER_IPS:
            return []
        return [self.queue.pop(0) if len(self.queue) > 1 else self.queue[0]]


def test_a_dump_that_repeats_itself_is_read_again():
    table = Dumps(TORN, TORN, WHOLE)
    assert found_module.FoundElements(table, NAMES).left == {
        name: dict(WHOLE) if name == SetId.CLUSTER_IPS else {} for name in NAMES
    }
    assert not table.queue[1:]


def test_a_dump_that_never_becomes_whole_is_an_error():
    with pytest.raises(ApplyError, match="of cluster-ips completely"):
        found_module.FoundElements(Dumps(TORN), NAMES)


class Watched:
    """A table that records the names of dumped sets, and calls a function at each request for elements by key."""

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
    """Return all elements of dumps as read by an adoption without any Service, and the table."""
    table = Watched(ground.table(family))
    elements = found_module.FoundElements(table, NAMES)
    elements.rest(())
    assert elements.left == {name: dict(*table.table.pairs(name)) for name in NAMES}
    return elements.left, table


class OneFrontend:
    """Return a table with one frontend that has this number of endpoints."""

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
def test_endpoints_are_read_by_key_with_few_missing_keys(count):
    table = OneFrontend(count)
    elements = found_module.FoundElements(table, NAMES)
    elements.rest(())
    assert elements.left[SetId.ENDPOINTS] == table.entries
    assert table.asked <= count + 1 + count // 8


def test_every_class_but_the_first_has_one_below():
    assert all(BELOW[size] < size for size in CLASSES[1:])


STRAYS = [
    "add element ip kube-proxy endpoints { 10.96.9.9 . tcp . 80 . 0 : 10.244.0.9 . 80 }",  # an element of no frontend
    "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 7 : 10.244.0.9 . 80 }",  # beyond its class
    "flush map ip kube-proxy cluster-services",  # an element of a removed frontend
    "add element ip kube-proxy session-slots { 0.0.0.7 . 0 : 192.0.0.1 }",  # an element of no pool
    "add element ip kube-proxy session-slots { 0.0.0.2 . 3 : 192.0.0.1 }",  # beyond the class of a pool
    "add element ip kube-proxy session-endpoints { 192.0.0.99 . tcp : 10.244.0.9 . 80 }",  # an element in no slot
]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("line", STRAYS)
def test_elements_that_no_class_accounts_for_are_found_by_a_dump(line, counts):
    with FakeGround.fresh() as ground:
        ground.kernel.counts = counts
        plans = cluster("a", "b") | {("default", "c"): plans_of("c", 3, session_affinity="ClientIP")}
        backend = ground.start()
        resync(backend, plans)
        ground.disturb(line)
        of = next(
            name for name in ("session-slots", "session-endpoints", SetId.ENDPOINTS) if name in line + "endpoints"
        )
        assert of in read(ground)[1].dumped
        resync(backend, plans)
        ground.is_clean(backend, plans)


def test_a_missing_slot_does_not_end_the_reading():
    with FakeGround.fresh() as ground:
        resync(ground.start(), {("default", "a"): plans_of("a", 1, 20)})
        ground.disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 17 }")
        assert len(read(ground)[0][SetId.ENDPOINTS]) == 19


BY_KEY = (*ENDPOINT_MAPS, SetId.SESSION_SLOTS, SetId.SESSION_ENDPOINTS)


def many(affinity):
    return {("default", f"s{n}"): plans_of(f"s{n}", n, 20, session_affinity=affinity) for n in range(1, 41)}


@pytest.mark.parametrize("affinity", ["None", "ClientIP"])
def test_an_adoption_holds_the_endpoints_of_some_services_at_a_time(monkeypatch, affinity):
    """They are dumped only to find the largest number of an endpoint: then no element is stored."""
    plans, held = many(affinity), []
    monkeypatch.setattr(found_module, "SERVICES", 4)
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, plans)
        table = Watched(ground.table(V4))
        elements = found_module.FoundElements(table, NAMES)
        table.asked = lambda: held.append(sum(len(elements.left[name]) for name in BY_KEY))
        assert not {*table.dumped} & {*BY_KEY}
        assert max(elements.numbers(), default=0) == (FIRST_ENDPOINT + 40 * 20) * (affinity == "ClientIP")
        assert not any(elements.left[name] for name in BY_KEY)
        table.dumped.clear()
        for name, _ in elements.ahead(plans.items()):
            assert not any(elements.take(Parts(backend._placed[name])))
        elements.rest(backend._placed.values())
        assert 4 * 20 <= max(held) + 20 <= 4 * 20 * 2 + 20
        assert not table.dumped


@pytest.mark.parametrize("affinity", ["None", "ClientIP"])
def test_an_inspection_holds_the_endpoints_of_some_services_at_a_time(monkeypatch, affinity):
    plans, held = many(affinity), []
    monkeypatch.setattr(found_module, "SERVICES", 4)
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, plans)
        table = Watched(ground.table(V4))
        elements = found_module.FoundElements(table, NAMES)
        elements.left.pop(SetId.NODEPORT_IPS)
        table.asked = lambda: held.append(sum(len(elements.left[name]) for name in BY_KEY))
        assert elements.first_difference(backend._placed, backend._users) == ""
        assert max(held) <= 4 * 20 * 2
        assert not {*table.dumped} & {*BY_KEY}


@given(histories(max_size=2))
def test_all_elements_are_read(history):
    world, states = history
    with FakeGround.fresh() as ground:
        backend = ground.start(world)
        for plans in states:
            resync(backend, plans)
            read(ground, backend.family)


def everything(placed):
    found = render(placed)
    return {name: found.get(name, {}) for name in Layout(V4, OF_RANGES).sets}


@given(histories(max_size=1), st.randoms(use_true_random=False))
def test_endpoints_are_recalled_in_the_slots_that_the_kernel_has_them_in(history, random):
    _, (plans,) = history
    for plan in (plan for found in plans.values() for plan in found):
        cluster, local = list(slots(plan, Policy.CLUSTER)), list(slots(plan, Policy.LOCAL))
        if not (plan.balance and plan.balance.hashing):  # This determines the slot of each endpoint.
            random.shuffle(cluster)
            random.shuffle(local)
        there = place(plan, None, Numbers())._replace(cluster=tuple(cluster), local=tuple(local))
        actual = everything([there])
        assert everything([place(plan, recall(plan, actual, Numbers()), Numbers())]) == actual


@given(histories(min_size=2, max_size=2))
def test_recalled_endpoints_move_as_little_as_those_remembered(history):
    _, (earlier, later) = history
    for name, found in later.items():
        before = {item.plan.key: item for item in placed(earlier.get(name, ()))}
        for plan in found:
            old = before.get(plan.key)
            if old is None or old.plan.frontends != plan.frontends or old.plan.external != plan.external:
                continue
            # Endpoints with and without session affinity are in different maps.
            alike = bool(old.plan.affinity) == bool(plan.affinity) and old.plan.port_ranges == plan.port_ranges
            if old.plan.internal == plan.internal and alike:
                recalled = recall(plan, everything([old]), Numbers())
                assert render([place(plan, recalled, Numbers())]) == render([place(plan, old, Numbers())])


def test_nothing_is_recalled_from_an_empty_table():
    assert found_module.ranges_by_list({SetId.FIREWALL_ALLOW: {}}) == {}
    number, one, two = list_number(3, V4), b"\x0a\0\0\1", b"\x0a\0\0\2"
    span, other = (number + a + number + b for a, b in ((one, one), (two, two)))
    found = {SetId.FIREWALL_ALLOW: {span: b"", other: b""}}
    assert found_module.ranges_by_list(found) == {number: [span, other]}
    assert set(found_module.numbers({key: {} for key in (*NUMBER_MAPS, *SESSION_SETS)} | found)) == {3}
