"""Can this node run nftables mode? Says what is missing and how to get it, before anything is changed."""

from __future__ import annotations

from kubeproxy.kernel import nft

KERNEL = (5, 13)  # the oldest that the Go kube-proxy's nftables mode runs on


def check() -> None:
    """Raise Unsupported when this node cannot run the mode."""
    nft.require("nftables", KERNEL, "use iptables mode, or upgrade")
