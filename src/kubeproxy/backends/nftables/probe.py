"""Can this node run nftables mode? Says what is missing and how to get it, before anything is changed."""

from __future__ import annotations

import os
from typing import Final

from kubeproxy.kernel.nftables.presence import require

KERNEL = (5, 13)  # the oldest that the Go kube-proxy's nftables mode runs on

SKIP_KERNEL: Final = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
"""The variable that has an older kernel tried, as by the Go kube-proxy: distributions put newer parts into theirs."""


def check() -> None:
    """Raise Unsupported when this node cannot run the mode."""
    kernel = (0, 0) if os.environ.get(SKIP_KERNEL) else KERNEL
    require("nftables", kernel, f"use iptables mode, or upgrade; if its parts are newer, set {SKIP_KERNEL}=1")
