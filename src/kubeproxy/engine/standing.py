"""How a family's kernel stands, as /debug/state says it: what it was last seen to have, since when, what is wrong."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from kubeproxy.model.addresses import Family
from kubeproxy.server.text import timestamp

WORST_FIRST: Final = ("refused", "differs", "pending")
"""The states of a family that is not known to have what it took."""


class FamilyStanding(Struct, frozen=True):
    """What is known of one family's kernel. Times are seconds since the epoch, None for never.

    `inspected_at`: when all of it was last looked at, in an inspection or by a full sync, and nothing differed, or
    nothing any more. `sound_since`: since when it has, as far as anybody knows, what was committed; None when it does
    not. `refusal`: why it refused what is queued, if it did. `difference`: what another program changed, until it is
    repaired. `queued`: how many Services' changes wait for it.
    """

    family: Family
    inspected_at: float | None = None
    sound_since: float | None = None
    refusal: str | None = None
    difference: str | None = None
    queued: int = 0


def trouble(standing: FamilyStanding) -> tuple[str, str] | None:
    """Return the state and the reason of a family that may lack what it took, None for one that is whole."""
    if standing.refusal is not None:
        return "refused", standing.refusal
    if standing.difference is not None:
        return "differs", standing.difference
    return None if standing.sound_since is not None else ("pending", "not yet compared with the kernel")


def shown(standing: FamilyStanding) -> dict[str, Any]:
    """Return the fields of a family."""
    wrong = trouble(standing)
    since, seen = standing.sound_since, standing.inspected_at
    return {
        "state": wrong[0] if wrong else "whole",
        "wholeSince": None if since is None else timestamp(since),
        "lastSeenWhole": None if seen is None else timestamp(seen),
        "refused": standing.refusal,
        "differs": standing.difference,
    }
