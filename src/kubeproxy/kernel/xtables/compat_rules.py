"""Rules that iptables-nft wrote, as nf_tables lists them: to which chain they lead, and what they say. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kubeproxy.kernel.netlink.protocol import understood
from kubeproxy.kernel.nftables.expressions import PacketCount, Rule, parse
from kubeproxy.kernel.nftables.nfnetlink import rules


def expressions(family: int, table: str, chain: str) -> Iterator[bytes]:
    """Yield the packed expressions of each rule of a chain, none for a missing one. Raises NetlinkError."""
    return (rule.raw for rule in rules(family, table, chain=chain))


def leads_to(rule: bytes, target: str) -> bool:
    """Return whether a rule, given by its expressions, has a chain as its target."""
    return target.encode() + b"\0" in rule


def has_jump(family: int, table: str, chain: str, target: str) -> bool:
    """Return whether some rule of a chain leads to another chain. Raises NetlinkError."""
    return any(leads_to(rule, target) for rule in expressions(family, table, chain))


@understood("rules of nf_tables")
def uncounted(rule: bytes) -> Rule:
    """Return a rule without the expressions that count packets."""
    return tuple(expression for expression in parse(rule) if not isinstance(expression, PacketCount))
