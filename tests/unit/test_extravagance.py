"""How what one Service costs grows with what is written in it: see docs/security.md, "How much a writer can cost"."""

from __future__ import annotations

import pytest

from support.fuzz.extravagance import CASES, cost
from support.fuzz.judge import CONSTANT, TIMES

BOUNDED = ("annotations of 256 KiB", "10,000 source ranges", "1,000 slices of 100 endpoints")


@pytest.mark.parametrize("case", BOUNDED)
def test_what_is_written_once_costs_once(case: str) -> None:
    found = cost(CASES[case]())
    assert found.peak < TIMES * found.size + CONSTANT


@pytest.mark.parametrize(
    ("case", "ways"), [("300 ports, 300 endpoints", 300 * 300), ("100 addresses, 1,000 source ranges", 100 * 1000)]
)
def test_what_multiplies_does_no_more_than_that(case: str, ways: int) -> None:
    assert ways <= cost(CASES[case]()).elements < 1.1 * ways


def test_weights_multiply_within_limits() -> None:
    assert cost(CASES["1,000 endpoints with weights"]()).elements < 65 * 1000
