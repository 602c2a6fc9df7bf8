"""The chains of all tables of nf_tables, in the words of nft: where they hang, and what happens at their end.

Source: nf_tables_fill_chain_info in net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink, attributes, messages, understood
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_CHAIN, SUBSYSTEM

HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")
"""Names of hooks by number (enum nf_inet_hooks)."""
TABLE_FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""By number (enum in linux/netfilter.h, NFPROTO_...)."""

_DROP: Final = 0  # NF_DROP


class BaseChain(NamedTuple):
    """Where a chain hangs: the number of its hook, and its priority."""

    hook: int
    priority: int


class Chain(NamedTuple):
    """A chain: the number of its family, its table and its name; of one at a hook where, its type, and its policy."""

    family: int
    table: str
    name: str
    base: BaseChain | None
    kind: str
    drops: bool


def chains(link: Netlink, family: int = 0) -> Iterator[Chain]:
    """Yield the chains of all tables of a family, of all families for 0. Raises NetlinkError."""
    what = "the chains of nf_tables"
    with understood(what):
        for data in link.dump_all(GET_CHAIN, GENERIC.pack(family, 0, 0), what):
            for at in messages(data):
                if at.kind >> 8 == SUBSYSTEM:
                    yield _chain(data[at.start], _parts(data, at.start + GENERIC.size, at.end))


def _chain(family: int, parts: dict[int, bytes]) -> Chain:
    base = None
    if nfta.CHAIN_HOOK in parts:
        nested = parts[nfta.CHAIN_HOOK]
        hook = _parts(nested, 0, len(nested))
        number = int.from_bytes(hook.get(nfta.HOOK_NUMBER, b""), "big")
        base = BaseChain(number, int.from_bytes(hook.get(nfta.HOOK_PRIORITY, b""), "big", signed=True))
    table, name, kind = (
        parts.get(which, b"").rstrip(b"\0").decode(errors=nfta.NOT_TEXT)
        for which in (nfta.CHAIN_TABLE, nfta.CHAIN_NAME, nfta.CHAIN_TYPE)
    )
    drops = int.from_bytes(parts.get(nfta.CHAIN_POLICY, b"\1"), "big") == _DROP
    return Chain(family, table, name, base, kind, drops)


def _parts(data: bytes, start: int, end: int) -> dict[int, bytes]:
    return {kind: data[first:last] for kind, first, last in attributes(data, start, end)}
