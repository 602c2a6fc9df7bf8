"""Chains that the proxy makes are told from those of other programs by their handles alone."""

import pytest

from kubeproxy.backends.nftables.audit import Signature, is_result
from kubeproxy.kernel.netlink.protocol import message
from kubeproxy.kernel.nftables.nfnetlink import NEW_CHAIN, NEW_RULE, NEW_SET, TableHeader
from kubeproxy.kernel.nftables.tables import ListedChain

KINDS = (NEW_SET, NEW_CHAIN, NEW_CHAIN, NEW_RULE, NEW_SET, NEW_RULE, NEW_RULE)
MADE = [message(kind, 0, 0, b"") for kind in KINDS]
HEADER = TableHeader(1, "ours", dormant=False)


def chains(**handles):
    return frozenset((name, ListedChain(2, "t", name, handle, None)) for name, handle in handles.items())


BEFORE = Signature(HEADER, (4, 5), chains(a=2))
CHAINS = chains(a=2, b=7, c=8)


def test_our_rules_have_handles_in_a_row():
    assert is_result(BEFORE, MADE, Signature(HEADER, (4, 5, 9, 11, 12), CHAINS))


@pytest.mark.parametrize(
    "rules",
    [
        (4, 5, 9, 11, 12, 13),  # one more
        (4, 13, 5, 9, 11, 12),
        (4, 5, 9, 11),  # one less
        (4, 9, 11, 12),
        (4, 13, 9, 11, 12),  # one in place of another
        (4, 5, 9, 11, 13),
        (4, 5, 13, 11, 12),
        (5, 4, 9, 11, 12),
    ],
)
def test_rules_of_another_program_are_out_of_it(rules):
    assert not is_result(BEFORE, MADE, Signature(HEADER, rules, CHAINS))


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (HEADER, CHAINS | chains(theirs=20)),
        (HEADER, chains(b=7, c=8)),
        (HEADER, chains(a=2, b=7)),
        (HEADER, chains(a=20, b=7, c=8)),
        (HEADER, chains(a=2, b=7, c=20)),
        (HEADER._replace(handle=30), CHAINS),
        (None, CHAINS),
    ],
)
def test_chains_and_tables_of_another_program_are_seen(header, found):
    assert not is_result(BEFORE, MADE, Signature(header, (4, 5, 9, 11, 12), found))
