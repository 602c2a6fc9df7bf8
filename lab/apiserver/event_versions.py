"""Converts Events between core/v1, the stored version, and events.k8s.io/v1. Pure."""

from __future__ import annotations

from lab.apiserver.status import Json

_TO_CORE = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_FROM_CORE = {core: new for new, core in _TO_CORE.items()}


def to_core(event: Json) -> Json:
    """Return the core/v1 form of an events.k8s.io/v1 Event."""
    return {_TO_CORE.get(k, k): v for k, v in event.items()} | {"kind": "Event", "apiVersion": "v1"}


def from_core(event: Json) -> Json:
    """Return the events.k8s.io/v1 form of a stored Event, without kind and apiVersion."""
    return {_FROM_CORE.get(k, k): v for k, v in event.items() if k not in {"kind", "apiVersion"}}
