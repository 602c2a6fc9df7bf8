"""The gate compares ratios with bounds, and a missing measurement fails."""

from __future__ import annotations

import pytest

from bench import change, gate, hostile
from bench.figures import Spread
from bench.report import Row
from bench.yardstick import Yardstick

CASES = {"10kx10": {"ratio": 4.0}}


def judged(figures):
    (verdict,) = gate.judge("sync", CASES, [Row("10kx10", figures)])
    return verdict


@pytest.mark.parametrize(
    ("low", "holds"), [(3.9, True), (4.0, True), (4.01, False)], ids=["below", "at the bound", "above"]
)
def test_the_lowest_run_decides(low, holds):
    verdict = judged({"ratio": Spread(5.0, low, 9.0, 3)})
    assert verdict.holds is holds


@pytest.mark.parametrize("figures", [{}, {"ratio": None}], ids=["no such figure", "nothing seen"])
def test_a_missing_measurement_fails(figures):
    verdict = judged(figures)
    assert not verdict.holds
    assert str(verdict) == "FAIL sync 10kx10 ratio: bound 4.00, not measured"


def test_a_case_that_was_not_measured_fails():
    assert [v.holds for v in gate.judge("sync", CASES, [])] == [False]


def test_a_failure_names_figure_bound_and_measured_value():
    assert str(judged({"ratio": Spread(5.0, 4.5, 9.0, 3)})) == "FAIL sync 10kx10 ratio: bound 4.00, seen 4.50"


@pytest.mark.parametrize(
    ("attempts", "measured", "seen"),
    [
        ([3.5, 9.0, 9.0], 1, 3.5),
        ([4.4, 3.8, 9.0], 2, 3.8),
        ([4.2, 4.6, 3.9], 3, 3.9),
        ([4.2, 4.9, 4.6], 3, 4.2),
        ([None, 3.9], 2, 3.9),
        ([None, None, None], 3, None),
    ],
    ids=["within", "late once", "late twice", "slower", "missing once", "never measured"],
)
def test_a_benchmark_over_its_bound_is_measured_again(attempts, measured, seen):
    reports = [[Row("10kx10", {} if low is None else {"ratio": Spread(low, low, low, 1)})] for low in attempts]
    left = iter(reports)
    (verdict,) = gate.decide("sync", CASES, lambda: next(left))
    assert len(reports) - len(list(left)) == measured
    assert verdict.seen == seen


@pytest.mark.parametrize(("slower", "holds"), [(1.0, True), (1.15, False)], ids=["as before", "15 % slower"])
@pytest.mark.parametrize("disturbed", [0.0, 0.3, 0.6])
def test_a_change_that_is_slower_exceeds_a_bound_of_a_tenth_more_and_a_disturbed_one_does_not(slower, holds, disturbed):
    """Another program slows down a share of the changes by the factor 2, and of the yardsticks by 1.5."""
    yardstick = Yardstick()
    yardstick.taken += _taken(100.0, disturbed, 1.5)
    limits = _taken(5.0, disturbed, 1.1)
    usual = (150.0 - 5.0) / 100.0
    found = change.own([slower * taken for taken in _taken(150.0, disturbed, 2.0)], limits, yardstick)
    assert (found <= 1.1 * usual) is holds


def _taken(usual, disturbed, factor):
    """Return the durations of 100 measurements that vary by 10 %, of which a share was disturbed."""
    return [usual * (1 + n / 1000) * (factor if n % 10 < 10 * disturbed else 1.0) for n in range(100)]


def test_the_committed_bounds_are_valid_and_name_existing_benchmarks():
    bounds = gate.load()
    assert set(bounds) == {"sync", "change", "iptables", "restart", "firstpacket", "hostile"}
    assert set(bounds["hostile"]) == set(hostile.GATED)
    assert set(bounds["sync"]) <= {"1kx10", "10kx10"}
    assert {case.partition(" ")[2] for case in bounds["change"]} <= set(change.CASES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[speed.10kx10]\nratio = 1", "speed is no benchmark"),
        ("[sync.10kx10]\nratio = 'fast'", "must be a number, 0 or above"),
        ("[sync.10kx10]\nratio = -1", "must be a number, 0 or above"),
    ],
)
def test_errors_in_the_bounds_file_are_reported(tmp_path, text, complaint):
    path = tmp_path / "bounds.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        gate.load(path)
