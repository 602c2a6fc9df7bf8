"""The number of sampled connections, depending on the cost of sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from kubeproxy.ask.flows.sampling import Sampled


class FakeEvents:
    """Returns this number of events in each interval; each event costs `cost` seconds of CPU time."""

    def __init__(self, count: int, cost: float) -> None:
        self.count = count
        self.cost = cost
        self.one_in = 1
        self.lost = 0
        self.spent = 0.0
        self.asked: list[int] = []

    def events(self, end: float) -> Iterator[object]:
        for _ in range(self.count // self.one_in):
            self.spent += self.cost
            yield object()

    def sample(self, one_in: int) -> None:
        self.one_in = one_in
        self.asked.append(one_in)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that advances by one second at each reading."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("kubeproxy.ask.flows.sampling.time.monotonic", look)
    return now


def heard(sampled: Sampled) -> int:
    return sum(weight for _, weight in sampled.for_a_while(math.inf))


def test_cheap_traffic_is_read_in_full(clock):
    events = FakeEvents(1000, 1e-6)
    sampled = Sampled(events, spent=lambda: events.spent)
    assert [heard(sampled) for _ in range(4)] == [1000] * 4
    assert (events.asked, sampled.left_out) == ([], 0)


def test_sampling_is_halved_until_its_cost_is_acceptable(clock):
    said: list[int] = []
    events = FakeEvents(1024, 2e-3)  # two seconds of CPU time in one second of the clock
    sampled = Sampled(events, said.append, lambda: events.spent)
    assert [heard(sampled) for _ in range(6)] == [1024] * 6, "each stands for those that were left out"
    assert said == [2, 4, 8]
    assert sampled.left_out == 1024 * 6 - sampled.received


def test_all_events_are_read_again_when_there_are_fewer(clock):
    events = FakeEvents(1024, 2e-3)
    sampled = Sampled(events, spent=lambda: events.spent)
    for _ in range(5):
        heard(sampled)
    events.count = 8
    for _ in range(5):
        heard(sampled)
    assert events.asked == [2, 4, 8, 4, 2, 1]


def test_dropped_events_halve_the_sampling(clock):
    events = FakeEvents(16, 0.0)
    sampled = Sampled(events, spent=lambda: events.spent)
    for _ in sampled.for_a_while(math.inf):
        events.lost = 1
    assert (events.one_in, sampled.lost) == (2, 1)
