"""Weights to slots: exact shares, few slots, and as few changed slots as possible."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables.layout import BELOW, CLASSES, STICKY_SLOTS, class_of, slot_counts, tries
from kubeproxy.backends.nftables.render import assign
from support.effort import examples
from unit.backends.nftables.test_picking import shares

weights = st.integers(1, 100)
pools = st.one_of(
    st.lists(weights, min_size=1, max_size=500),
    # Slices have one weight for all of their endpoints, so most weights are equal.
    st.lists(st.tuples(weights, st.integers(1, 166)), min_size=1, max_size=3).map(
        lambda kinds: [weight for weight, count in kinds for _ in range(count)]
    ),
)


def probabilities(counts):
    """Return the probability of each endpoint by the rules of its class, for the worst distribution of its slots."""
    total = sum(counts)
    size = class_of(total)
    first, last, _, lost = shares([size] * tries(size) + [BELOW.get(size, 1)], total)
    assert lost == pytest.approx(0)
    return [(count * last, count * first) for count in counts]


@examples(300)
@given(pools)
def test_every_share_is_within_2_percent_of_the_requested_one(asked):
    counts = slot_counts(tuple(asked), CLASSES[-1])
    assert all(counts)
    assert sum(counts) <= CLASSES[-1]
    for weight, (low, high) in zip(asked, probabilities(counts), strict=True):
        wished = weight / sum(asked)
        if len(set(asked)) > 1:
            assert low >= wished * 0.98, (low, wished)
            assert high <= wished * 1.02, (high, wished)


@given(st.lists(weights, min_size=1, max_size=700).map(sorted), st.sampled_from([STICKY_SLOTS, 64]))
def test_all_have_a_slot_and_there_are_no_more_than_can_be(asked, most):
    counts = slot_counts(tuple(asked), most)
    assert all(counts)
    assert sum(counts) <= max(most, len(asked)) + len(asked)
    assert sorted(counts) == list(counts)


@pytest.mark.parametrize(
    ("asked", "slots"),
    [([50, 100], 3), ([90] * 9 + [10], 82), ([100, 99], 2), ([7], 1), ([100] * 9 + [50], 19), ([2, 4, 6], 6)],
)
def test_few_slots_are_enough(asked, slots):
    assert sum(slot_counts(tuple(asked), CLASSES[-1])) == slots


members = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), max_size=40)


@given(members, members)
def test_a_change_moves_as_few_slots_as_possible(before, wanted):
    wanted = tuple(sorted(wanted))
    now = assign(tuple(before), wanted)
    assert Counter(now) == Counter(wanted)
    if not before:
        return
    kept = sum((Counter(before) & Counter(wanted)).values())
    same = sum(one == other for one, other in zip(before, now, strict=False))
    # An endpoint in a slot beyond the last one moves into a hole; no other endpoint moves.
    beyond = max(0, len(before) - len(now))
    assert same >= kept - beyond
    assert assign(now, wanted) == now


@given(members)
def test_an_endpoint_with_fewer_slots_keeps_the_first_ones(before):
    wanted = tuple(sorted({*before}))
    now = assign(tuple(before), wanted)
    for member in wanted:
        assert now.index(member) <= before.index(member)
