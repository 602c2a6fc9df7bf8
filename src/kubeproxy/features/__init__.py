"""The features that the Go kube-proxy lacks, each declared in a file of its own. Pure, below the model.

Flags, settings, the check of the mode and the warning about a flag without effect come from here: see CONTRIBUTING.md
"A new feature".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubeproxy.features.balancing import BALANCING
from kubeproxy.features.connection_counters import CONNECTION_COUNTERS
from kubeproxy.features.fast_forwarding import FAST_FORWARDING
from kubeproxy.features.feature import Feature
from kubeproxy.features.resets import RESETS
from kubeproxy.features.startup_taint import STARTUP_TAINT

__all__ = ("BALANCING", "CONNECTION_COUNTERS", "FAST_FORWARDING", "FEATURES", "RESETS", "STARTUP_TAINT")

FEATURES: Final[dict[str, Feature[Any]]] = {
    feature.flag: feature for feature in (STARTUP_TAINT, CONNECTION_COUNTERS, RESETS, FAST_FORWARDING, BALANCING)
}
"""All features, by flag."""


def values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the features whose flags are set, by flag. Raises ConfigError."""
    return {name: feature.checked(flags) for name, feature in FEATURES.items() if name in flags}


def without_effect(flags: Mapping[str, Any], mode: str) -> list[str]:
    """Return the flags that turn on a feature which the mode does not support."""
    return [name for name, feature in FEATURES.items() if flags.get(name) and not feature.supported(mode)]
