"""Profiles of Hypothesis: `thorough` of `make test-all` draws all examples, `quick`, the default, a fifth of them."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

# How fast a machine is, and what else it does, is no property of the code.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
THOROUGH = 100
QUICK = 20
FEWEST = 5


def register_profiles() -> None:
    """Register both profiles and load the quick one; --hypothesis-profile=thorough loads the other."""
    settings.register_profile("quick", max_examples=QUICK, **_ANY_MACHINE)
    settings.register_profile("thorough", max_examples=THOROUGH, **_ANY_MACHINE)
    settings.load_profile("quick")


def examples(count: int, **more: Any) -> settings:
    """Settings of a test that draws `count` examples in the thorough profile, a fifth of them in the quick one."""
    drawn = count * settings.default.max_examples // THOROUGH
    return settings(max_examples=max(drawn, min(count, FEWEST)), **more)
