"""Medians, spreads, percentiles and ratios of the benchmarks."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Spread, median, percentile, ratio, spread, spreads, summary

numbers = st.lists(st.floats(0, 1e9), min_size=1, max_size=50)


@given(numbers)
def test_median_is_that_of_the_standard_library(values):
    assert median(values) == pytest.approx(statistics.median(values))


@given(numbers, st.integers(1, 100))
def test_a_percentile_is_a_value_that_enough_of_them_do_not_exceed(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) * 100 >= percent * len(values)
    assert sum(v < found for v in values) * 100 < percent * len(values)


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (99, 99), (100, 100)], ids=["p1", "p50", "p99", "p100"]
)
def test_percentiles_of_a_hundred_values(percent, expected):
    assert percentile(range(1, 101), percent) == expected


@pytest.mark.parametrize("measure", [median, lambda v: percentile(v, 99), spread])
def test_nothing_has_no_figure(measure):
    with pytest.raises(ValueError, match=r"value|zip"):
        measure([])


def test_a_spread_has_median_extremes_and_count():
    assert spread([3, 1, 2, 9]) == Spread(2.5, 1.0, 9.0, 4)
    assert spread([3, 1, 2, 9]).scaled(10) == Spread(25.0, 10.0, 90.0, 4)


def test_figures_that_a_run_lacks_are_left_out():
    assert spreads([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": Spread(2.0, 1.0, 3.0, 2)}
    assert spreads([]) == {}


def test_ratios_are_taken_run_by_run():
    # A machine that is half as fast in the second run changes no ratio.
    assert ratio([6.0, 12.0], [2.0, 4.0]) == Spread(3.0, 3.0, 3.0, 2)
    with pytest.raises(ValueError, match=r"value|zip"):
        ratio([1.0], [1.0, 2.0])


def test_a_summary_is_in_the_unit_asked_for():
    assert summary([0.001, 0.002, 0.003], 1e3) == {"p50": 2.0, "p99": 3.0, "max": 3.0}
