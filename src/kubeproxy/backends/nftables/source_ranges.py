"""Temporary rules for source ranges while a table is replaced.

The kernel activates the elements of a set of ranges at the end of a commit, after the rules, and later for larger sets.
Until then the rules would drop clients in the ranges. So the same transaction has a rule for each range, and the next
one removes these rules. Source: nf_tables_commit in net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from kubeproxy.backends.nftables.layout import TABLE, list_number
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.backends.nftables.ruleset import SOURCE_RANGES, Ruleset
from kubeproxy.kernel.nftables import compiling, messages
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.messages import rules_removal
from kubeproxy.kernel.nftables.tables import ChainContents
from kubeproxy.model.addresses import unpack

_MOST: Final = 2000
"""Maximum number of ranges that become rules: packets to restricted addresses pass them one by one."""


def spelled_out(ruleset: Ruleset, services: Iterable[Iterable[Placed]]) -> dict[str, ChainContents]:
    """Return the chain of source ranges by its name, with a rule for each range of these Services; {} for none."""
    rules = tuple(islice(_rules(ruleset.layout.ip, services), _MOST))
    if not rules:
        return {}
    to_number, *others = ruleset.definition(()).chains[SOURCE_RANGES].rules
    return {SOURCE_RANGES: ChainContents(None, (to_number, *rules, *others))}


def ordinary(ruleset: Ruleset) -> list[bytes]:
    """Return the messages that write the chain of source ranges without temporary rules."""
    place, chain = (ruleset.family, TABLE), ruleset.definition(()).chains[SOURCE_RANGES]
    return [rules_removal(*place, SOURCE_RANGES), *messages.rules(*place, {SOURCE_RANGES: chain})]


def _rules(ip: str, services: Iterable[Iterable[Placed]]) -> Iterator[x.Rule]:
    at_least, at_most = map(x.OPERATORS.index, (">=", "<="))
    for item in (item for placed in services for item in placed):
        number = unpack(list_number(item.ranges, item.plan.key.family))
        for first, last in item.allowed:
            text = f"{ip} daddr {number} {ip} saddr {unpack(first)} goto source-allowed"
            *before, equals, onwards = compiling.rule(text, ip)
            assert isinstance(equals, x.Compare)  # noqa: S101 - with the client's address
            yield (*before, x.Compare(equals.sreg, at_least, first), x.Compare(equals.sreg, at_most, last), onwards)
