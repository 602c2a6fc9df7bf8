"""Histories that once failed, each in its smallest form:

`make prove` prints a failing history as a test for this file.
"""

from __future__ import annotations

import pytest

from prove.play import played
from prove.steps import Step


@pytest.mark.slow("a history in a cluster")
async def test_udp_by_either_family_is_answered_soon_after_a_start_in_userspace_mode() -> None:
    # UDP requests of a pod failed: the removal of stale flows in the second committed family waited for a pause.
    history: list[Step] = [("restart",), ("quiet",)]
    assert await played(history, mode="userspace") == []


@pytest.mark.slow("a history in a cluster")
async def test_a_memory_error_in_an_inspection_leaves_no_complaint() -> None:
    # The error ended the process, and the next step looked before the process ran again: a fault of the judge. Now an
    # inspection survives the error.
    history: list[Step] = [("faulty", "no-memory", 68), ("quiet",), ("look",)]
    assert await played(history, mode="userspace") == []
