"""What the proxy writes to the process that follows connections for its page: lines of JSON, but for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct


class FollowedNode(Struct, frozen=True):
    """The first line: the mode, and the packed addresses of NodePorts by family's number, None for all local ones."""

    mode: str
    nodeports: dict[int, tuple[bytes, ...] | None]


class Fronts(Struct, frozen=True, array_like=True):
    """Each further line: what a Service has from now on, see ask.flows.owners; nothing for one that is gone."""

    service: str
    ports: Mapping[str, Sequence[bytes]]


COMPLETE: Final = b"complete"
"""The line that ends the initial list of Services. The lines after it are changes."""
