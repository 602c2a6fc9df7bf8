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
