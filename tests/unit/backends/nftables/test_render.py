"""Plans to elements: slots, differences, and that packets get the answers of the plan."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.backends.nftables import packing as packing_module
from kubeproxy.backends.nftables.layout import CLASS_MAPS, CLASSES, POOL_SETS, SHARED, VERDICT_MAPS, SetId
from kubeproxy.backends.nftables.packing import changed
from kubeproxy.backends.nftables.render import Numbers, assign, place, place_all, render
from kubeproxy.backends.state import diff
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import ServicePort
from support.cluster_objects import HERE, THERE, address, dest, endpoint, parsed, service, world
from support.compiled import compile_service
from support.effort import examples
from support.nftables_plans import EVERYTHING, placed, plans_of
from support.random_plans import cycling, histories

# -- slots ---------------------------------------------------------------------------------------------------------

pools = st.lists(st.sampled_from([bytes([n]) * 6 for n in range(12)]), unique=True).map(tuple)


@given(pools, pools.map(sorted).map(tuple))
def test_slots_hold_exactly_the_wanted_endpoints(before, wanted):
    assert sorted(assign(before, wanted)) == list(wanted)


@given(pools, pools.map(sorted).map(tuple))
def test_survivors_keep_their_slots_while_those_exist(before, wanted):
    after = assign(before, wanted)
    for slot, destination in enumerate(before[: len(wanted)]):
        if destination in wanted:
            assert after[slot] == destination


@given(pools, pools.map(sorted).map(tuple))
def test_as_few_slots_as_possible_change(before, wanted):
    after = assign(before, wanted)
    stay = sum(destination in wanted for destination in before[: len(wanted)])
    changed = sum(1 for slot, d in enumerate(after) if slot >= len(before) or before[slot] != d)
    assert changed == (len(wanted) - stay if before else len(wanted))


@given(pools, pools.map(sorted).map(tuple))
def test_assigning_again_moves_nothing(before, wanted):
    after = assign(before, wanted)
    assert assign(after, wanted) == after


def test_one_of_many_goes():
    before = (b"a", b"b", b"c", b"d")
    assert assign(before, (b"a", b"c", b"d")) == (b"a", b"d", b"c")
    assert assign(before, (b"a", b"b", b"c")) == (b"a", b"b", b"c")
    assert assign(before, (b"a", b"b", b"c", b"d", b"e")) == (*before, b"e")
    assert assign(before, (b"a", b"c", b"d", b"e")) == (b"a", b"e", b"c", b"d")
    assert assign(before, ()) == ()
    assert assign((), (b"a", b"b")) == (b"a", b"b")


# -- differences ---------------------------------------------------------------------------------------------------

element_sets = st.dictionaries(
    st.sampled_from([SetId.ENDPOINTS, SetId.AFFINITY_SERVICES, SetId.HAIRPIN]),
    st.dictionaries(st.sampled_from([b"k1", b"k2", b"k3"]), st.sampled_from([b"", b"x", b"y"])),
)


@given(element_sets, element_sets)
def test_a_difference_leads_from_one_to_the_other(before, after):
    delta = diff(before, after)
    elements = {name: dict(entries) for name, entries in before.items()}
    for name, keys in delta.removed.items():
        for key in keys:
            del elements[name][key]
    for name, entries in delta.added.items():
        assert not elements.setdefault(name, {}).keys() & dict(entries).keys()
        elements[name].update(entries)
    assert {n: found for n, found in elements.items() if found} == {n: found for n, found in after.items() if found}
    for set_id, entries in delta.added.items():
        assert entries
        assert all(before.get(set_id, {}).get(key) != data for key, data in entries)
    for set_id, keys in delta.removed.items():
        assert keys
        assert all(after.get(set_id, {}).get(key) != before[set_id][key] for key in keys)


@given(element_sets)
def test_no_difference_between_equals(elements):
    assert diff(elements, elements) == ({}, {})


# -- histories --------------------------------------------------------------------------------------------------------


@examples(75)
@given(histories(min_size=2, max_size=2))
def test_a_restart_leads_to_the_same_pools(history):
    _, (earlier, later) = history
    for name, found in later.items():
        before = {item.plan.key: item for item in placed(earlier.get(name, ()))}
        for plan in found:
            old = before.get(plan.key)
            (moved,), (fresh,) = place_all([plan], [old] if old else [], Numbers()), placed([plan])
            assert {policy: ids.keys() for policy, ids in moved.endpoints.items()} == {
                policy: ids.keys() for policy, ids in fresh.endpoints.items()
            }
            # Numbers are arbitrary: those of the pool, of its endpoints and of the list of ranges.
            moved = moved._replace(ranges=fresh.ranges, number=fresh.number, endpoints=fresh.endpoints)
            assert sorted(moved.cluster) == sorted(fresh.cluster)
            assert sorted(moved.local) == sorted(fresh.local)
            assert {s: d.keys() for s, d in render([moved]).items()} == {
                s: d.keys() for s, d in render([fresh]).items()
            }


@examples(75)
@given(histories(max_size=1))
def test_services_share_nothing_but_shared_sets(history):
    _, (plans,) = history
    seen, numbers = {}, Numbers()
    for name, found in plans.items():
        for set_id, entries in render(placed(found, numbers)).items():
            for key in entries:
                assert set_id in SHARED or seen.setdefault((set_id, key), name) == name


# -- examples ------------------------------------------------------------------------------------------------------


def _many(ports, *, closed):
    """Return plans of a Service on addresses that its ports share, by the number of endpoints at each port."""
    spec = {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["192.0.2.0/24"]} if closed else {}
    names = {port: [ServicePort(port=port, name=f"p{port}")] for port in ports}
    return [plans_of("a", 1, endpoints, ports=names[port], **spec)[0] for port, endpoints in ports.items()]


@pytest.mark.parametrize("closed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ports", [{1: 3}, {1: 3, 2: 4}, {2: 3, 3: 1}, {1: 3, 2: 3, 3: 3}, {1: 2, 2: 3, 4: 1}, {4: 1}])
def test_only_the_ports_that_differ_are_compared(ports, closed):
    """The addresses of the Service and of its endpoints on this node remain while a port uses them."""
    numbers, had = Numbers(), {1: 3, 2: 3}
    before = place_all(_many(had, closed=closed[0]), (), numbers)
    plans = _many(ports, closed=closed[1])
    again = place_all(plans, before, copy.deepcopy(numbers))
    after = place_all(plans, before, numbers, committed=True)
    assert render(after) == render(again)
    whole, found = diff(render(before), render(after)), changed(before, after)
    for one, other in zip(whole, found, strict=True):
        assert {name: sorted(its) for name, its in one.items()} == {name: sorted(its) for name, its in other.items()}
    if closed == (False, False):
        kept = {item.plan.key.port_name for item in after if any(item is other for other in before)}
        assert kept == {f"p{port}" for port, count in had.items() if ports.get(port) == count}


def test_one_changed_endpoint_is_one_element_replaced():
    globals_ = world(families=[Family.IPV4])
    subject = service(ports=[ServicePort(port=80, node_port=30080)], external_ips=["203.0.113.1"])
    texts = ["10.244.0.1", "10.244.0.2", "10.244.0.3"]

    def plan(*found):
        return compile_service(subject, [parsed(*map(endpoint, found))], globals_).plans[0]

    (before,) = placed([plan(*texts)])
    after = place(plan(texts[0], "10.244.0.9", texts[2]), before, Numbers())
    delta = diff(render([before]), render([after]))
    assert {s: len(keys) for s, keys in delta.removed.items()} == {SetId.ENDPOINTS: 2, SetId.NODEPORT_ENDPOINTS: 1}
    assert {d for entries in delta.added.values() for _, d in entries} == {dest("10.244.0.9:8080") + b"\0\0"}


def test_keys_are_packed_as_the_kernel_packs_registers():
    globals_ = world(families=[Family.IPV4])
    subject = service(ports=[ServicePort(port=80, node_port=30080)])
    (plan,) = compile_service(subject, [parsed(endpoint("10.244.0.1"))], globals_).plans
    found = render(placed([plan]))
    transport = b"\x06\0\0\0" + b"\x00\x50\0\0"
    cluster_ip = address("10.96.0.1")
    assert found[SetId.ENDPOINTS] == {cluster_ip + transport + b"\0\0\0\0": dest("10.244.0.1:8080") + b"\0\0"}
    assert found[SetId.CLUSTER_SERVICES] == {cluster_ip + transport: b"\0\1"}
    assert found[SetId.CLUSTER_IPS] == {cluster_ip: b""}
    nodeport = b"\x06\0\0\0" + (30080).to_bytes(2, "big") + b"\0\0"
    assert found[SetId.NODEPORT_ENDPOINTS] == {nodeport + b"\0\0\0\0": dest("10.244.0.1:8080") + b"\0\0"}
    assert found[SetId.EXTERNAL_NODEPORTS] == {nodeport: b"\0\1"}
    assert len(found) == 6 - 1  # no endpoint is local


# -- classes -------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 256, 257]
STEPS = [
    *itertools.pairwise(SIZES),
    *((b, a) for a, b in itertools.pairwise(SIZES)),
    (17, 1),
    (1, 300),
    (300, 4),
    (64, 0),
]


def web(count, first=0, **more):
    found = [endpoint(f"10.244.{n >> 8}.{n & 255}", HERE) for n in range(first, first + count)]
    subject = service(**more)
    return compile_service(subject, [parsed(*found)], world(families=[Family.IPV4])).plans[0]


def counts(elements):
    return {set_id: len(keys) for set_id, keys in elements.items()}


def class_of_size(count):
    return count if count <= 5 else next(size for size in (16, 20, 64, 128, 256, 1024) if count <= size)


@pytest.mark.parametrize(("earlier", "later"), STEPS)
def test_a_change_of_the_number_of_endpoints_touches_little_else(earlier, later):
    (before,) = placed([web(earlier)])
    delta = diff(render([before]), render([place(web(later), before, Numbers())]))
    removed, added = counts(delta.removed), counts(delta.added)
    for found in (removed, added):
        found.pop(SetId.HAIRPIN, None)
    was, now = (class_of_size(n) if n else 0 for n in (earlier, later))
    wanted_removed, wanted_added = {}, {}
    if later > earlier:
        wanted_added["endpoints"] = later - earlier
    else:
        wanted_removed["endpoints"] = earlier - later
    if was != now:
        wanted_removed["cluster-services" if was else "unserved-services"] = 1
        wanted_added["cluster-services" if now else "unserved-services"] = 1
    assert (removed, added) == (wanted_removed, wanted_added)


@pytest.mark.parametrize(("count", "another"), [(5, True), (2, True), (17, True), (18, False), (300, False)])
def test_the_first_endpoint_goes_and_the_last_one_takes_its_slot(count, another):
    (before,) = placed([web(count)])
    delta = diff(render([before]), render([place(web(count - 1, 1), before, Numbers())]))
    moved = {"endpoints": 2, "hairpin-endpoints": 1}
    of_class = {"cluster-services": 1} if another else {}
    assert counts(delta.removed) == moved | of_class
    assert counts(delta.added) == {"endpoints": 1} | of_class


@pytest.mark.parametrize("count", [1, 2, 4, 5, 16, 17])
def test_replaced_endpoints_leave_the_class_alone(count):
    (before,) = placed([web(count)])
    delta = diff(render([before]), render([place(web(count, count), before, Numbers())]))
    assert counts(delta.removed) == counts(delta.added) == {"endpoints": count, "hairpin-endpoints": count}


def test_a_frontend_has_a_class_in_each_map_that_it_picks_from():
    more = {"external_traffic_policy": "Local", "external_ips": ["203.0.113.1"]}
    subject = service(ports=[ServicePort(port=80, node_port=30080)], **more)
    found = [endpoint(f"10.244.0.{n}", HERE if n < 3 else THERE) for n in range(1, 7)]
    (plan,) = compile_service(subject, [parsed(*found)], world(families=[Family.IPV4])).plans
    elements = render(placed([plan]))
    assert {s: [int.from_bytes(d, "big") for d in elements[s].values()] for s in CLASS_MAPS if s in elements} == {
        "cluster-services": [6],
        "policy-local-services": [6],
        "local-services": [2],
        "policy-local-nodeports": [6],
        "local-nodeports": [2],
    }


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("affinity", [None, "ClientIP"])
def test_without_endpoints_there_is_no_treatment_and_no_class(policy, affinity):
    ports = [ServicePort(port=80, node_port=30080)]
    more = {"external_traffic_policy": policy, "internal_traffic_policy": policy, "session_affinity": affinity}
    plan = web(0, ports=ports, external_ips=["203.0.113.1"], **more)
    assert {s for s, keys in render(placed([plan])).items() if keys} == {
        "cluster-ips",
        "unserved-services",
        "unserved-nodeports",
    }


@examples(75)
@given(histories(max_size=1))
def test_verdicts_are_for_affinity_and_hashes_alone(history):
    _, (plans,) = history
    for plan in (plan for found in plans.values() for plan in found):
        elements = render(placed([plan]))
        with_verdicts = {key for set_id in VERDICT_MAPS for key in elements.get(set_id, {})}
        chained = bool(plan.affinity or (plan.balance and plan.balance.hashing))
        assert bool(with_verdicts) is (chained and any(elements.get(s) for s in POOL_SETS))
        assert not chained or not any(s in CLASS_MAPS for s in elements)


def test_more_endpoints_than_the_last_class_has_slots_are_served_by_as_many():
    pool = tuple(n.to_bytes(6, "big") for n in range(CLASSES[-1] + 1))
    plan = replace(web(1), cluster=pool)
    elements = render(placed([plan]))
    assert set(elements[SetId.CLUSTER_SERVICES].values()) == {CLASSES[-1].to_bytes(2, "big")}


# -- the writes of a change ----------------------------------------------------------------------------------------


def as_sets(delta):
    removed = {name: set(keys) for name, keys in delta.removed.items()}
    return removed, {name: set(entries) for name, entries in delta.added.items()}


@given(cycling())
def test_a_change_is_the_difference_of_all_elements(cycle):
    _, states = cycle
    numbers, before = Numbers(), {}
    for state in states:
        for name, plans in state.items():
            was = before.get(name, ())
            before[name] = now = place_all(plans, was, numbers)
            assert as_sets(changed(was, now)) == as_sets(diff(render(was), render(now)))


def test_a_pool_is_compared_once_for_all_addresses_of_a_port(monkeypatch):
    many = {
        **EVERYTHING,
        "external_ips": [f"203.0.113.{n}" for n in range(1, 21)],
        "external_traffic_policy": "Cluster",
        "session_affinity": "None",
    }
    compared = []
    compare = packing_module._changed_slots
    monkeypatch.setattr(packing_module, "_changed_slots", lambda *pools: compared.append(pools) or compare(*pools))
    before = place_all(plans_of("a", 1, 30, **many), (), numbers := Numbers())
    after = place_all(plans_of("a", 1, 29, **many), before, numbers)
    delta = changed(before, after)
    assert len(compared) == 2  # ports
    assert len(delta.removed[SetId.ENDPOINTS]) == 2 * 22
