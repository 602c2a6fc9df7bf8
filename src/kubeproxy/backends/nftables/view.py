"""Our table as one may look at it who must not write: what an examination reads, and no way to change anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kubeproxy.backends.nftables.layout import TABLE, Kind, Layout, parse_chain_name
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.text import interval_lines
from kubeproxy.kernel import nfnetlink, nft, nft_lookup
from kubeproxy.kernel.empty_network import in_empty_network
from kubeproxy.kernel.netlink import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.nft_lookup import Entries
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals

SERVICE_CIDRS = "service-cidrs"

Rules = Mapping[str, Sequence[object]]
"""Each chain of a table with its rules, in a form that two tables with the same rules share."""


class Skeleton(NamedTuple):
    """What of a table does not depend on Services: its rules by chain, and where the ranges of service CIDRs end."""

    rules: Rules
    service_cidrs: frozenset[bytes]


class View(Protocol):
    """One family's table, to be read. All calls raise ApplyError."""

    family: Family

    def header(self) -> nfnetlink.TableHeader | None:
        """Return the table's handle, comment and state, None when it is missing."""

    def skeleton(self) -> Skeleton:
        """Return chains, rules and service CIDRs."""

    def elements(self, name: str) -> Entries:
        """Return the elements of a set; while others change it some may lack."""

    def lookup(self, name: str, keys: Iterable[bytes]) -> Entries:
        """Return those of these elements that a set has."""

    def close(self) -> None:
        """Let go of the kernel."""


class KernelView:
    """The table of the network namespace of a socket, which others may use as well, but not at the same time."""

    def __init__(self, family: Family, link: Netlink) -> None:
        self.family = family
        self._link = link
        self._ranges = {name for name, shape in Layout(family).shapes.items() if shape.kind is Kind.INTERVAL}

    def close(self) -> None:
        """See View."""
        self._link.close()

    def header(self) -> nfnetlink.TableHeader | None:
        """See View."""
        return nfnetlink.table(self.family, TABLE, self._link)

    def skeleton(self) -> Skeleton:
        """See View."""
        rules: dict[str, list[object]] = {chain: [] for chain in nfnetlink.chains(self.family, TABLE, self._link)}
        for rule in nfnetlink.rules(self.family, TABLE, self._link):
            rules.setdefault(rule.chain, []).append(rule.expressions)
        return Skeleton(rules, frozenset(self.elements(SERVICE_CIDRS)))

    def elements(self, name: str) -> Entries:
        """See View."""
        return nft_lookup.glance(self.family, TABLE, name, self._link)

    def lookup(self, name: str, keys: Iterable[bytes]) -> Entries:
        """See View."""
        return nft_lookup.lookup(self.family, TABLE, name, keys, self._link, ranges=name in self._ranges)


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
