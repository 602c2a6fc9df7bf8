"""Rules that iptables-nft wrote, as nf_tables lists them: to which chain they lead, and what they say. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kubeproxy.kernel.netlink.protocol import attributes
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.nfnetlink import chain_rules


def expressions(family: int, table: str, chain: str) -> Iterator[bytes]:
    """Yield the packed expressions of each rule of a chain, none for a missing one. Raises NetlinkError."""
    return (raw for _, raw in chain_rules(family, table, chain))


def leads_to(rule: bytes, target: str) -> bool:
    """Return whether a rule, given by its expressions, has a chain as its target."""
    return target.encode() + b"\0" in rule


def has_jump(family: int, table: str, chain: str, target: str) -> bool:
    """Return whether some rule of a chain leads to another chain. Raises NetlinkError."""
    return any(leads_to(rule, target) for rule in expressions(family, table, chain))


def uncounted(rule: bytes) -> bytes:
    """Return a rule's expressions without those that count packets."""
    found = []
    for _, first, last in attributes(rule, 0, len(rule)):
        parts = {kind: (s, e) for kind, s, e in attributes(rule, first, last)}
        if rule[slice(*parts.get(nfta.EXPR_NAME, (0, 0)))] != b"counter\0":
            found.append(rule[first:last])
    return b"".join(found)
