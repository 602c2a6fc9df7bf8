"""The yardstick, the unit in which the gate measures the proxy's own time."""

from __future__ import annotations

import itertools

import pytest

from bench.yardstick import Yardstick


def test_it_is_the_median_of_measured_times():
    times = itertools.chain.from_iterable((0.0, taken) for taken in (3.0, 1.0, 2.0))
    yardstick = Yardstick()
    for _ in range(3):
        yardstick.measure(lambda: next(times))
    assert yardstick.seconds == 2.0


def test_without_a_measurement_there_is_none():
    with pytest.raises(ValueError, match="no values"):
        _ = Yardstick().seconds
