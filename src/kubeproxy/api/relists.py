"""Delivers new lists of Services and EndpointSlices together if both are requested again, as after 410 Gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kubeproxy.api.source import ResourceStatus
from kubeproxy.model.events import Event, Replaced, Sink
from kubeproxy.model.objects import Resource

LONGEST: Final = 1.0
STEP: Final = 0.02
"""LONGEST: maximum seconds for which a list of Services waits for slices, or a list of slices waits for Services. STEP:
seconds between two checks of the resource for which the list waits."""

_OTHER: Final[Mapping[Resource, Resource]] = {"services": "endpointslices", "endpointslices": "services"}


class Relists:
    """Passes events on to a sink. A new list of Services that arrives while the watch of slices is interrupted waits
    for the slices, at most LONGEST seconds, and so do later events of Services. A new list of slices waits for Services
    in the same way. With new Services and old slices a renamed port has no endpoint, so connections to it would be
    refused. The Go kube-proxy does not wait."""

    def __init__(self, sink: Sink, status: Callable[[Resource], ResourceStatus]) -> None:
        self._sink = sink
        self._status = status
        self._waiting: Resource | None = None  # the resource of the waiting events
        self._held: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None

    def take(self, events: Sequence[Event]) -> None:
        """Pass on events of one resource, immediately or later. The first list never waits."""
        listed = next((event.resource for event in events if isinstance(event, Replaced)), None)
        if self._waiting is not None and all(event.resource == self._waiting for event in events):
            self._held += events
        elif listed is None:
            self._sink(events)
        elif self._waiting is None and self._status(listed).synced and self._is_behind(_OTHER[listed]):
            self._waiting, self._held = listed, [*events]
            self._look(asyncio.get_running_loop().time() + LONGEST)
        else:
            self._release(events)

    def close(self) -> None:
        """Stop; the waiting events are not passed on."""
        if self._timer is not None:
            self._timer.cancel()

    def _is_behind(self, resource: Resource) -> bool:
        status = self._status(resource)
        return status.synced and not status.connected

    def _look(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        if self._waiting is not None and self._is_behind(_OTHER[self._waiting]) and loop.time() < until:
            self._timer = loop.call_later(STEP, self._look, until)
        else:
            self._release()

    def _release(self, others: Sequence[Event] = ()) -> None:
        self.close()
        held, self._held, self._waiting = self._held, [], None
        self._sink([*held, *others])
