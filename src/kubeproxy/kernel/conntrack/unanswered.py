"""Unanswered connections to endpoints: their removal from connection tracking.

A client repeats its SYN for more than a minute. As long as the first SYN is tracked, the kernel sends every repetition
to the same endpoint. Source: ctnetlink_del_conntrack in net/netfilter/nf_conntrack_netlink.c of Linux 6.18."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from typing import Final

from kubeproxy.kernel.conntrack.tracked import (
    ANSWERED,
    DELETE,
    DESTINATION_TRANSLATED,
    Tracked,
    Wanted,
    entries,
    identity,
    selection,
)
from kubeproxy.kernel.netlink.protocol import Closing, Netlink, NetlinkError, netfilter_header
from kubeproxy.model.addresses import Family, endpoint_id, family_of

_WANTED: Final = Wanted(DESTINATION_TRANSLATED, DESTINATION_TRANSLATED | ANSWERED)

_FEW: Final = 8  # endpoints: the kernel searches its whole table once for each endpoint


class Unanswered(Closing):
    """Removes entries. The first call opens a socket, which stays open (see udp_flows.Conntrack)."""

    def __init__(self) -> None:
        self._link: Netlink | None = None

    def close(self) -> None:
        """Close the socket."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def remove(self, endpoints: Collection[bytes]) -> int:
        """Remove the translated connections to which these endpoints sent no packet; return their number. Raises
        ApplyError. An endpoint is a packed address, protocol (1 byte) and port (2 bytes)."""
        if self._link is None:
            self._link = Netlink.open()
        removed = 0
        try:
            for family in {family_of(endpoint[:-3]) for endpoint in endpoints}:
                found = [one for one in _found(self._link, family, endpoints) if _endpoint(one) in endpoints]
                payloads = [netfilter_header(family) + identity(one) for one in found]
                results = self._link.requests(DELETE, payloads, "the removal of connections") if payloads else []
                for code, text in results:
                    if code not in {0, errno.ENOENT}:
                        raise NetlinkError(code, "cannot remove connections to ejected endpoints", text)
                removed += sum(code == 0 for code, _ in results)
        except BaseException:
            self.close()  # the socket may contain further answers
            raise
        return removed


def _found(link: Netlink, family: int, endpoints: Collection[bytes]) -> Iterator[Tracked]:
    """Yield a superset of the unanswered connections to endpoints. The kernel can select entries of few endpoints."""
    selected = [b""]
    if len(endpoints) <= _FEW:
        mine = [one for one in endpoints if family_of(one[:-3]) == family]
        ends = {(one[-3], one[:-3] if family == Family.IPV4 else b"", one[-2:]) for one in mine}
        selected = [selection(protocol, (b"", b""), (address, port)) for protocol, address, port in ends]
    for each in selected:
        yield from entries(link, family, _WANTED, each)


def _endpoint(one: Tracked) -> bytes:
    return endpoint_id(one.server, one.target[-3])
