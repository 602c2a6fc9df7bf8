"""A finding about a node or a connection, with its severity and its fix, for doctor, why and the page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.errors import NoAnswerError
from kubeproxy.model.addresses import pack, place_of_text
from kubeproxy.server.text import timestamp
from kubeproxy.wording import counted


class Severity(IntEnum):
    """The severity of a finding; the worst is first."""

    BROKEN = 0  # connections fail, or will fail at the next change
    DEGRADED = 1  # some connections fail, or will fail soon
    UNKNOWN = 2  # the check could not run
    NOTE = 3  # a possible cause of problems, but not an error by itself
    FINE = 4  # the check found nothing wrong

    @property
    def mark(self) -> str:
        """The mark before a line of this severity."""
        return ("x", "x", "?", "-", "ok")[self]


End = tuple[bytes, int]  # packed address and port


def end_of(address: str) -> End:
    """Return the packed address and the port from an endpoint's text."""
    host, port = place_of_text(address)
    return pack(host) or b"", port


class Effect(Enum):
    """The effect of a finding on the checked connection."""

    NOTHING = "nothing for certain"
    MISLEADS = "the connection may stop, or go to a wrong endpoint"
    DELAYS = "first packets to some endpoints are lost; a retransmission picks an endpoint again"
    LOSES = "connections to some endpoints fail"
    STOPS = "the connection fails with every endpoint"


class Harm(NamedTuple):
    """The harm of a finding to the checked connection; `ends` are the affected endpoints if the effect is DELAYS or
    LOSES."""

    effect: Effect = Effect.NOTHING
    ends: frozenset[End] = frozenset()


NOTHING, MISLEADS, STOPS = Harm(), Harm(Effect.MISLEADS), Harm(Effect.STOPS)
PICKED_AGAIN: Final = (
    "first packets are dropped; a retransmission picks an endpoint again, and clients see delays of 1, 3, ... seconds"
)
"""The text of the effect DELAYS."""
AS_CLIENT: Final = "connect from the client to {}: if that fails too, "
"""The beginning of a fix; the endpoints replace {}."""


class Diagnosis(Struct, frozen=True):
    """A finding of the check `about`: a fact, its consequence, its fix, and its `harm` to the checked connection."""

    severity: Severity
    about: str
    what: str
    why: str = ""
    fix: str = ""
    harm: Harm = NOTHING
    since: float = 0.0
    """The time at which the fact began, in seconds since the epoch; 0 if unknown."""
    table: str = ""
    """The table of the chain in the finding, as in Firewall.where; '' without a chain."""
    left_mode: str = ""
    """The mode of the other kube-proxy that left this table; '' for other programs."""
    leads: tuple[End, ...] = ()
    """The destinations of leftover rules for the checked connection; () if unknown."""
    endpoint: str = ""
    """The endpoint of the failed probe, as address and port; '' for another finding."""

    @property
    def is_wrong(self) -> bool:
        """Return whether the finding is an error."""
        return self.severity <= Severity.DEGRADED

    @property
    def is_doubt(self) -> bool:
        """Return whether the finding is a failed probe of an endpoint that the connection may still reach."""
        return self.about == "endpoints" and self.severity is Severity.UNKNOWN

    @property
    def text(self) -> str:
        """The fact and its consequence, in one line."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def row(self) -> dict[str, str]:
        """Return the finding in the form of the JSON answer."""
        row = {
            "severity": self.severity.name.lower(),
            "about": self.about,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
        }
        row |= {"endpoint": self.endpoint} if self.endpoint else {}
        return row | ({"since": timestamp(self.since)} if self.since else {})

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Diagnosis:
        """Return the finding that `row` produced. Raises KeyError for a missing field or an unknown severity."""
        words = row["about"], row["what"], row["why"], row["fix"]
        return cls(Severity[row["severity"].upper()], *words, endpoint=row.get("endpoint", ""))


class Probe(Struct, frozen=True, rename="camel"):
    """The result of one attempt to reach an endpoint. `problem` is '' on success; `seconds` is the duration."""

    address: str
    protocol: str
    seconds: float
    problem: str = ""
    refused: bool = False
    absent: bool = False  # no host on this node's link answers ARP or neighbour discovery for the endpoint's next hop
    unanswered: bool = False  # neither reply nor refusal over UDP; many listening programs do not reply

    @property
    def failed(self) -> bool:
        """Return whether the endpoint could not be reached."""
        return bool(self.problem)


def doubt(probes: Sequence[Probe], findings: Iterable[Diagnosis]) -> str:
    """Return the end of the heading: the failed probes of endpoints that the connection may still reach; '' for
    none."""
    doubts = {one.endpoint for one in findings if one.is_doubt}
    failed = [one for one in probes if one.address in doubts]
    if not failed:
        return ""
    if len(failed) == len(probes) > 1:
        return ", but no endpoint accepted a connection from this node (?)"
    more = f" and {counted(len(failed) - _NAMED, 'more endpoint')}" if len(failed) > _NAMED else ""
    verb = "refused" if all(one.refused for one in failed) else "did not answer"
    return f", but {', '.join(one.address for one in failed[:_NAMED])}{more} {verb} this node (?)"


def fixes(first: Iterable[str], findings: Iterable[Diagnosis]) -> list[str]:
    """Return the fixes that let a connection pass: the `first` fixes, and the fixes of findings that are errors or make
    the answer unknown."""
    return list(dict.fromkeys((*first, *(one.fix for one in findings if one.severity <= Severity.UNKNOWN and one.fix))))


_NAMED: Final = 3  # endpoints in the heading


def worst_first(findings: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return findings sorted by severity. Among findings of equal severity, a full connection table is first, because
    it stops all new connections of this node and causes other findings. The fix of an unreachable API server names a
    full table as a possible cause."""
    found = sorted(findings, key=lambda finding: (finding.severity, finding.about != "conntrack"))
    if any(one.about == "conntrack" and one.harm == STOPS for one in found):
        for number, one in enumerate(found):
            if one.about == "api" and one.severity is Severity.BROKEN and not one.fix.startswith(_FIRST):
                found[number] = replace(one, fix=f"{_FIRST}{one.fix}")
    return found


_FIRST: Final = "first make room in connection tracking, which may be the cause; "


def clock(at: float) -> str:
    """Return a time (seconds since the epoch) as time of day, with the date unless it is today."""
    date, _, time_of_day = timestamp(at)[:19].partition("T")
    return f"{time_of_day} UTC" if date == timestamp(time.time())[:10] else f"{date} {time_of_day} UTC"


def duration(seconds: float) -> str:
    """Return a duration as text, in the largest unit with a count of at least two."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"


class UnreadError(NoAnswerError):
    """An error for unreadable objects; `finding` contains the reason and the fix."""

    def __init__(self, finding: Diagnosis) -> None:
        super().__init__(f"{finding.what}. Fix: {finding.fix}")
        self.finding = finding
