"""The features that the Go kube-proxy lacks, each declared once. Pure, below the model.

The flags, the settings, the check of the mode and the warning about a flag without effect are derived from these
declarations: see CONTRIBUTING.md "A new feature".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import Any, Final, NamedTuple

from kubeproxy.features.feature import Feature

_NFTABLES: Final = frozenset({"nftables"})


def _negative(value: int, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    return f"must not be negative, got {value}" if value < 0 else ""


# Start-up taint: removed from the Node after the first full sync (program/startup_taint.py).

_QUALIFIED_NAME: Final = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""A key of a label or taint: IsQualifiedName of apimachinery."""


def _no_taint_key(key: str, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    if key and not _QUALIFIED_NAME.fullmatch(key):
        return f'expected the key of a taint, as example.com/not-ready, got "{key}"'
    return ""


STARTUP_TAINT: Final = Feature[str](
    flag="startup-taint",
    kind="string",
    default="",
    usage="The key of a taint to remove from this Node once everything is programmed the first time. It needs the right"
    " to patch Nodes. (Not in the Go kube-proxy.)",
    off="",
    unset="",
    mistake=_no_taint_key,
)

# Connection counters: the kernel counts the connections of each endpoint (backends/nftables/counting.py).

CONNECTION_COUNTERS: Final = Feature[bool](
    flag="connection-counters",
    kind="bool",
    default="false",
    usage="Count the connections that each endpoint gets, in the kernel; nftables mode only. It costs memory on nodes"
    " with many processors. (Not in the Go kube-proxy.)",
    off=False,
    unset=False,
    modes=_NFTABLES,
)

# Resets of connections to endpoints that terminated and were deleted (backends/nftables/gone.py).

RESETS: Final = Feature[bool](
    flag="reset-gone-endpoints",
    kind="bool",
    default="false",
    usage="Reset connections of a Service's clients to endpoints that were terminating and are gone; nftables mode"
    " only. (Not in the Go kube-proxy.)",
    off=False,
    unset=False,
    modes=_NFTABLES,
)

# Fast forwarding: long connections bypass all rules by a flowtable (backends/nftables/forwarding.py).


class Forwarding(NamedTuple):
    """Connections that bypass all rules: their protocols (none: off), and the number of client packets before that.

    See docs/beyond.md "Fast forwarding".
    """

    after: int = 0
    protocols: tuple[int, ...] = ()


def _no_forwarding(after: int, flags: Mapping[str, Any]) -> str:
    if after and flags.get("reset-gone-endpoints"):
        return "cannot be used with --reset-gone-endpoints: connections that are fast forwarded bypass its rules"
    return _negative(after, flags)


FAST_FORWARDING: Final = Feature[Forwarding](
    flag="fast-forward-after",
    kind="int32",
    default="0",
    usage="Let connections of Services bypass all rules after so many packets of the client, by a flowtable of the"
    " kernel; nftables mode only. 0 for never. (Not in the Go kube-proxy.)",
    off=Forwarding(),
    unset=Forwarding(),
    modes=_NFTABLES,
    mistake=_no_forwarding,
    read=lambda after: Forwarding(after, (IPPROTO_TCP, IPPROTO_UDP)) if after else Forwarding(),
)

# Weights, draining, slow start, Maglev: annotations decide how connections are shared (model/balancing.py).

ENTRIES: Final = 1 << 20
"""The default limit of entries in the kernel for weights and tables of Maglev, of all Services of a node."""

BALANCING: Final = Feature[int](
    flag="balancing-entries",
    kind="int32",
    default=str(ENTRIES),
    usage="The limit of entries in the kernel for weights and consistent hashing, of all Services; a quarter of it"
    " holds for one namespace. Older Services come first; connections of the others are shared evenly. 0 ignores these"
    " annotations; nftables mode only. (Not in the Go kube-proxy.)",
    off=0,
    unset=ENTRIES,
    modes=_NFTABLES,
    annotations=(
        "kube-proxy-py/weight",
        "kube-proxy-py/weights",
        "kube-proxy-py/slow-start",
        "kube-proxy-py/algorithm",
        "service.cilium.io/lb-algorithm",
    ),
    mistake=_negative,
)

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
