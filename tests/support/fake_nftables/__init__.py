"""nf_tables without a kernel: executes what nftables mode sends, refuses what the kernel refuses, routes packets.

It reads the same netlink bytes and the same nft text as the kernel, so that nothing of the backend is left out:

    text.py, netlink.py   what is sent, read into steps
    transaction.py        the steps, each of which can be refused; all of them or none
    objects.py            tables, chains, rules, sets and elements
    kernel.py             the ruleset with its generation and clock, and a family's Table as the backend sees it
    listing.py            what there is, as nft text and to be compared
    expressions.py        the language of rules, as far as ours use it
    packets.py            what a packet meets with

tests/kernel/nftables holds it against the real kernel.
"""

from support.fake_nftables.kernel import FakeKernel, FakeTable
from support.fake_nftables.packets import Packet

__all__ = ["FakeKernel", "FakeTable", "Packet"]
