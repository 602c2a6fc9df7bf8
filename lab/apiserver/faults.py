"""Faults on request: what goes wrong with the API server in the tests that want it to."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any

GARBAGE = b'{"type":"MODIFIED","object":{"kind":\x00\xff]]\n'


@dataclass(slots=True)
class Faults:
    """Set the fields at any time; counters count down as they strike. Only `resources` are hit, all when empty."""

    delay: float = 0.0
    """Seconds before each answer."""
    fail: int = 0
    """So many requests are answered with `fail_code`."""
    fail_code: int = 500
    reset: int = 0
    """So many requests end with a closed connection and no answer."""
    cut_watch: int = 0
    """So many watch lines end in their middle, and the connection with them."""
    garbage_watch: int = 0
    """So many watch lines are replaced by what is no JSON."""
    gone: int = 0
    """So many watch lines (or starting watches) become an ERROR event with code 410."""
    stall_watch: bool = False
    """Watches stay open and say nothing; what they would have said comes when this ends."""
    fail_watch_list: bool = False
    """Streaming lists are refused as a real server without the feature does: code 500 inside a 200 stream."""
    resources: list[str] = field(default_factory=list)

    def update(self, values: dict[str, Any]) -> None:
        """Set several by name; raises KeyError for a name that is none, TypeError for a wrong type."""
        kinds = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name, value in values.items():
            kind = kinds[name]
            if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
                raise TypeError(f"{name}: expected {kind.__name__}, got {value!r}")
            setattr(self, name, value)

    def hits(self, plural: str) -> bool:
        """Whether faults strike requests for this resource."""
        return not self.resources or plural in self.resources

    def take(self, name: str) -> bool:
        """Count one of `name` down; whether there was one left."""
        left = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return bool(left > 0)

    async def wait(self) -> None:
        """The delay before an answer."""
        if self.delay:
            await asyncio.sleep(self.delay)
