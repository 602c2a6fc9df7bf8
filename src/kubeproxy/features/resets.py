"""Resets: connections to endpoints that terminated and were deleted are reset (backends/nftables/gone.py).

The Go kube-proxy leaves them to time out. See docs/beyond.md "Resets".
"""

from __future__ import annotations

from typing import Final

from kubeproxy.features.feature import Feature

RESETS: Final = Feature[bool](
    flag="reset-gone-endpoints",
    kind="bool",
    default="false",
    usage="Reset connections of a Service's clients to endpoints that were terminating and are gone; nftables mode"
    " only. (Not in the Go kube-proxy.)",
    off=False,
    unset=False,
    modes=frozenset({"nftables"}),
)
