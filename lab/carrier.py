"""Waits until new links carry packets.

The kernel uses a new link, and answers neighbour solicitations for its IPv6 addresses, only after workers have handled
the carrier and the addresses (net/core/link_watch.c, addrconf_dad_work). Until then the kernel drops packets, a bridge
does not forward to the port, and a neighbour solicitation is lost; the kernel repeats a lost solicitation only a second
later.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kubeproxy.kernel.netlink.protocol import NETLINK_ROUTE, Netlink, NetlinkError, attribute, parts
from lab.iproute import LinkError
from lab.netns import run_in

TIMEOUT: Final = 5.0
"""Seconds after which a link without carrier is an error; a late worker takes one second."""
_PAUSE: Final = 0.002
_RTM_GETLINK: Final = 18
_NAME, _OPERSTATE = 3, 16  # IFLA_IFNAME, IFLA_OPERSTATE
_UP: Final = b"\x06"  # IF_OPER_UP
_IFINFOMSG: Final = struct.Struct("=BxHiII")  # family, type, index, flags, mask of the changed flags
NET: Final = Path("/proc/thread-self/net")
_SOLICITED_NODE: Final = "ff0200000000000000000001ff"  # RFC 4291: the last 24 bits of the address follow this prefix


def wait_for_links(namespace: str, links: Sequence[str]) -> None:
    """Wait until the links of a namespace carry packets and their IPv6 addresses answer. Raises LinkError."""
    run_in(namespace, lambda: _wait(namespace, links))


def _wait(namespace: str, links: Sequence[str]) -> None:
    end = time.monotonic() + TIMEOUT
    try:
        with Netlink.open(NETLINK_ROUTE) as netlink:
            for link in links:
                while not (_is_up(netlink, link) and can_be_found(link)):
                    if time.monotonic() > end:
                        raise LinkError(f"{link} in {namespace} carries no packets after {TIMEOUT:g} s")
                    time.sleep(_PAUSE)
    except NetlinkError as error:
        raise LinkError(f"{namespace}: {error}") from error


def _is_up(netlink: Netlink, link: str) -> bool:
    """Return whether a link is up. Since Linux 6.8 the request itself makes the kernel handle the link's carrier."""
    head = _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    asked = head + attribute(_NAME, link.encode() + b"\0")
    (place,) = netlink.ask(_RTM_GETLINK, asked, f"the link {link}", _IFINFOMSG.size)
    return parts(*place).get(_OPERSTATE) == _UP


def can_be_found(link: str) -> bool:
    """Return whether a link of this namespace answers neighbour solicitations for each of its IPv6 addresses."""
    groups = {fields[2] for line in _lines("igmp6") if (fields := line.split())[1] == link}
    addresses = {fields[0] for line in _lines("if_inet6") if (fields := line.split())[-1] == link}
    return all(_SOLICITED_NODE + address[-6:] in groups for address in addresses)


def _lines(name: str) -> list[str]:
    return Path(NET, name).read_text(encoding="ascii").splitlines()
