"""What all Services have in the shared chains, and which of these chains changed. Pure.

The rules of each Service are kept as text, so that a chain is written by one join.
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
    """What is known of a Service: its plans, and of each what its chains' names end with and its shared rules."""

    plans: Plans
    suffixes: tuple[str, ...]
    shared: tuple[Dispatch, ...]

    @property
    def endpoints(self) -> int:
        """Return the number of endpoints, as a large cluster is told by."""
        return sum([len(plan.serving) for plan in self.plans])


_NONE: Final = ServiceEntry((), (), ())


class ContentsChange(NamedTuple):
    """What a change of Services comes to.

    `written` are chains of the nat table with their rules, Service by Service, `deleted` chains that are to go. By
    their positions in Dispatch, `gained` has the lines that shared chains get, and `lost` those of them that lose or
    reorder any. `rules` is by how many the Services' own chains have more than before.
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
    """All Services of one family as they are in the kernel."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.entries: dict[ServiceName, ServiceEntry] = {}
        self.endpoints = 0
        self.nat_rules = 0

    @property
    def is_large(self) -> bool:
        """Return whether a large cluster does without what costs the more the larger it is."""
        return self.detail(self.endpoints) is Detail.SPARSE

    def delta(self, changes: Changes) -> ContentsChange:
        """Return what changes come to; nothing is remembered before `take`. Costs what changed."""
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
        """Remember changes that are in the kernel now."""
        self.nat_rules += delta.rules
        for name, entry in delta.entries.items():
            self.endpoints += entry.endpoints - self.entries.get(name, _NONE).endpoints
            if entry.plans:
                self.entries[name] = entry
            else:
                self.entries.pop(name, None)

    def load(self, wanted: Mapping[ServiceName, Plans]) -> None:
        """Take all Services in; `own_chains` is to be used up before anything is changed."""
        self.entries = self._entries([(name, plans) for name, plans in wanted.items() if plans])
        self.endpoints = sum([entry.endpoints for entry in self.entries.values()])

    def own_chains(self) -> Iterator[dict[str, str]]:
        """Yield the own chains of each Service with the rules of each, and count these."""
        self.nat_rules = 0
        detail = self.detail(self.endpoints)
        for entry in self.entries.values():
            found = self._chains(entry, detail)
            self.nat_rules += sum([rules.count("\n") for rules in found.values()])
            yield found

    def plans(self, name: ServiceName) -> Plans:
        """Return the plans of a Service, () when there is none of that name."""
        return self.entries.get(name, _NONE).plans

    def chains_of(self, name: ServiceName, detail: Detail) -> dict[str, str]:
        """Return the own chains of a Service with the rules of each."""
        return self._chains(self.entries.get(name, _NONE), detail)

    def own_of(self, name: ServiceName) -> OwnChains:
        """Return the own chains of a Service."""
        return _joined(self.chains_of(name, self.detail(self.endpoints)))

    def shared(self, position: int, delta: ContentsChange | None = None) -> str:
        """Return the rules of a shared chain, with changes that are not taken yet; those to later chains come first.

        iptables-nft 1.8.9 keeps the chains that a restore names in a sorted list, and walks it for each of them: from
        the last to the first that takes one step instead of thousands.
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
        """Return the rules of a shared chain, those of each service port together."""
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
    """Note, by position, what the shared chains get and which of them lose or reorder lines of a Service."""
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
