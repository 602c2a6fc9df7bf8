"""The gate compares ratios with bounds, and what was not measured does not pass."""

from __future__ import annotations

import pytest

from bench import change, gate, hostile
from bench.figures import Spread
from bench.report import Row

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
def test_what_was_not_measured_fails(figures):
    verdict = judged(figures)
    assert not verdict.holds
    assert str(verdict) == "FAIL sync 10kx10 ratio: bound 4.00, not measured"


def test_a_case_that_was_not_measured_fails():
    assert [v.holds for v in gate.judge("sync", CASES, [])] == [False]


def test_a_failure_names_figure_bound_and_what_was_seen():
    assert str(judged({"ratio": Spread(5.0, 4.5, 9.0, 3)})) == "FAIL sync 10kx10 ratio: bound 4.00, seen 4.50"


def test_the_committed_bounds_can_be_read_and_name_what_is_measured():
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
