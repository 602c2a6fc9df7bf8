"""Our table as one may look at it who must not write: what an examination reads, and no way to change anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kubeproxy.backends.nftables.layout import TABLE, TRANSPORTS, Kind, Layout, parse_chain_name
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.text import interval_lines
from kubeproxy.backends.table_view import ElementsView, Rules, TableView
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.nftables import nfnetlink, nft
from kubeproxy.kernel.proc.empty_network import in_empty_network
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals

SERVICE_CIDRS = "service-cidrs"


class Skeleton(NamedTuple):
    """What of a table does not depend on Services: its chains, where the ranges of service CIDRs end, transports."""

    rules: Rules
    service_cidrs: frozenset[bytes]
    transports: frozenset[bytes]


class View(ElementsView, Protocol):
    """One family's table, to be read. All calls raise ApplyError."""

    def header(self) -> nfnetlink.TableHeader | None:
        """Return the table's handle, comment and state, None when it is missing."""

    def sets(self) -> Collection[str]:
        """Return the names of sets and maps."""

    def skeleton(self) -> Skeleton:
        """Return what does not depend on Services."""


class KernelView(TableView):
    """Our table in the network namespace of a socket."""

    def __init__(self, family: Family, link: Netlink) -> None:
        ranges = {name for name, shape in Layout(family).shapes.items() if shape.kind is Kind.INTERVAL}
        super().__init__(family, TABLE, ranges, link)

    def skeleton(self) -> Skeleton:
        """See View."""
        return Skeleton(self.rules(), frozenset(self.elements(SERVICE_CIDRS)), frozenset(self.elements(TRANSPORTS)))


Expected = Callable[[Ruleset, Globals, Iterable[str]], Skeleton]


def expected(ruleset: Ruleset, world: Globals, chains: Iterable[str]) -> Skeleton:
    """Return what the kernel lists of a table as we would load it, with those affinity chains that are in `chains`.

    It is loaded in a network namespace that nobody else is in. Raises Unsupported where none can be made.
    """
    named = (parse_chain_name(chain) for chain in chains)
    ours = world.of(ruleset.family) or FamilyGlobals()
    lines = [ruleset.skeleton({name for name in named if name is not None})]
    lines += interval_lines(ruleset.name, SERVICE_CIDRS, ours.service_cidrs)

    def load() -> Skeleton:
        nft.run("\n".join(lines) + "\n")
        with Netlink.open(NETLINK_NETFILTER) as link:
            return KernelView(ruleset.family, link).skeleton()

    return in_empty_network(load)
