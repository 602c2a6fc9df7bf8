"""A simulation of nf_tables: executes the transactions of nftables mode, refuses the same messages as the kernel,
routes packets.

It reads the same netlink bytes and the same nft text as the kernel, so the tests cover the whole backend:

    text.py, netlink.py   parse nft text or netlink messages into steps
    transaction.py        executes the steps of a transaction atomically; each step can be refused
    objects.py            tables, chains, rules, sets and elements
    kernel.py             the ruleset with its generation and clock, and a family's Table as the backend sees it
    listing.py            the ruleset as nft text, and in a form for comparisons
    expressions.py        the language of rules, as far as the proxy's rules use it
    packets.py            the path of a packet through the chains

tests/kernel/nftables compares the simulation with the real kernel.
"""

from support.fake_nftables.kernel import FakeKernel, FakeTable
from support.fake_nftables.packets import Packet

__all__ = ["FakeKernel", "FakeTable", "Packet"]
