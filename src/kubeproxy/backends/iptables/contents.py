"""What all Services have in the shared chains, and which of these chains changed. Pure.

The rules of each Service are kept as text, so that a chain is written by one join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.render import Detail, Dispatch, Style, chains, dispatch
from kubeproxy.model.plan import ServiceName, ServicePlan

LARGE: Final = 1000  # endpoints; kube-proxy's largeClusterEndpointsThreshold

Plans = tuple[ServicePlan, ...]
Changes = Sequence[tuple[ServiceName, Plans]]


class Entry(NamedTuple):
    """What is known of a Service: its plans, its shared rules, how many rules it has in nat, how many endpoints."""

    plans: Plans
    shared: tuple[Dispatch, ...]
    rules: int
    endpoints: int


_NONE: Final = Entry((), (), 0, 0)


class Delta(NamedTuple):
    """What a change of Services comes to.

    `written` are chains of the nat table with their rules, Service by Service, `deleted` chains that are to go, and
    `shared` the positions in Dispatch of the shared chains that are other ones now.
    """

    entries: dict[ServiceName, Entry]
    written: list[dict[str, str]]
    deleted: list[str]
    shared: frozenset[int]


class Contents:
    """All Services of one family as they are in the kernel."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.entries: dict[ServiceName, Entry] = {}
        self.endpoints = 0
        self.nat_rules = 0

    def delta(self, changes: Changes) -> Delta:
        """Return what changes come to; nothing is remembered before `take`. Costs what changed."""
        entries = {name: self._entry(plans) for name, plans in changes}
        before = {name: self.entries.get(name, _NONE) for name in entries}
        total = self.endpoints + sum(e.endpoints for e in entries.values()) - sum(e.endpoints for e in before.values())
        detail = self.detail(total)
        written: list[dict[str, str]] = []
        deleted: list[str] = []
        shared: set[int] = set()
        for name, entry in entries.items():
            old, new = self._chains(before[name].plans, detail), self._chains(entry.plans, detail)
            changed = {chain: rules for chain, rules in new.items() if old.get(chain) != rules}
            if changed:
                written.append(changed)
            deleted += (chain for chain in old if chain not in new)
            entries[name] = entry._replace(rules=sum(rules.count("\n") for rules in new.values()))
            shared.update(_changed(before[name].shared, entry.shared))
        return Delta(entries, written, deleted, frozenset(shared))

    def take(self, delta: Delta) -> None:
        """Remember changes that are in the kernel now."""
        for name, entry in delta.entries.items():
            before = self.entries.get(name, _NONE)
            self.endpoints += entry.endpoints - before.endpoints
            self.nat_rules += entry.rules - before.rules
            if entry.plans:
                self.entries[name] = entry
            else:
                self.entries.pop(name, None)

    def load(self, wanted: Mapping[ServiceName, Plans]) -> None:
        """Take all Services in; `own_chains` is to be used up before anything is changed."""
        self.entries = {name: self._entry(plans) for name, plans in wanted.items() if plans}
        self.endpoints = sum(entry.endpoints for entry in self.entries.values())

    def own_chains(self) -> Iterator[dict[str, str]]:
        """Yield the own chains of each Service with their rules, and count these."""
        self.nat_rules = 0
        detail = self.detail(self.endpoints)
        for name, entry in self.entries.items():
            found = self._chains(entry.plans, detail)
            rules = sum([text.count("\n") for text in found.values()])
            self.entries[name] = entry._replace(rules=rules)
            self.nat_rules += rules
            yield found

    def plans(self, name: ServiceName) -> Plans:
        """Return the plans of a Service, () when there is none of that name."""
        return self.entries.get(name, _NONE).plans

    def chains_of(self, name: ServiceName) -> dict[str, str]:
        """Return the own chains of a Service with their rules."""
        return self._chains(self.plans(name), self.detail(self.endpoints))

    def shared(self, position: int, delta: Delta | None = None) -> str:
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

    @staticmethod
    def detail(endpoints: int) -> Detail:
        """Return how much is said of so many endpoints."""
        return Detail.SPARSE if endpoints > LARGE else Detail.FULL

    def _entry(self, plans: Plans) -> Entry:
        if not plans:
            return _NONE
        shared = tuple([dispatch(plan, self.style) for plan in plans])
        return Entry(plans, shared, 0, sum(len(plan.serving) for plan in plans))

    def _chains(self, plans: Plans, detail: Detail) -> dict[str, str]:
        found: dict[str, str] = {}
        for plan in plans:
            found |= chains(plan, self.style, detail)
        return found


def _changed(before: Sequence[Dispatch], after: Sequence[Dispatch]) -> Iterable[int]:
    """Return the positions of the shared chains in which a Service has other rules now."""
    if before == after:
        return ()
    return [i for i in range(len(Dispatch._fields)) if _lines(before, i) != _lines(after, i)]


def _lines(shared: Sequence[Dispatch], position: int) -> list[str]:
    return [text for dispatched in shared if (text := dispatched[position])]


def _first_target(lines: str) -> str:
    return lines[lines.find(" -j ") :]
