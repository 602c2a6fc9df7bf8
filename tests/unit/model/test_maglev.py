"""Maglev tables are even, equal on every node and stable; a client's slot is the kernel's; annotations select them."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model import maglev
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Packet, answer
from kubeproxy.model.maglev import SEED, SIZES, fill, jhash, slot_of
from kubeproxy.model.objects import Annotations
from kubeproxy.model.plan import Hashing, HashKey
from support.cluster_objects import address, endpoint, endpoint_slice, parsed, service, world
from support.compiled import compile_service
from unit.model.test_planner import planner

destinations = st.binary(min_size=6, max_size=6)
pools = st.lists(destinations, min_size=1, max_size=60, unique=True)
sizes = st.sampled_from(SIZES)


@given(pools, sizes, st.randoms(use_true_random=False))
def test_every_node_fills_the_same_table_whatever_it_learnt_first(pool, size, chance):
    weights = [chance.randint(1, 100) for _ in pool]
    table = fill(tuple(pool), tuple(weights), size)
    shuffled = list(zip(pool, weights, strict=True))
    chance.shuffle(shuffled)
    assert fill(*map(tuple, zip(*shuffled, strict=True)), size) == table
    assert len(table) == size
    assert set(table) <= set(pool)


@given(pools, sizes)
def test_shares_differ_by_one_slot_at_most(pool, size):
    counts = Counter(fill(tuple(pool), (), size))
    assert max(counts.values()) - min(counts[d] for d in pool) <= 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.sampled_from([1021, 4093]))
def test_shares_are_those_of_the_weights(weights, size):
    pool = tuple(bytes([10, 0, 0, n, 0, 80]) for n in range(len(weights)))
    counts = Counter(fill(pool, tuple(weights), size))
    for destination, weight in zip(pool, weights, strict=True):
        assert abs(counts[destination] - size * weight / sum(weights)) <= 1 + len(weights)


@given(st.lists(st.sampled_from([1, 2, 7, 100]), min_size=1, max_size=30).map(tuple))
def test_turns_are_the_same_when_most_have_none(weights):
    every, skipping = maglev._turns((*weights, *[100] * 90)), maglev._sparse_turns(weights, max(weights))
    dense = [n for n in itertools.islice(every, 4000) if n < len(weights)]
    if 100 in weights:
        assert list(itertools.islice(skipping, len(dense))) == dense


def test_thousands_of_little_weight_beside_one_of_much():
    pool = tuple(bytes([10, n >> 8, n & 255, 1, 0, 80]) for n in range(3000))
    counts = Counter(fill(pool, (*[1] * 2999, 100), 251))
    assert counts.pop(pool[-1]) == 99, "the table is full in the hundredth round, before its turn"
    assert set(counts.values()) == {1}


MOVED = {(251, 2): 0.005, (1021, 2): 0.005, (1021, 3): 0.01, (4093, 3): 0.005, (4093, 5): 0.01, (1021, 10): 0.035}
"""Return the mean number of moved clients beyond those of a removed endpoint, by table size and endpoints."""


@pytest.mark.parametrize(("size", "count"), MOVED)
def test_remaining_endpoints_keep_nearly_all_clients(size, count):
    chance, besides = random.Random(1), []
    for _ in range(10):
        pool = tuple(sorted(chance.randbytes(4) + b"\x1f\x90" for _ in range(count)))
        before = fill(pool, (), size)
        for gone in pool:
            after = fill(tuple(d for d in pool if d != gone), (), size)
            moved = sum(one != other for one, other in zip(before, after, strict=True))
            assert moved >= before.count(gone)
            besides.append((moved - before.count(gone)) / size)
    assert sum(besides) / len(besides) <= MOVED[size, count]


def test_an_empty_pool_has_no_table():
    assert fill((), (), 251) == ()


def test_more_endpoints_than_slots():
    pool = tuple(number.to_bytes(6, "big") for number in range(300))
    assert len(set(fill(pool, (), 251))) == 251


def test_the_table_stays_as_it_is_in_every_version():
    """During the upgrade of a cluster, nodes have two versions at the same time."""
    pool = tuple(bytes([10, 244, 0, n]) + b"\x1f\x90" for n in (1, 2, 3))
    assert "".join(str(d[3]) for d in fill(pool, (), 251)[:40]) == TABLE
    assert "".join(str(d[3]) for d in fill(pool, (100, 50, 1), 251)[:40]) == WEIGHED


TABLE = "3132123331323211212222112313211333132233"
WEIGHED = "1121121111211211112212111112211111122111"


def test_a_clients_slot_takes_its_port_where_that_is_part_of_the_hash():
    client, flow = Hashing(HashKey.CLIENT, 1021), Hashing(HashKey.FLOW, 1021)
    source = address("192.0.2.7")
    assert slot_of(client, source, 0) == slot_of(client, source, 7) == jhash(source, SEED) * 1021 >> 32
    assert slot_of(flow, source, 0) is None
    assert len({slot_of(flow, source, port) for port in range(1, 50)}) > 30


# -- annotations ---------------------------------------------------------------------------------------------------

WORLD = world(families=[Family.IPV4])
PODS = [endpoint(f"10.244.0.{n}") for n in (1, 2, 3)]


def compiled(*pods, affinity=False, **annotations):
    subject = service(annotations=Annotations(**annotations), session_affinity="ClientIP" if affinity else None)
    return compile_service(subject, [parsed(*(pods or PODS))], WORLD)


@pytest.mark.parametrize(
    ("annotations", "size"),
    [
        ({"algorithm": "maglev"}, 1021),
        ({"algorithm": "maglev-251"}, 251),
        ({"algorithm": "maglev-4093"}, 4093),
        ({"cilium_algorithm": "maglev"}, 1021),
        ({"algorithm": "random", "cilium_algorithm": "maglev"}, 0),
        ({"cilium_algorithm": "random"}, 0),
        ({}, 0),
    ],
)
def test_annotations_choose_the_table(annotations, size):
    found = compiled(**annotations)
    (plan,) = found.plans
    assert found.problems == ()
    assert (plan.balance.hashing if plan.balance else None) == (Hashing(HashKey.FLOW, size) if size else None)


@pytest.mark.parametrize(
    ("annotations", "field"),
    [
        ({"algorithm": "Maglev"}, "kube-proxy-py/algorithm"),
        ({"cilium_algorithm": "x"}, "service.cilium.io/lb-algorithm"),
    ],
)
def test_a_wrong_annotation_is_named_and_chance_picks(annotations, field):
    found = compiled(**annotations)
    assert found.plans == compiled().plans
    (problem,) = found.problems
    assert problem.field == f"metadata.annotations[{field}]"
    assert problem.reason.endswith("endpoints are picked at random")


def test_with_session_affinity_the_address_alone_decides_and_nothing_is_remembered():
    (plan,) = compiled(affinity=True, algorithm="maglev").plans
    assert (plan.affinity, plan.balance.hashing) == (0, Hashing(HashKey.CLIENT, 1021))


def test_more_endpoints_than_slots_are_an_event():
    pods = [endpoint(f"10.244.{n >> 8}.{n & 255}") for n in range(1, 300)]
    (problem,) = compiled(*pods, algorithm="maglev-251").problems
    assert problem.reason == "a table of 251 slots has no slot for some of 299 endpoints"


@pytest.mark.parametrize("affinity", [None, "ClientIP"])
def test_why_names_the_endpoint_of_a_client(affinity):
    subject = planner(
        service(annotations=Annotations(algorithm="maglev"), session_affinity=affinity), endpoint_slice(*PODS)
    )

    def asked(source, port):
        packet = Packet(address(source), address("10.96.0.1"), 6, 80, source_port=port)
        return answer(subject, packet, [address("192.0.2.1")])

    known = asked("192.0.2.7", 40000)
    assert [choice.share for choice in known.choices] == [1.0]
    assert any("Maglev" in step.text and "slot" in step.text for step in known.steps)
    without = asked("192.0.2.7", 0).choices
    assert len(without) == (1 if affinity else 3)
    assert sum(choice.share for choice in without) == pytest.approx(1)
    assert known.choices[0].destination in {choice.destination for choice in without}
