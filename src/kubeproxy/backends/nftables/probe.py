"""Can this node run nftables mode? Says what is missing and how to get it, before anything is changed."""

from __future__ import annotations

import os
import re

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.errors import Unsupported
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.kernel.netlink import NetlinkError
from kubeproxy.model.addresses import Family

KERNEL = (5, 13)  # the oldest that the Go kube-proxy's nftables mode runs on
NFT = (1, 0, 1)


def check() -> None:
    """Raise Unsupported when this node cannot run the mode."""
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) < KERNEL:
        raise Unsupported(f"nftables mode needs Linux 5.13 or later, this is {release}: use iptables mode, or upgrade")
    version = nft.version()
    if version < NFT:
        shown = ".".join(map(str, version))
        raise Unsupported(f"nftables mode needs nft 1.0.1 or later, this is {shown}: upgrade the package nftables")
    try:
        nfnetlink.table(Family.IPV4, TABLE)
    except NetlinkError as error:
        raise Unsupported(
            f"nf_tables does not answer ({error}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


def cleanup() -> list[str]:
    """Remove our tables (or the Go kube-proxy's, which have the same names); return what could not be removed."""
    return nft.remove_table(TABLE)
