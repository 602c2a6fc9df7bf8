"""Unanswered connections to endpoints: their removal from connection tracking. A client repeats its SYN for more than a
minute. As long as the first SYN is tracked, the kernel sends every repetition to the same endpoint. Source:
ctnetlink_del_conntrack in net/netfilter/nf_conntrack_netlink.c of Linux 6.18."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from kubeproxy.kernel.conntrack import tracked
from kubeproxy.kernel.netlink.protocol import LastingLink, Netlink, netfilter_header
from kubeproxy.model.addresses import Family, endpoint_id, family_of

_WANTED: Final = tracked.Wanted(tracked.DESTINATION_TRANSLATED, tracked.DESTINATION_TRANSLATED | tracked.ANSWERED)

_FEW: Final = 8  # the maximum number of requests, each of which makes the kernel search its whole table


class Unanswered(LastingLink):
    """Removes unanswered connections from connection tracking."""

    def remove(self, endpoints: Collection[bytes]) -> int:
        """Remove the translated connections to which these endpoints sent no packet; return their number. Raises
        ApplyError. An endpoint is a packed address, protocol (1 byte) and port (2 bytes)."""
        removed = 0
        with self.link() as link:
            for family in {family_of(endpoint[:-3]) for endpoint in endpoints}:
                found = [one for one in _found(link, family, endpoints) if _endpoint(one) in endpoints]
                payloads = [netfilter_header(family) + tracked.identity(one) for one in found]
                removed += tracked.delete(link, payloads, "connections to ejected endpoints")
        return removed


def _found(link: Netlink, family: int, endpoints: Collection[bytes]) -> Iterator[tracked.Tracked]:
    """Yield the unanswered connections to these endpoints, and possibly to other endpoints. If there are only a few
    endpoints, the kernel selects their entries."""
    selected = [b""]
    if len(endpoints) <= _FEW:
        mine = [one for one in endpoints if family_of(one[:-3]) == family]
        ends = {(one[-3], one[:-3] if family == Family.IPV4 else b"", one[-2:]) for one in mine}
        selected = [tracked.selection(protocol, (b"", b""), (address, port)) for protocol, address, port in ends]
    for each in selected:
        yield from tracked.entries(link, family, _WANTED, each)


def _endpoint(one: tracked.Tracked) -> bytes:
    return endpoint_id(one.server, one.target[-3])
