"""Compares found and desired state: returns the changes to write, or texts for an operator. A state maps a place (a
set, a chain, an interface) to keys, and each key to a value that can be compared. A mode computes the desired state
from plans and reads the found state from the kernel. The found state is normalised, because the mode may choose some
values freely, such as an endpoint's slot. An examiner compares the two states in a separate process, which cannot
write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from kubeproxy.model import addresses
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Policy, ServiceName, ServicePlan

NamedPlans = tuple[ServiceName, tuple[ServicePlan, ...]]
"""A Service and its plans."""
Plans = Mapping[ServiceName, tuple[ServicePlan, ...]]


class Kind(StrEnum):
    """The kind of a difference between the kernel and the plans."""

    MISSING = "missing"
    EXTRA = "too many"
    DIFFERENT = "different"


class Finding(NamedTuple):
    """A difference between the kernel and the plans. `service` is None if the object belongs to no Service or to all
    Services. `what` describes the object (a frontend, an endpoint), `where` is the object's place in the kernel (a map,
    a chain, a set). `wanted` describes the desired state and `present` the found state; each is '' if `what` is enough.
    """

    service: ServiceName | None
    kind: Kind
    what: str
    where: str
    wanted: str = ""
    present: str = ""

    def misses(self, endpoint: str) -> bool:
        """Return whether this finding is that the kernel lacks an endpoint, given as address and port. Every mode
        writes `endpoint ADDRESS:PORT` into `what`."""
        return self.kind is Kind.MISSING and f"endpoint {endpoint} " in f"{self.what} "


class Examiner(ABC):
    """Compares one family of the kernel with plans. Calls block; they raise ApplyError if the kernel is unreadable."""

    remembered: Callable[[ServicePlan, bytes, Policy], Iterator[bytes]] | None = None
    """Yields the endpoints (packed address and port) to which session affinity binds a client, given the client's
    packed address and the pool's policy. `remembered` is None if the kernel does not list such endpoints."""

    def __init__(self, family: Family, close: Callable[[], None] = lambda: None) -> None:
        self.family = family
        self.close = close
        """Closes the sockets, if there are any."""
        self.caveats: list[str] = []
        """Sentences about objects that could not be compared, each with its reason."""

    @abstractmethod
    def some(self, plans: Plans) -> Iterator[Finding]:
        """Yield the differences for these Services; if possible, read only the objects of these Services."""

    @abstractmethod
    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """Yield all differences, including those of objects that belong to no Service or to all Services."""


def of_family(plans: Plans, family: Family) -> dict[ServiceName, tuple[ServicePlan, ...]]:
    """Return the plans of one family, Service by Service."""
    return {name: tuple(plan for plan in its if plan.key.family is family) for name, its in plans.items()}


def front_text(address: bytes, protocol: int, port: int) -> str:
    """Return a frontend as text: 10.96.0.1:80/tcp, [fd00::1]:80/tcp; without an address, NodePort 30080/tcp."""
    text = addresses.front_text(address, port, protocol)
    return text if address else f"NodePort {text.removeprefix('*:')}"


P = TypeVar("P")
K = TypeVar("K")
V = TypeVar("V")

State = Mapping[P, Mapping[K, V]]
"""A state: a mapping from place to key to value. A value is never None."""

Elements = dict[str, dict[bytes, bytes]]
"""The state of an nf_tables table: a mapping from set to key to data (b'' in plain sets)."""


class Difference(NamedTuple, Generic[P, K, V]):
    """The entries to remove and the entries to add, by place. An entry with a changed value is in both groups."""

    removed: dict[P, list[K]]
    added: dict[P, list[tuple[K, V]]]


def diff(found: State[P, K, V], desired: State[P, K, V]) -> Difference[P, K, V]:
    """Return the smallest change from one state to another."""
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
    """The texts about an entry that differs; the fields are those of Finding."""

    what: str
    where: str
    wanted: str = ""
    present: str = ""


class StateWords(Protocol):
    """The texts about the entries of a mode's states. A value is None if its state lacks the entry."""

    def owner(self, place: Any, key: Any) -> ServiceName | None:
        """Return the Service of an entry that no plan desires; None if the entry belongs to no Service."""

    def wording(self, place: Any, key: Any, wanted: Any, present: Any) -> Wording:
        """Return the texts about an entry that differs."""


def findings(
    found: State[Any, Any, Any], desired: Mapping[ServiceName | None, State[Any, Any, Any]], words: StateWords
) -> Iterator[Finding]:
    """Yield the differences between a found state and the Services' desired states, ordered by Service. Differences
    that belong to no Service are last. Several Services may desire the same entry."""
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
    """Return the texts of two values of an entry; the text of a missing value is ''."""
    return "" if wanted is None else meaning(wanted), "" if present is None else meaning(present)
