"""The size of connection tracking's table, and its failures, as the kernel counts them by network namespace.

Source: ctnetlink_ct_stat_cpu_fill_info and ctnetlink_stat_ct of net/netfilter/nf_conntrack_netlink.c of Linux 6.18.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubeproxy.kernel.conntrack.tracked import SUBSYSTEM
from kubeproxy.kernel.netlink.protocol import Netlink, answers, netfilter_header, parts, understood

_GET_STATS_CPU: Final = SUBSYSTEM | 4  # IPCTNL_MSG_CT_GET_STATS_CPU
_GET_STATS: Final = SUBSYSTEM | 5  # IPCTNL_MSG_CT_GET_STATS
_ALL_FAMILIES: Final = netfilter_header()


class Level(NamedTuple):
    """The number of entries of this network namespace, and the limit for each namespace of the machine; 0 for none."""

    entries: int
    limit: int


class Refusals(NamedTuple):
    """Failures since the network namespace was created, in packets or entries, of all processors.

    `dropped`: packets without room for an entry, or refused by a helper. `early`: entries of unanswered or closing
    connections that were removed for new ones. `failed`: packets dropped because another packet created their entry
    first, or their translated addresses were in use. `clashes`: such cases without a loss. `chains`: packets dropped
    because a bucket has too many entries. `invalid`: packets of no connection.
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
    """Return the number of entries and its limit. Raises ApplyError."""
    buffers = link.ask(_GET_STATS, _ALL_FAMILIES, "the number of tracked connections")
    found = next((_numbers(place) for place in answers(buffers, len(_ALL_FAMILIES))), {})
    return Level(found.get(1, 0), found.get(2, 0))


@understood("connection tracking")
def refusals(link: Netlink) -> Refusals:
    """Return the failures so far. Raises ApplyError."""
    sums = dict.fromkeys(_FIELDS, 0)
    buffers = link.dump_all(_GET_STATS_CPU, _ALL_FAMILIES, "the statistics of connection tracking")
    for place in answers(buffers, len(_ALL_FAMILIES)):
        found = _numbers(place)
        sums = {name: total + found.get(_FIELDS[name], 0) for name, total in sums.items()}
    return Refusals(**sums)


def _numbers(place: tuple[bytes, int, int]) -> dict[int, int]:
    return {kind: int.from_bytes(value, "big") for kind, value in parts(*place).items()}
