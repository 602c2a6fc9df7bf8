"""Whether nf_tables can be used here, and tables of a name removed from both families."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from typing import Final

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.proc.modules import kernel_version

_NO_NF_TABLES: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT})
"""What a kernel without nf_tables says, or without nfnetlink at all."""


def require(mode: str, kernel: tuple[int, int], otherwise: str) -> None:
    """Raise Unsupported when nf_tables cannot be used here. `otherwise` says what to do about an old kernel."""
    release = os.uname().release
    if (0, 0) < kernel_version(release) < kernel:
        oldest = ".".join(map(str, kernel))
        raise Unsupported(f"{mode} mode needs Linux {oldest} or later, this is {release}: {otherwise}")
    try:
        nfnetlink.table(socket.AF_INET, "kube-proxy")
    except NetlinkError as error:
        reason = str(error).replace(": ", ", ")  # what is before the first ": " is what lacks, the rest its fix
        raise Unsupported(
            f"nf_tables does not answer ({reason}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


def remove_table(name: str) -> list[str]:
    """Remove the table of this name from both families, where it is there; return what could not be removed."""
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
            _remove(family, name)
        except ApplyError as error:
            if not isinstance(error, NetlinkError) or error.code != errno.ENOENT:  # another program was faster
                failures.append(f"cannot remove the table {name}: {error}")
    return failures


def _remove(family: int, name: str) -> None:
    with closing(nfnetlink.Transactions.open()) as transactions:
        transactions.commit([nfnetlink.table_removal(family, name)])
