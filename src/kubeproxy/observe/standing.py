"""How a family's kernel stands, as /debug/state says it: what it was last seen to have, since when, what is wrong."""

from __future__ import annotations

from typing import Any, Final, Protocol

from kubeproxy.model.addresses import Family
from kubeproxy.observe.health import timestamp

WORST_FIRST: Final = ("refused", "differs", "pending")
"""The states of a family that is not known to have what it took."""


class Standing(Protocol):
    """What is known of one family's kernel: see backlog.Standing."""

    @property
    def family(self) -> Family:
        """Return which one."""

    @property
    def inspected_at(self) -> float | None:
        """Return when it was last seen to have all that it took."""

    @property
    def sound_since(self) -> float | None:
        """Return since when it has that, None when it is not known to."""

    @property
    def refusal(self) -> str | None:
        """Return why it refused what is queued."""

    @property
    def difference(self) -> str | None:
        """Return what another program changed."""


def trouble(standing: Standing) -> tuple[str, str] | None:
    """Return the state and the reason of a family that may lack what it took, None for one that is whole."""
    if standing.refusal is not None:
        return "refused", standing.refusal
    if standing.difference is not None:
        return "differs", standing.difference
    return None if standing.sound_since is not None else ("pending", "not yet compared with the kernel")


def shown(standing: Standing) -> dict[str, Any]:
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
