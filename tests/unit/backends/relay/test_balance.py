"""Round robin and affinity, without sockets and with a test's clock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.relay import datapath
from kubeproxy.backends.relay.datapath import Balancer

POOL = tuple(bytes((10, 0, 0, n, 0, 80)) for n in range(1, 6))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def balancer(pool=POOL, affinity=0, clock=None) -> Balancer:
    made = Balancer(clock or Clock())
    made.retarget(pool, affinity)
    return made


@given(st.integers(1, 5), st.integers(1, 20))
def test_each_round_has_every_endpoint_once(size: int, rounds: int) -> None:
    made = balancer(POOL[:size])
    for _ in range(rounds):
        assert Counter(made.pick("c") for _ in range(size)) == Counter(POOL[:size])


def test_clients_that_take_turns_meet_all_endpoints() -> None:
    made = balancer(POOL[:2])
    met = [(made.pick("a"), made.pick("b")) for _ in range(200)]
    assert {a for a, _ in met} == {b for _, b in met} == set(POOL[:2])


def test_no_endpoint_none_picked() -> None:
    assert Balancer().pick("c") is None
    assert balancer(()).pick("c") is None
    assert balancer((), affinity=10).pick("c") is None


@given(st.sets(st.sampled_from(POOL)), st.integers(0, 7), st.sampled_from([0, 10]))
def test_failed_endpoints_are_skipped(failed: set[bytes], earlier: int, affinity: int) -> None:
    made = balancer(affinity=affinity)
    for n in range(earlier):
        made.pick(f"other{n}")
    picked = made.pick("c", failed)
    assert (picked is None) == (failed == set(POOL))
    assert picked not in failed


def test_a_client_stays_until_it_was_quiet_for_the_timeout() -> None:
    clock = Clock()
    made = balancer(affinity=10, clock=clock)
    first = made.pick("c")
    for _ in range(30):
        clock.now += 9.9
        assert made.pick("c") == first
    seen = set()
    for _ in range(100):
        clock.now += 10.0
        seen.add(made.pick("c"))
    assert seen == set(POOL)


def test_a_client_moves_when_its_endpoint_failed_and_stays_there() -> None:
    made = balancer(affinity=10)
    first = made.pick("c")
    second = made.pick("c", {first})
    assert second != first
    assert {made.pick("c") for _ in range(20)} == {second}


@given(st.lists(st.sets(st.sampled_from(POOL), min_size=1), min_size=1, max_size=6))
def test_clients_stay_with_endpoints_that_stay(pools: list[set[bytes]]) -> None:
    made = Balancer(Clock())
    history = []
    for pool in pools:
        made.retarget(tuple(sorted(pool)), 10)
        history.append((pool, {n: made.pick(str(n)) for n in range(12)}))
    for (_, before), (pool, after) in pairwise(history):
        assert set(after.values()) <= pool
        assert all(after[n] == endpoint for n, endpoint in before.items() if endpoint in pool)


def test_affinity_that_is_switched_off_is_forgotten() -> None:
    made = balancer(affinity=10)
    made.pick("c")
    made.retarget(POOL, 0)
    met = set()
    for _ in range(100):
        made.retarget(POOL, 10)
        met.add(made.pick("c"))
        made.retarget(POOL, 0)
    assert met == set(POOL)


def test_the_longest_quiet_client_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datapath, "CLIENTS", 2)
    made = balancer(affinity=10)
    a, _ = made.pick("a"), made.pick("b")
    assert made.pick("a") == a
    made.pick("c")
    assert made.pick("a") == a
