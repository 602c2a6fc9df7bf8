"""The question of `kube-proxy flows -f`: connections as they begin and end, with names of Service and pods."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from kubeproxy.ask import cluster
from kubeproxy.ask.flows.ground import Ground
from kubeproxy.ask.flows.users import ServedPort, ServedPorts, target_text
from kubeproxy.kernel.conntrack.events import Event
from kubeproxy.model.addresses import destination_text
from kubeproxy.model.plan import ServiceName

MOST_REMEMBERED = 1 << 16
"""Maximum number of connections with a stored beginning, for their duration; beyond it the oldest are removed."""
_RENEWAL = 5.0
"""Minimum seconds between two reloads of Services and pods, which an unknown address causes."""
_RENEWAL_SHARE = 0.05
"""Maximum fraction of the time for reloads."""


class FlowEvent(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A beginning or an end. `time` is RFC 3339, `seconds` its duration, None if its beginning was not seen."""

    time: str
    event: str
    service: str
    port: str
    client: str
    client_pod: str
    target: str
    endpoint: str
    endpoint_pod: str
    seconds: float | None = None
    answered: bool | None = None

    def __str__(self) -> str:
        endpoint = f"{self.endpoint_pod} ({self.endpoint})" if self.endpoint_pod else self.endpoint
        client = f"{self.client_pod} ({self.client})" if self.client_pod else self.client
        text = f"{self.time[11:23]} {self.event:<5} {self.service}:{self.port} {client} -> {self.target} => {endpoint}"
        if self.seconds is not None:
            text += f", {self.seconds:.1f} s"
        return text + (", never answered" if self.answered is False else "")


class Known:
    """Services and pods by address, reloaded after an unknown address."""

    def __init__(self, where: Ground, names: Sequence[ServiceName], served: ServedPorts) -> None:
        self._where = where
        self._names = names
        self._served = served
        self._pods: Mapping[bytes, str] = {}
        self._strangers: set[bytes] = set()
        self._stale = False
        self._due = 0.0
        self.trouble = ""

    def port(self, target: bytes) -> ServedPort | None:
        """Return the service port that has an address."""
        port = self._served.of(target)
        if port is None and not self._names:
            self._meet(target)
        return port

    def pod(self, place: bytes) -> str:
        """Return the name of the pod with the address of a packed destination, '' if unknown."""
        return self._pods.get(place[:-2], "")

    def endpoint(self, port: ServedPort, server: bytes) -> str:
        """Return the name of the pod behind an endpoint."""
        if server not in port.endpoints:
            self._meet(server)
        return self.pod(server)

    def look_up_pods(self) -> None:
        """Load the names of pods."""
        self._pods, self.trouble = cluster.pods(self._where.facts, self._names[0] if self._names else None)

    def renew(self) -> None:
        """Reload after an unknown address, if the minimum interval is over. Raises KubeProxyError."""
        now = time.monotonic()
        if not (self._stale or self._names) or now < self._due:
            return
        self._served = self._where.served(self._names)
        if self._stale:
            self.look_up_pods()
        self._stale = False
        self._due = time.monotonic() + max(_RENEWAL, (time.monotonic() - now) / _RENEWAL_SHARE)

    def _meet(self, stranger: bytes) -> None:
        """Record an unknown address; if it is unknown after a reload, too, it causes no further reload."""
        if stranger not in self._strangers and len(self._strangers) < MOST_REMEMBERED:
            self._strangers.add(stranger)
            self._stale = True


class Follower:
    """Makes lines of events."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._began: dict[bytes, float] = {}

    def line(self, event: Event) -> FlowEvent | None:
        """Return the line for an event, None if it does not concern a followed Service."""
        entry, known = event.entry, self._known
        port = known.port(entry.target)
        if port is None:
            return None
        now = time.time()
        seconds = answered = None
        if event.ended:
            answered = entry.answered
            if (began := self._began.pop(entry.mark, None)) is not None:
                seconds = round(now - began, 3)
        else:
            self._began[entry.mark] = now
            if len(self._began) > MOST_REMEMBERED:
                del self._began[next(iter(self._began))]
        return FlowEvent(
            datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            "end" if event.ended else "begin",
            port.service,
            port.port,
            destination_text(entry.client),
            known.pod(entry.client),
            target_text(entry.target),
            destination_text(entry.server),
            known.endpoint(port, entry.server),
            seconds,
            answered,
        )
