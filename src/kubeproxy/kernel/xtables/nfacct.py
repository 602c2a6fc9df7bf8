"""Named packet counters of the kernel (nfnetlink_acct), which iptables rules count into.

Source: include/uapi/linux/netfilter/nfnetlink_acct.h, nfnetlink_acct.c of Linux 6.18.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final

from kubeproxy.kernel.netlink.protocol import (
    NETLINK_NETFILTER,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    messages,
    understood,
)

_SUBSYSTEM: Final = 7
_NEW: Final = _SUBSYSTEM << 8 | 0
_GET: Final = _SUBSYSTEM << 8 | 1
_NAME: Final = 1
_PACKETS: Final = 2
_UNKNOWN: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT})  # nfnetlink without the subsystem
_GENERIC: Final = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)


def ensure(name: str) -> bool:
    """Make a counter where there is none of that name; return False where the kernel knows no counters.

    Raises ApplyError when it refuses for another reason, as for want of memory: another time it may not.
    """
    with Netlink.open(NETLINK_NETFILTER) as link:
        ((code, said),) = link.requests(_NEW, [_GENERIC + attribute(_NAME, name.encode() + b"\0")], "a packet counter")
    if code in _UNKNOWN:
        return False
    if code not in (0, errno.EBUSY, errno.EEXIST):
        raise NetlinkError(code, f"the kernel makes no packet counter {name} {said}".rstrip())
    return True


@understood("packet counters")
def packets(name: str) -> int:
    """Return what a counter has counted, 0 when there is none. Raises ApplyError."""
    wanted = name.encode() + b"\0"
    with Netlink.open(NETLINK_NETFILTER) as link:
        buffers = link.dump_all(_GET, _GENERIC, "the packet counters")
    for data in buffers:
        for at in messages(data):
            if at.kind >> 8 != _SUBSYSTEM:
                continue
            found = {kind: data[s:e] for kind, s, e in attributes(data, at.start + len(_GENERIC), at.end)}
            if found.get(_NAME) == wanted:
                return int.from_bytes(found.get(_PACKETS, b""), "big")
    return 0
