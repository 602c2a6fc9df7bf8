"""A check that nf_tables works, and the removal of a table from both families."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from typing import Final

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.messages import table_removal
from kubeproxy.kernel.proc.modules import kernel_version

_NO_NF_TABLES: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT})
"""Errors of a kernel without nf_tables, or without nfnetlink."""


def require(mode: str, kernel: tuple[int, int], otherwise: str) -> None:
    """Raise Unsupported unless nf_tables works and the kernel is new enough; `otherwise` is the fix for an old one."""
    release = os.uname().release
    if (0, 0) < kernel_version(release) < kernel:
        oldest = ".".join(map(str, kernel))
        raise Unsupported(f"{mode} mode needs Linux {oldest} or later, this is {release}: {otherwise}")
    try:
        nfnetlink.table(socket.AF_INET, "kube-proxy")
    except NetlinkError as error:
        reason = str(error).replace(": ", ", ")  # the text after the first ": " is the fix
        raise Unsupported(
            f"nf_tables does not answer ({reason}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


def remove_table(name: str) -> list[str]:
    """Remove the table of this name from both families, if it exists; return the errors."""
    failures = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            if nfnetlink.table(family, name) is None:
                continue
        except ApplyError as error:
            if not isinstance(error, NetlinkError) or error.code not in _NO_NF_TABLES:
                failures.append(f"cannot look for the table {name}: {error}")
            continue
        try:
            with closing(nfnetlink.Transactions.open()) as transactions:
                transactions.commit([table_removal(family, name)])
        except ApplyError as error:
            if not isinstance(error, NetlinkError) or error.code != errno.ENOENT:  # another program removed it
                failures.append(f"cannot remove the table {name}: {error}")
    return failures
