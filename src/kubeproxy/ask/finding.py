"""What is wrong with a node: one finding each, worst first. What is looked for is in checks/. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

OK, BAD, NOTE = "ok", "x", "-"
"""Marks before a line: it is well, it is not, and neither."""


class Severity(IntEnum):
    """How bad it is, the worst first."""

    BROKEN = 0
    """Connections fail, or will at the next change."""
    DEGRADED = 1
    """Some connections fail, or will before long."""
    NOTE = 2
    """It may matter, if something does not work. By itself it is nothing wrong."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """What is so, why it matters, and what mends it. `about` is the check that found it, one word for programs."""

    severity: Severity
    about: str
    what: str
    why: str
    fix: str

    @property
    def stops_connections(self) -> bool:
        """Return whether this alone may stop a connection now, or send it where nobody is."""
        return self.severity is Severity.BROKEN or self.about == "leftovers"

    @property
    def is_wrong(self) -> bool:
        """Return whether something is wrong by this alone."""
        return self.severity is not Severity.NOTE


def worst_first(findings: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return findings by severity, and in their order otherwise."""
    return sorted(findings, key=lambda finding: finding.severity)


def duration(seconds: float) -> str:
    """Return a time in words, in the largest unit of which there are two at least."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
