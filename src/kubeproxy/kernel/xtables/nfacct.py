"""Named packet counters of the kernel (nfnetlink_acct), in which iptables rules count.

Source: include/uapi/linux/netfilter/nfnetlink_acct.h, nfnetlink_acct.c of Linux 6.18.
"""

from __future__ import annotations

import errno
from typing import Final

from kubeproxy.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    Netlink,
    answers,
    netfilter_header,
    parts,
    text_attribute,
    understood,
)

_NEW: Final = 7 << 8 | 0  # NFNL_SUBSYS_ACCT, NFNL_MSG_ACCT_NEW
_GET: Final = 7 << 8 | 1
_NAME: Final = 1
_PACKETS: Final = 2
_UNKNOWN: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)  # nfnetlink without the subsystem
_HEADER: Final = netfilter_header()


def ensure(name: str) -> bool:
    """Create a counter if none has this name; return False if the kernel has no such counters.

    Raises ApplyError for other refusals, such as no memory: a later try may succeed.
    """
    accepted = (*_UNKNOWN, errno.EBUSY, errno.EEXIST)
    with Netlink.open(NETLINK_NETFILTER) as link:
        request = _HEADER + text_attribute(_NAME, name)
        return link.request(_NEW, request, f"create the packet counter {name}", accepted=accepted) not in _UNKNOWN


@understood("packet counters")
def packets(name: str, link: Netlink) -> int:
    """Return the packets that a counter has counted. Raises NetlinkError, with code ENOENT if it is missing."""
    buffers = link.ask(_GET, _HEADER + text_attribute(_NAME, name), f"the packet counter {name}")
    return next((int.from_bytes(parts(*place)[_PACKETS], "big") for place in answers(buffers, len(_HEADER))), 0)
