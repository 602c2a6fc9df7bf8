"""The comparison of found and desired state, for all modes: as changes to write, and as findings for an operator. Pure.

A state maps a place (a set, a chain, an interface) to keys, and each key to a value that can be compared. A mode
computes the desired state from plans, and reads the found state from the kernel. Arbitrary values, such as an
endpoint's slot, are normalised in the found state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kubeproxy.backends.examination import Finding, Kind
from kubeproxy.model.plan import ServiceName

P = TypeVar("P")
K = TypeVar("K")
V = TypeVar("V")

State = Mapping[P, Mapping[K, V]]
"""Maps place to key to value. A value is never None."""

Elements = dict[str, dict[bytes, bytes]]
"""The state of a table of nf_tables: set to key to data, b'' in plain sets."""


class Difference(NamedTuple, Generic[P, K, V]):
    """The entries to remove and to add, by place; an entry with another value is in both."""

    removed: dict[P, list[K]]
    added: dict[P, list[tuple[K, V]]]


def diff(found: State[P, K, V], desired: State[P, K, V]) -> Difference[P, K, V]:
    """Return the smallest change that leads from one state to the other."""
    removed: dict[P, list[K]] = {}
    added: dict[P, list[tuple[K, V]]] = {}
    nothing: Mapping[K, V] = {}
    for place in found.keys() | desired.keys():
        old, new = found.get(place, nothing), desired.get(place, nothing)
        if old == new:
            continue
        gone = [key for key, value in old.items() if new.get(key) != value]
        come = [(key, value) for key, value in new.items() if old.get(key) != value]
        if gone:
            removed[place] = gone
        if come:
            added[place] = come
    return Difference(removed, added)


class Wording(NamedTuple):
    """The texts about an entry that differs: see examination.Finding."""

    what: str
    where: str
    wanted: str = ""
    present: str = ""


class StateWords(Protocol):
    """The texts about the entries of a mode's states. A value is None if the entry is missing in that state."""

    def owner(self, place: Any, key: Any) -> ServiceName | None:
        """Return the Service of an entry that no plan desires, None for no Service."""

    def wording(self, place: Any, key: Any, wanted: Any, present: Any) -> Wording:
        """Return the texts about an entry that differs."""


def findings(
    found: State[Any, Any, Any], desired: Mapping[ServiceName | None, State[Any, Any, Any]], words: StateWords
) -> Iterator[Finding]:
    """Yield the differences between a found state and the Services' desired states, by Service; others last.

    Several Services may desire one entry.
    """
    asked: dict[Any, set[Any]] = {}
    for state in desired.values():
        for place, entries in state.items():
            asked.setdefault(place, set()).update(entries)
    extra: dict[ServiceName | None, list[tuple[Any, Any]]] = {}
    for place, entries in found.items():
        for key in sorted(entries.keys() - asked.get(place, set())):
            extra.setdefault(words.owner(place, key), []).append((place, key))
    for name, state in desired.items():
        for place, entries in state.items():
            there = found.get(place, {})
            for key, wanted in entries.items():
                if (present := there.get(key)) != wanted:
                    kind = Kind.MISSING if present is None else Kind.DIFFERENT
                    yield Finding(name, kind, *words.wording(place, key, wanted, present))
        for place, key in extra.pop(name, ()):
            yield Finding(name, Kind.EXTRA, *words.wording(place, key, None, found[place][key]))
    for name, left in extra.items():
        for place, key in left:
            yield Finding(name, Kind.EXTRA, *words.wording(place, key, None, found[place][key]))


def meanings(meaning: Callable[[Any], str], wanted: Any, present: Any) -> tuple[str, str]:
    """Return texts for both values of an entry, '' for a missing one."""
    return "" if wanted is None else meaning(wanted), "" if present is None else meaning(present)
