"""Faults of the API server that tests can cause."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any

GARBAGE = b'{"type":"MODIFIED","object":{"kind":\x00\xff]]\n'


@dataclass(slots=True)
class Faults:
    """The fields can be set at any time. Each fault decreases its counter. Only `resources` are affected; if empty, all
    resources."""

    delay: float = 0.0
    """Seconds before each answer."""
    fail: int = 0
    """Number of requests that are answered with `fail_code`."""
    fail_code: int = 500
    reset: int = 0
    """Number of requests whose connection is closed without an answer."""
    cut_watch: int = 0
    """Number of watch lines in the middle of which the connection is closed."""
    garbage_watch: int = 0
    """Number of watch lines that are replaced by invalid JSON."""
    gone: int = 0
    """Number of watch lines (or starting watches) that are replaced by an ERROR event with code 410."""
    stall_watch: bool = False
    """Watches stay open, but send nothing; the delayed events are sent when this ends."""
    fail_watch_list: bool = False
    """Streaming lists are refused as by a real server without the feature: code 500 inside a stream with status 200."""
    resources: list[str] = field(default_factory=list)

    def update(self, values: dict[str, Any]) -> None:
        """Set several fields by name; raises KeyError for an unknown name, TypeError for a wrong type."""
        kinds = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name, value in values.items():
            kind = kinds[name]
            if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
                raise TypeError(f"{name}: expected {kind.__name__}, got {value!r}")
            setattr(self, name, value)

    def hits(self, plural: str) -> bool:
        """Return whether faults affect requests for this resource."""
        return not self.resources or plural in self.resources

    def take(self, name: str) -> bool:
        """Decrease the counter `name`; return whether it was above 0."""
        left = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return bool(left > 0)

    async def wait(self) -> None:
        """Wait for the delay before an answer."""
        if self.delay:
            await asyncio.sleep(self.delay)
