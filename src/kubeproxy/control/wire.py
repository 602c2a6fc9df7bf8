"""A stream of values in msgpack, each after its length."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

LENGTH = 4
"""Bytes before each part of a stream that say how long it is, in network order."""


def part(value: object) -> bytes:
    """Return a value as a part of a stream."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(LENGTH, "big") + data


def stream(values: Iterable[object]) -> bytes:
    """Return values as parts of a stream, one after the other."""
    return b"".join(map(part, values))
