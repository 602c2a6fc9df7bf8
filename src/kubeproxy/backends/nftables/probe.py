"""Can this node run nftables mode? Says what is missing and how to get it, before anything is changed."""

from __future__ import annotations

import errno
import os
import re

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.errors import ApplyError, Unsupported
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
    failures = []
    for ip, family in (("ip", Family.IPV4), ("ip6", Family.IPV6)):
        try:
            if nfnetlink.table(family, TABLE) is None:
                continue
        except NetlinkError as error:
            if error.code in {errno.EPERM, errno.EACCES}:
                failures.append(str(error))
            continue  # a kernel without nf_tables has no tables of ours
        try:
            # `add` first: deleting a table that is missing would be an error, and nft 1.0.6 knows no `destroy`.
            nft.run(f"add table {ip} {TABLE}\ndelete table {ip} {TABLE}\n")
        except ApplyError as error:
            failures.append(str(error))
    return failures
