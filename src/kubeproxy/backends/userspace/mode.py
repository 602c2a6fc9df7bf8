"""userspace mode, as the program sees it."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Final

from kubeproxy.backends.mode import Mode, Report
from kubeproxy.backends.userspace.backend import UserspaceBackend
from kubeproxy.backends.userspace.datapath import DataPath
from kubeproxy.backends.userspace.layout import TABLE
from kubeproxy.backends.userspace.listeners import Listeners
from kubeproxy.backends.userspace.udp import Sessions
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.validate import parse_port_range
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.kernel.netlink import NetlinkError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals

KERNEL: Final = (5, 9)  # the oldest that rejects in prerouting
NFT: Final = (1, 0, 1)
SWITCH_INTERVAL: Final = 0.5e-3
"""Seconds that the engine's thread may keep the data path's waiting, each time both have something to do.

With Python's own 5 ms, one connection gets 900 requests a second through beside a busy engine; with this, 4,000.
"""


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:  # noqa: ARG001 - needs neither
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found and (int(found[1]), int(found[2])) < KERNEL:
        raise Unsupported(f"userspace mode needs Linux 5.9 or later, this is {release}: upgrade")
    version = nft.version()
    if version < NFT:
        shown = ".".join(map(str, version))
        raise Unsupported(f"userspace mode needs nft 1.0.1 or later, this is {shown}: upgrade the package nftables")
    try:
        nfnetlink.table(Family.IPV4, TABLE)
    except NetlinkError as error:
        raise Unsupported(
            f"nf_tables does not answer ({error}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


def _open(config: KubeProxyConfiguration, world: Globals, report: Report) -> list[UserspaceBackend]:  # noqa: ARG001
    sys.setswitchinterval(SWITCH_INTERVAL)
    path = DataPath(config.udp_idle_timeout)
    path.mark = world.masquerade_mark
    ports, sessions = parse_port_range(config.port_range) or range(0), Sessions(path)
    return [UserspaceBackend(family, world, path, Listeners(path, sessions, ports)) for family in world.families]


def _cleanup() -> list[str]:
    """Remove our tables; return what could not be removed."""
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


MODE = Mode("userspace", _check, _open, _cleanup)
