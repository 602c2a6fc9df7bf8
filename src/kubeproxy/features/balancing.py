"""Weights, draining, slow start and Maglev: annotations decide how connections are shared (model/balancing.py).

The flag limits the memory that they cost on a node. See docs/balancing.md.
"""

from __future__ import annotations

from typing import Final

from kubeproxy.features.feature import Feature, negative

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
    modes=frozenset({"nftables"}),
    annotations=(
        "kube-proxy-py/weight",
        "kube-proxy-py/weights",
        "kube-proxy-py/slow-start",
        "kube-proxy-py/algorithm",
        "service.cilium.io/lb-algorithm",
    ),
    mistake=negative,
)
