"""The last written rules of all Services of one family, and the rules that a change adds and removes. Pure. Each
Service's rules in shared chains are stored as text, so that one str.join produces a shared chain."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.render import Lines, chains, dispatch, suffixes
from kubeproxy.backends.iptables.skeleton import Place, RuleSettings, SharedChain
from kubeproxy.backends.state import NamedPlans, Plans
from kubeproxy.model.plan import ServiceName, ServicePlan

LARGE: Final = 1000
"""A cluster with more endpoints counts as large: largeClusterEndpointsThreshold of the Go kube-proxy."""

OwnChains = Mapping[str, str]
"""The chains of the nat table that belong to one Service, with their rules."""


class ServiceEntry(NamedTuple):
    """A Service: the plans, and for each plan the hash in its chain names and the plan's rules in shared chains."""

    plans: tuple[ServicePlan, ...]
    suffixes: tuple[str, ...]
    shared: tuple[Lines, ...]

    @property
    def endpoints(self) -> int:
        """Return the Service's number of endpoints."""
        return sum([len(plan.serving) for plan in self.plans])


_NONE: Final = ServiceEntry((), (), ())


class ContentsChange(NamedTuple):
    """The effect of changed Services on the tables. `written` are chains to write, Service by Service; `deleted` are
    chains of the nat table to remove. `gained` are the new lines of shared chains, `lost` are the shared chains with
    removed or reordered lines. `rules` is the change of the number of rules in the Services' own chains. `settings` are
    the settings after the change."""

    entries: dict[ServiceName, ServiceEntry]
    written: list[OwnChains]
    deleted: list[str]
    gained: Mapping[Place, Sequence[str]]
    lost: Collection[Place]
    rules: int
    settings: RuleSettings


class Contents:
    """The rules of all Services of one family, all with the same settings. Before a change, the caller must exhaust
    `own_chains`, which counts the rules."""

    def __init__(self, settings: RuleSettings, wanted: Plans = MappingProxyType({})) -> None:
        self.settings = settings
        self.entries = self._entries([(name, plans) for name, plans in wanted.items() if plans])
        self.endpoints = sum([entry.endpoints for entry in self.entries.values()])
        self.nat_rules = 0

    @property
    def commented(self) -> bool:
        """Return whether rules of endpoints have comments; in a large cluster they have no comments."""
        return self.endpoints <= LARGE

    def delta(self, changes: Sequence[NamedPlans], settings: RuleSettings) -> ContentsChange:
        """Return the effect of changes, and of new settings that are like the present settings. `take` applies the
        effect. The cost depends on the changes, not on the number of Services."""
        entries = self._entries(changes)
        before = {name: self.entries.get(name, _NONE) for name in entries}
        total = self.endpoints + sum(e.endpoints for e in entries.values()) - sum(e.endpoints for e in before.values())
        commented = total <= LARGE
        written: list[OwnChains] = []
        deleted: list[str] = []
        gained: dict[Place, list[str]] = {}
        lost: set[Place] = set() if settings == self.settings else {skeleton.NAT_SERVICES}
        more = 0
        for name, entry in entries.items():
            old, new = self._chains(before[name], commented), self._chains(entry, commented)
            if changed := {chain: rules for chain, rules in new.items() if old.get(chain) != rules}:
                written.append(changed)
            deleted += (chain for chain in old if chain not in new)
            more += rule_count(new) - rule_count(old)
            _compare(before[name].shared, entry.shared, gained, lost)
        return ContentsChange(entries, written, deleted, gained, lost, more, settings)

    def take(self, delta: ContentsChange) -> None:
        """Apply changes that the kernel has accepted."""
        self.nat_rules += delta.rules
        self.settings = delta.settings
        for name, entry in delta.entries.items():
            self.endpoints += entry.endpoints - self.entries.get(name, _NONE).endpoints
            if entry.plans:
                self.entries[name] = entry
            else:
                self.entries.pop(name, None)

    def own_chains(self) -> Iterator[OwnChains]:
        """Yield the own chains of each Service, and count the rules of these chains in `nat_rules`."""
        self.nat_rules = 0
        for entry in self.entries.values():
            found = self._chains(entry, self.commented)
            self.nat_rules += rule_count(found)
            yield found

    def chains_of(self, name: ServiceName, commented: bool) -> OwnChains:
        """Return the chains that belong to a Service."""
        return self._chains(self.entries.get(name, _NONE), commented)

    def shared(self, place: Place, delta: ContentsChange | None = None) -> SharedChain:
        """Return a shared chain, including changes that `take` has not applied yet, with a block of rules for each
        service port. The blocks are sorted by target, the last name first. iptables-nft 1.8.9 keeps the chains that a
        restore names in a sorted list, and searches the list from the end for each chain. In descending order each
        search takes one step."""
        entries, settings = (self.entries | delta.entries, delta.settings) if delta else (self.entries, self.settings)
        blocks = [text for entry in entries.values() for text in _lines(entry.shared, place)]
        blocks.sort(key=lambda block: block[block.find(" -j ") :], reverse=True)
        return SharedChain(blocks, skeleton.nodeport_rules(settings) if place == skeleton.NAT_SERVICES else "")

    def common(self) -> dict[Place, SharedChain]:
        """Return all chains that belong to no Service or to all Services."""
        return {place: self.shared(place) for place in skeleton.SHARED} | skeleton.fixed_chains(self.settings)

    def _entries(self, changes: Sequence[NamedPlans]) -> dict[ServiceName, ServiceEntry]:
        found = iter(suffixes([plan for _, plans in changes for plan in plans]))
        entries: dict[ServiceName, ServiceEntry] = {}
        for name, plans in changes:
            ends = tuple([next(found) for _ in plans])
            shared = tuple([dispatch(plan, end, self.settings) for plan, end in zip(plans, ends, strict=True)])
            entries[name] = ServiceEntry(plans, ends, shared)
        return entries

    def _chains(self, entry: ServiceEntry, commented: bool) -> OwnChains:
        found: dict[str, str] = {}
        for plan, suffix in zip(entry.plans, entry.suffixes, strict=True):
            found |= chains(plan, suffix, self.settings, commented)
        return found


def rule_count(chains: OwnChains) -> int:
    """Return the number of rules in chains."""
    return sum([rules.count("\n") for rules in chains.values()])


def _compare(before: Sequence[Lines], after: Sequence[Lines], gained: dict[Place, list[str]], lost: set[Place]) -> None:
    """Add a Service's new lines of shared chains to `gained`; add the chains that lose or reorder lines to `lost`."""
    if before == after:
        return
    for place in dict.fromkeys(place for part in (*before, *after) for place in part):
        old, new = _lines(before, place), _lines(after, place)
        if fresh := [line for line in new if line not in old]:
            gained.setdefault(place, []).extend(fresh)
        if old != [line for line in new if line in old]:
            lost.add(place)


def _lines(shared: Sequence[Lines], place: Place) -> list[str]:
    return [text for part in shared if (text := part.get(place))]
