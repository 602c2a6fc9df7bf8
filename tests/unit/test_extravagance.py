"""The cost of one Service grows linearly with its size: see docs/security.md, "How much a writer can cost"."""

from __future__ import annotations

import pytest

from kubeproxy.model.plan import ROOM
from support.fuzz.extravagance import CASES, cost
from support.fuzz.judge import CONSTANT, TIMES

BOUNDED = (
    "annotations of 256 KiB",
    "10,000 source ranges",
    pytest.param("1,000 slices of 100 endpoints", marks=pytest.mark.slow("100,000 endpoints")),
    "100 addresses, 1,000 source ranges",
)


@pytest.mark.parametrize("case", BOUNDED)
def test_the_cost_of_a_service_is_linear(case: str) -> None:
    found = cost(CASES[case]())
    assert found.peak < TIMES * found.size + CONSTANT


def test_products_of_parts_cost_no_more_than_the_product() -> None:
    assert 300 * 300 <= cost(CASES["300 ports, 300 endpoints"]()).elements < 1.1 * 300 * 300


def test_source_ranges_are_there_once_for_all_addresses_and_ports() -> None:
    frontends = 100 * 20
    assert cost(CASES["100 ports, 20 addresses, 1,000 source ranges"]()).elements < 6 * frontends + 1000


def test_weights_multiply_within_limits() -> None:
    assert cost(CASES["1,000 endpoints with weights"]()).elements < 65 * 1000


@pytest.mark.parametrize("case", [case for case in CASES if "21 addresses" in case])
def test_weights_and_tables_have_room_for_all_ports_and_addresses_together(case: str) -> None:
    assert cost(CASES[case]()).elements < 1.2 * ROOM
