"""One finding of a node or a connection, with its severity and its fix; doctor, why and the page show the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

from kubeproxy.errors import NoAnswerError


class Severity(IntEnum):
    """How bad it is, the worst first."""

    BROKEN = 0
    """Connections fail, or will at the next change."""
    DEGRADED = 1
    """Some connections fail, or will before long."""
    UNKNOWN = 2
    """It could not be looked at."""
    NOTE = 3
    """It may matter, if something does not work. By itself it is nothing wrong."""
    FINE = 4
    """It was looked at, and nothing is wrong."""

    @property
    def mark(self) -> str:
        """The mark before a line of this severity."""
        return ("x", "x", "?", "-", "ok")[self]


class Diagnosis(Struct, frozen=True):
    """A finding: the fact, why it matters, and what mends it. `about` is the check that found it, one word."""

    severity: Severity
    about: str
    what: str
    why: str = ""
    fix: str = ""

    @property
    def stops_connections(self) -> bool:
        """Return whether this alone may stop a connection now, or send it to an endpoint that is gone."""
        return self.severity is Severity.BROKEN or self.about == "leftovers"

    @property
    def is_wrong(self) -> bool:
        """Return whether something is wrong by this alone."""
        return self.severity <= Severity.DEGRADED

    @property
    def text(self) -> str:
        """The fact and why it matters, in one line."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def row(self) -> dict[str, str]:
        """Return the finding for programs."""
        return {
            "severity": self.severity.name.lower(),
            "about": self.about,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
        }


def worst_first(findings: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return findings by severity, and in their order otherwise."""
    return sorted(findings, key=lambda finding: finding.severity)


def duration(seconds: float) -> str:
    """Return a time in words, in the largest unit of which there are two at least."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


class UnreadError(NoAnswerError):
    """The objects cannot be read; `finding` says why, and what mends it."""

    def __init__(self, finding: Diagnosis) -> None:
        super().__init__(f"{finding.what}. Fix: {finding.fix}")
        self.finding = finding
