"""The Services' rules in their own chains and in the shared chains, and the changes of both. Pure.

Rules are stored as text for each Service, so that joining texts gives a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.render import Detail, Dispatch, Style, chains, dispatch, suffixes
from kubeproxy.model.plan import ServiceName, ServicePlan

LARGE: Final = 1000  # endpoints; kube-proxy's largeClusterEndpointsThreshold

Plans = tuple[ServicePlan, ...]
Changes = Sequence[tuple[ServiceName, Plans]]


class OwnChains(NamedTuple):
    """Chains of the nat table that belong to one Service, and all their rules."""

    names: Collection[str]
    rules: str


class ServiceEntry(NamedTuple):
    """A Service: its plans, and for each plan the suffix of its chains' names and its rules in shared chains."""

    plans: Plans
    suffixes: tuple[str, ...]
    shared: tuple[Dispatch, ...]

    @property
    def endpoints(self) -> int:
        """Return the number of endpoints, which decides whether a cluster is large."""
        return sum([len(plan.serving) for plan in self.plans])


_NONE: Final = ServiceEntry((), (), ())


class ContentsChange(NamedTuple):
    """The changes of chains that follow from changed Services.

    `written`: chains of the nat table with their rules, Service by Service. `deleted`: chains to delete. `gained`: the
    new lines of shared chains, by position in Dispatch. `lost`: the positions of shared chains that lose or reorder
    lines. `rules`: the growth of the number of rules in the Services' own chains.
    """

    entries: dict[ServiceName, ServiceEntry]
    written: list[OwnChains]
    deleted: list[str]
    gained: Mapping[int, Sequence[str]]
    lost: frozenset[int]
    rules: int

    @property
    def shared(self) -> frozenset[int]:
        """Return the positions of the shared chains that change."""
        return self.lost.union(self.gained)


class Contents:
    """The chains and rules of all Services of one family, as written last."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.entries: dict[ServiceName, ServiceEntry] = {}
        self.endpoints = 0
        self.nat_rules = 0

    @property
    def is_large(self) -> bool:
        """Return whether the cluster is large: then comments and hourly full syncs would cost too much."""
        return self.detail(self.endpoints) is Detail.SPARSE

    def delta(self, changes: Changes) -> ContentsChange:
        """Return the changed chains of changed Services; `take` stores them. The cost depends on the changes only."""
        entries = self._entries(changes)
        before = {name: self.entries.get(name, _NONE) for name in entries}
        total = self.endpoints + sum(e.endpoints for e in entries.values()) - sum(e.endpoints for e in before.values())
        detail = self.detail(total)
        written: list[OwnChains] = []
        deleted: list[str] = []
        gained: dict[int, list[str]] = {}
        lost: set[int] = set()
        more = 0
        for name, entry in entries.items():
            old, new = self._chains(before[name], detail), self._chains(entry, detail)
            changed = {chain: rules for chain, rules in new.items() if old.get(chain) != rules}
            if changed:
                written.append(_joined(changed))
            deleted += (chain for chain in old if chain not in new)
            more += _joined(new).rules.count("\n") - _joined(old).rules.count("\n")
            _compare(before[name].shared, entry.shared, gained, lost)
        return ContentsChange(entries, written, deleted, gained, frozenset(lost), more)

    def take(self, delta: ContentsChange) -> None:
        """Store changes that the kernel has accepted."""
        self.nat_rules += delta.rules
        for name, entry in delta.entries.items():
            self.endpoints += entry.endpoints - self.entries.get(name, _NONE).endpoints
            if entry.plans:
                self.entries[name] = entry
            else:
                self.entries.pop(name, None)

    def load(self, wanted: Mapping[ServiceName, Plans]) -> None:
        """Replace all Services; the caller must exhaust `own_chains` before any change."""
        self.entries = self._entries([(name, plans) for name, plans in wanted.items() if plans])
        self.endpoints = sum([entry.endpoints for entry in self.entries.values()])

    def own_chains(self) -> Iterator[dict[str, str]]:
        """Yield the own chains of each Service with their rules; count the rules in `nat_rules`."""
        self.nat_rules = 0
        detail = self.detail(self.endpoints)
        for entry in self.entries.values():
            found = self._chains(entry, detail)
            self.nat_rules += sum([rules.count("\n") for rules in found.values()])
            yield found

    def plans(self, name: ServiceName) -> Plans:
        """Return the plans of a Service, () if no Service has that name."""
        return self.entries.get(name, _NONE).plans

    def chains_of(self, name: ServiceName, detail: Detail) -> dict[str, str]:
        """Return the own chains of a Service, each with its rules, for a level of detail."""
        return self._chains(self.entries.get(name, _NONE), detail)

    def own_of(self, name: ServiceName) -> OwnChains:
        """Return the own chains of a Service."""
        return _joined(self.chains_of(name, self.detail(self.endpoints)))

    def shared(self, position: int, delta: ContentsChange | None = None) -> str:
        """Return the rules of a shared chain, with changes not stored yet; sorted by target, the last target first.

        iptables-nft 1.8.9 keeps the chains that a restore names in a sorted list, and walks it for each of them: in
        descending order each search takes one step instead of thousands.
        """
        changed = delta.entries if delta is not None else {}
        lines = [
            text
            for name, entry in self.entries.items()
            if name not in changed
            for text in _lines(entry.shared, position)
        ]
        lines += [text for entry in changed.values() for text in _lines(entry.shared, position)]
        lines.sort(key=_first_target, reverse=True)
        return "".join(lines)

    def blocks(self, position: int) -> list[str]:
        """Return the rules of a shared chain, one text for each service port."""
        return [text for entry in self.entries.values() for text in _lines(entry.shared, position)]

    @staticmethod
    def detail(endpoints: int) -> Detail:
        """Return the level of detail of the comments for this number of endpoints."""
        return Detail.SPARSE if endpoints > LARGE else Detail.FULL

    def _entries(self, changes: Changes) -> dict[ServiceName, ServiceEntry]:
        found = iter(suffixes([plan for _, plans in changes for plan in plans]))
        entries: dict[ServiceName, ServiceEntry] = {}
        for name, plans in changes:
            ends = tuple([next(found) for _ in plans])
            shared = tuple([dispatch(plan, end, self.style) for plan, end in zip(plans, ends, strict=True)])
            entries[name] = ServiceEntry(plans, ends, shared)
        return entries

    def _chains(self, entry: ServiceEntry, detail: Detail) -> dict[str, str]:
        found: dict[str, str] = {}
        for plan, suffix in zip(entry.plans, entry.suffixes, strict=True):
            found |= chains(plan, suffix, self.style, detail)
        return found


def _joined(chains: Mapping[str, str]) -> OwnChains:
    return OwnChains(chains.keys(), "".join(chains.values()))


def _compare(
    before: Sequence[Dispatch], after: Sequence[Dispatch], gained: dict[int, list[str]], lost: set[int]
) -> None:
    """Add, by position, the new lines of shared chains to `gained`, and chains that lose or reorder lines to `lost`."""
    if before == after:
        return
    for position in range(len(Dispatch._fields)):
        old, new = _lines(before, position), _lines(after, position)
        if fresh := [line for line in new if line not in old]:
            gained.setdefault(position, []).extend(fresh)
        if old != [line for line in new if line in old]:
            lost.add(position)


def _lines(shared: Sequence[Dispatch], position: int) -> list[str]:
    return [text for dispatched in shared if (text := dispatched[position])]


def _first_target(lines: str) -> str:
    return lines[lines.find(" -j ") :]
