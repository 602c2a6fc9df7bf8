"""How full connection tracking is, and what it could not take, as the kernel counts it for a network namespace.

Source: ctnetlink_ct_stat_cpu_fill_info and ctnetlink_stat_ct of net/netfilter/nf_conntrack_netlink.c of Linux 6.18.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubeproxy.kernel.conntrack.tracked import SUBSYSTEM
from kubeproxy.kernel.netlink.protocol import NLMSG_ERROR, Netlink, attributes, messages, understood

_GET_STATS_CPU: Final = SUBSYSTEM | 4  # IPCTNL_MSG_CT_GET_STATS_CPU
_GET_STATS: Final = SUBSYSTEM | 5  # IPCTNL_MSG_CT_GET_STATS
_ALL_FAMILIES: Final = bytes(4)  # struct nfgenmsg


class Level(NamedTuple):
    """How many entries there are, and how many there may be; 0 stands for any number.

    The limit is the same for every network namespace of the machine, and each has its own entries.
    """

    entries: int
    limit: int


class Refusals(NamedTuple):
    """What went wrong since the network namespace was made, in packets or entries, over all processors.

    `dropped`: packets for which there was no room, or that a helper refused. `early`: entries of connections that were
    not answered, or are closing, given up for new ones. `failed`: packets that lost a race for their entry, or whose
    translated addresses were taken, and were dropped. `clashes`: such races that were settled without a loss.
    `chains`: packets dropped as the hash table has too many entries in one place. `invalid`: packets of no connection.
    """

    dropped: int = 0
    early: int = 0
    failed: int = 0
    clashes: int = 0
    chains: int = 0
    restarts: int = 0
    invalid: int = 0


_FIELDS: Final = {"dropped": 10, "early": 11, "failed": 9, "clashes": 14, "chains": 15, "restarts": 13, "invalid": 4}
"""CTA_STATS_... of each field."""


@understood("connection tracking")
def level(link: Netlink) -> Level:
    """Return how full the table is. Raises ApplyError."""
    for data in link.ask(_GET_STATS, _ALL_FAMILIES, "the number of tracked connections"):
        for at in messages(data):
            if at.kind != NLMSG_ERROR:
                found = _numbers(data, at.start + len(_ALL_FAMILIES), at.end)
                return Level(found.get(1, 0), found.get(2, 0))
    return Level(0, 0)


@understood("connection tracking")
def refusals(link: Netlink) -> Refusals:
    """Return what went wrong so far. Raises ApplyError."""
    sums = dict.fromkeys(_FIELDS, 0)
    for data in link.dump_all(_GET_STATS_CPU, _ALL_FAMILIES, "the statistics of connection tracking"):
        for at in messages(data):
            if at.kind >> 8 == SUBSYSTEM >> 8:
                found = _numbers(data, at.start + len(_ALL_FAMILIES), at.end)
                sums = {name: total + found.get(_FIELDS[name], 0) for name, total in sums.items()}
    return Refusals(**sums)


def _numbers(data: bytes, start: int, end: int) -> dict[int, int]:
    return {kind: int.from_bytes(data[first:last], "big") for kind, first, last in attributes(data, start, end)}
