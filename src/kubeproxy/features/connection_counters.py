"""Connection counters: the kernel counts the connections of each endpoint (backends/nftables/counting.py)."""

from __future__ import annotations

from typing import Final

from kubeproxy.features.feature import Feature

CONNECTION_COUNTERS: Final = Feature[bool](
    flag="connection-counters",
    kind="bool",
    default="false",
    usage="Count the connections that each endpoint gets, in the kernel; nftables mode only. It costs memory on nodes"
    " with many processors. (Not in the Go kube-proxy.)",
    off=False,
    unset=False,
    modes=frozenset({"nftables"}),
)
