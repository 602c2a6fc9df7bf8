"""The set of suspects: endpoints that did not answer a client's SYN, or refused a client's connection or packet. Rules
add and remove the elements, and elements time out, so the set is not part of the comparison of elements. The proxy
reads only this set, so a connection that an endpoint answers costs no event and no read. See docs/failover.md."""

from __future__ import annotations

import errno
from socket import IPPROTO_ICMP, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP
from typing import Final

from kubeproxy.backends.nftables.gone import endpoint_key
from kubeproxy.backends.nftables.layout import TABLE, Layout
from kubeproxy.kernel.netlink.protocol import LastingLink, NetlinkError
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import DYNAMIC, TIMEOUT, SetSpec
from kubeproxy.model.addresses import Family

FAILING: Final = "failing-endpoints"
CHAIN: Final = "failing-check"
SECONDS: Final = 3  # until the kernel removes an element that no further packet confirmed
MOST: Final = 1 << 11  # the maximum number of elements, which limits the proxy's work in a flood

_ICMP: Final = {Family.IPV4: "icmp", Family.IPV6: "ipv6-icmp"}
_ERRORS: Final = frozenset({IPPROTO_ICMP, IPPROTO_ICMPV6})


def declaration(layout: Layout) -> SetSpec:
    """Return the declaration of the set."""
    key = (f"{layout.ip} daddr", "meta l4proto", "th dport")
    return SetSpec(FAILING, key, flags=TIMEOUT | DYNAMIC, size=MOST, timeout=SECONDS * 1000)


def checks(layout: Layout) -> tuple[str, ...]:
    """Return the rules for base chains that run before address translation. A packet of an established connection costs
    two comparisons. The first packet of a connection is not translated yet. Therefore a packet with state `new` and
    status `dnat` is a repeated SYN, and a packet of a connection that is not assured is a repeated SYN or part of a
    handshake."""
    return (
        f"ct status & assured == 0 ct status dnat jump {CHAIN}",
        f"meta l4proto {_ICMP[layout.family]} ct state related ct status dnat update {_endpoint(layout)}",
    )


def rules(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the chain that adds an endpoint to the set after a client's repeated SYN or a reset from the endpoint. The
    chain removes an endpoint that answers a SYN."""
    endpoint = _endpoint(layout)
    return {
        CHAIN: (
            f"meta l4proto tcp ct state new update {endpoint}",
            "ct direction original return",
            f"tcp flags rst update {endpoint}",
            f"tcp flags syn delete {endpoint}",
        )
    }


def _endpoint(layout: Layout) -> str:
    """Return the element for the endpoint of a packet's connection. The element's protocol is that of the packet (ICMP
    for an ICMP error), because nft cannot list an element with the protocol of the connection."""
    return f"@{FAILING} {{ ct reply {layout.ip} saddr . meta l4proto . ct reply proto-src }}"


class SuspectReader(LastingLink):
    """Reads the suspects of one family from the kernel."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def read(self) -> set[bytes]:
        """Return the endpoints in the set; no endpoints if the set is missing. Raises NetlinkError."""
        with self.link() as link:
            try:
                listed = TableReader(self._family, TABLE, link).pairs(FAILING)
                found = {endpoint_key(key) for some in listed for key, _ in some}
            except NetlinkError as error:
                if error.code != errno.ENOENT:
                    raise
                return set()
        errors = {key for key in found if key[-3] in _ERRORS}
        return found - errors | {
            key[:-3] + bytes((protocol,)) + key[-2:] for key in errors for protocol in (IPPROTO_TCP, IPPROTO_UDP)
        }
