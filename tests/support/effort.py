"""Selects the tests of `make test`: a tenth of the Hypothesis examples of `make test-all`, and one of many similar
tests.

Profiles of Hypothesis: `thorough` draws all examples, `quick`, the default, a tenth of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A test must not depend on the speed and load of the machine.
_ANY_MACHINE: Mapping[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
THOROUGH = 100
QUICK = 10
FEWEST = 5


def register_profiles() -> None:
    """Register both profiles and load the quick one; --hypothesis-profile=thorough loads the other."""
    settings.register_profile("quick", max_examples=QUICK, **_ANY_MACHINE)
    settings.register_profile("thorough", max_examples=THOROUGH, **_ANY_MACHINE)
    settings.load_profile("quick")


def examples(count: int, **more: Any) -> settings:
    """Return the settings of a test that draws `count` examples in the thorough profile, a tenth in the quick one."""
    drawn = count * settings().max_examples // THOROUGH
    return settings(max_examples=max(drawn, min(count, FEWEST)), **more)


def stride(step: int) -> int:
    """Return the step of a loop over points of failure: ten times larger in the quick profile."""
    return step * THOROUGH // settings().max_examples


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the variants of a test that its mark `quick` does not name; each name is a part of their id.

    Without names the mark selects a third of the variants, by a hash of their ids.
    """
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is None:
            continue
        assert isinstance(item, pytest.Function)
        named = any(f"-{name}-" in f"-{item.callspec.id}-" for name in mark.args)
        drawn = not mark.args and zlib.crc32(item.nodeid.encode()) % 3 == 0
        if not (named or drawn):
            item.add_marker(pytest.mark.slow("another variant is in the quick set"))


def all_but_one_are_slow(name: str, items: Sequence[pytest.Item]) -> None:
    """Mark as slow all of these tests except one, selected by a hash of their common name.

    An item may occur more than once.
    """
    quick = items[zlib.crc32(name.encode()) % len(items)]
    for item in {*items} - {quick}:
        item.add_marker(pytest.mark.slow("another like it is in the quick set"))
