"""What the engine says of its work, and in which words: see the vocabulary in docs/architecture.md.

An event arrives; a change is compiled, queued for each family, and committed (this family's kernel has it) or refused;
it is settled when every family that is not refused has it.
"""

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
    """One family's kernel has what was queued for it.

    `full` says that everything was compared with the kernel, `seconds` how long it took. `changes` are those since the
    commit before. If `everything`, the kernel may have had anything before: then `services` have plans, and those that
    have UDP ports are in the changes, also such as did not change, and no others. `ages` are the seconds since what led
    to the changes happened, as far as their objects say so.
    """

    family: Family
    changes: Sequence[Change] = ()
    full: bool = False
    everything: bool = False
    services: int = 0
    seconds: float = 0.0
    ages: Sequence[float] = ()


class ServiceProblem(NamedTuple):
    """A Service has a field that cannot be used."""

    service: ServiceName
    uid: str
    problem: Problem


Notice = ServiceProblem | Rejected | ForeignChange
"""What an operator should hear of: a Service's field, an object or an entry of it that cannot be used, or what another
program changed and is being repaired."""


class Observer(Protocol):
    """Who wants to know. Called on the loop's thread; must return at once and not raise."""

    def queued(self, families: Sequence[Family]) -> None:
        """Something arrived that these families' next commits will have."""

    def counted(self, fresh: Counts, pending: Counts) -> None:
        """So many objects changed since the last call, and so many are not yet committed in all families."""

    def committed(self, commit: Commit) -> None:
        """A family is up to date; what was queued may have come to nothing."""

    def settled(self, changes: Sequence[Change]) -> None:
        """Every family that is not refused has these changes. Each settles once."""

    def refused(self, family: Family, error: ApplyError) -> None:
        """The kernel did not take what was queued for a family, which is tried again."""

    def noticed(self, notice: Notice) -> None:
        """There is something to be told to an operator."""

    def world(self, world: Globals) -> None:
        """What holds for the whole node changed."""


class Audience(Protocol):
    """Who watches now and then, as long as a page is open. Called as an Observer is, for as long as there is one."""

    def arrived(self, events: Sequence[Event]) -> None:
        """A source delivers these; the engine does not have them yet."""

    def settled(self, changes: Sequence[Change]) -> None:
        """See Observer."""

    def refused(self, family: Family, error: ApplyError) -> None:
        """See Observer."""
