"""The interface through which the engine reports its work, in the terms of docs/architecture.md. An event arrives; a
change is compiled, and queued for each family. In each family the change is committed (the kernel has it) or refused.
The change is settled when every family that is not refused has committed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from kubeproxy.backends.mode import ForeignChange
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event, Rejected
from kubeproxy.model.plan import Globals, Problem, ServiceName
from kubeproxy.model.planner import Change, Counts


class Commit(Struct, frozen=True):
    """The queued changes of one family are in the kernel."""

    family: Family
    changes: Sequence[Change] = ()  # the changes since the last commit; if `everything`, all Services with UDP ports
    full: bool = False  # everything was compared with the kernel
    everything: bool = False  # the earlier state of the kernel is unknown
    services: int = 0  # if `everything`: the number of Services with plans
    seconds: float = 0.0  # the duration
    ages: Sequence[float] = ()  # seconds since the trigger times of the changes


class ServiceProblem(NamedTuple):
    """A Service has a field that cannot be used."""

    service: ServiceName
    uid: str
    problem: Problem


Notice = ServiceProblem | Rejected | ForeignChange
"""A problem for an operator: an unusable field, object or entry, or another program's change that is being repaired."""


class Observer(Protocol):
    """Receives the engine's reports on the event loop's thread. The methods must return immediately and not raise."""

    def queued(self, families: Sequence[Family]) -> None:
        """Events arrived that the next commits of these families will include."""

    def counted(self, fresh: Counts, pending: Counts) -> None:
        """The numbers of objects that changed since the last call, and of objects that are not committed yet."""

    def committing(self, family: Family, changes: Sequence[Change] | None) -> None:
        """A commit of these changes starts, or a full sync if `changes` is None; `committed` or `refused` follows."""

    def committed(self, commit: Commit) -> None:
        """A family is up to date: after a commit, or because the queued events changed no plan."""

    def settled(self, changes: Sequence[Change]) -> None:
        """Every family that is not refused has committed these changes. Each change settles once."""

    def refused(self, family: Family, error: ApplyError) -> None:
        """The kernel refused the queued changes of a family; the engine retries them."""

    def noticed(self, notice: Notice) -> None:
        """A problem was found."""

    def world(self, world: Globals) -> None:
        """The globals of the node changed."""


class Audience(Protocol):
    """Receives reports while a page is open. As in Observer, the methods must return immediately and not raise."""

    def arrived(self, events: Sequence[Event]) -> None:
        """A source has delivered these events; the engine has not received them yet."""

    def settled(self, changes: Sequence[Change]) -> None:
        """These changes are settled, as in Observer."""
