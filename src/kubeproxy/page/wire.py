"""The protocol from the proxy to the process that follows connections: lines of JSON, except COMPLETE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct


class FollowedNode(Struct, frozen=True):
    """The first line: the mode, and the packed addresses of NodePorts by family's number, None for all local ones."""

    mode: str
    nodeports: dict[int, tuple[bytes, ...] | None]


class Fronts(Struct, frozen=True, array_like=True):
    """Each further line: the present frontends of a Service (see ask.flows.owners), none for a deleted one."""

    service: str
    ports: Mapping[str, Sequence[bytes]]


COMPLETE: Final = b"complete"
"""The line that ends the initial list of Services. The lines after it are changes."""
