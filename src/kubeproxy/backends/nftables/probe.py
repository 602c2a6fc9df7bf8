"""Check that this node can run nftables mode, before anything is changed."""

from __future__ import annotations

import os
from typing import Final

from kubeproxy.kernel.nftables.presence import require

KERNEL = (5, 13)  # the minimum of the Go kube-proxy's nftables mode

SKIP_KERNEL: Final = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
"""Environment variable of the Go kube-proxy that allows older kernels: distributions backport newer code to them."""


def check() -> None:
    """Raise Unsupported, with the fix, if this node cannot run the mode."""
    kernel = (0, 0) if os.environ.get(SKIP_KERNEL) else KERNEL
    require("nftables", kernel, f"use iptables mode, or upgrade; if its parts are newer, set {SKIP_KERNEL}=1")
