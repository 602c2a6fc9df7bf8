"""Connections of Services as they begin and end, with the names of Service and pods: kube-proxy flows -f."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct

from kubeproxy.ask import pods
from kubeproxy.ask.flows.ground import Ground
from kubeproxy.ask.flows.sampling import Sampled
from kubeproxy.ask.flows.users import ServedPort, ServedPorts, target_text
from kubeproxy.commands import YES, output
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.conntrack.events import NOT_ANNOUNCED, Event, Events, announced
from kubeproxy.model.addresses import destination_text
from kubeproxy.model.plan import ServiceName

MOST_REMEMBERED = 1 << 16
"""Connections whose beginning is remembered, to say how long they lasted; beyond it the oldest are forgotten."""
_RENEWAL = 5.0
"""Seconds at least between two times that Services and pods are asked for again: when one is met that is not known."""
_RENEWAL_SHARE = 0.05
"""How much of the time may go into asking."""


class FlowEvent(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A beginning or an end. `time` is RFC 3339, `seconds` how long it lasted, None if nobody saw it begin."""

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
    """Services and pods by address, asked for again when something is met that is not among them."""

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
        """Return the name of the pod that has an address, '' for none; a port follows it."""
        return self._pods.get(place[:-2], "")

    def endpoint(self, port: ServedPort, server: bytes) -> str:
        """Return the name of the pod behind an endpoint."""
        if server not in port.endpoints:
            self._meet(server)
        return self.pod(server)

    def look_up_pods(self) -> None:
        """Ask for the names of pods."""
        self._pods, self.trouble = pods.names(self._where.facts, self._names[0] if self._names else None)

    def renew(self) -> None:
        """Ask again if something was met that nobody knows, and if that is due. Raises KubeProxyError."""
        now = time.monotonic()
        if not (self._stale or self._names) or now < self._due:
            return
        self._served = self._where.served(self._names)
        if self._stale:
            self.look_up_pods()
        self._stale = False
        self._due = time.monotonic() + max(_RENEWAL, (time.monotonic() - now) / _RENEWAL_SHARE)

    def _meet(self, stranger: bytes) -> None:
        """Note something that is not known; if it is still not known after asking, it is a stranger for good."""
        if stranger not in self._strangers and len(self._strangers) < MOST_REMEMBERED:
            self._strangers.add(stranger)
            self._stale = True


def run(where: Ground, names: Sequence[ServiceName], served: ServedPorts, given: argparse.Namespace) -> int:
    """Show what happens until Ctrl-C, or for as long as is said; return the exit code. Raises KubeProxyError."""
    if not announced():
        raise Unsupported(f"nothing can be followed: {NOT_ANNOUNCED}")
    known = Known(where, names, served)
    known.look_up_pods()
    people = given.output != "json"
    if known.trouble and people:
        output.marked(output.NOTE, f"pods are shown by their addresses: {known.trouble}")
    end = time.monotonic() + given.seconds if given.seconds else float("inf")
    with Events.open(where.wanted) as events:
        sampled = Sampled(events, _say_rate if people else _say_rate_json)
        follower = Follower(known)
        try:
            while time.monotonic() < end:
                for event, _ in sampled.for_a_while(end):
                    line = follower.line(event)
                    if line is not None and people:
                        output.say(str(line))
                    elif line is not None:
                        output.json_line(line)
                sys.stdout.flush()
                known.renew()
        except KeyboardInterrupt:
            pass
        _print_end(sampled, people=people)
    return YES


class Follower:
    """Makes lines of events."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._began: dict[bytes, float] = {}

    def line(self, event: Event) -> FlowEvent | None:
        """Return what an event says, None if it is not about a Service that is followed."""
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


def _say_rate(one_in: int) -> None:
    text = f"one connection in {one_in} is followed from now on" if one_in > 1 else "all are followed again"
    output.marked(output.NOTE, text)


def _say_rate_json(one_in: int) -> None:
    output.json_line({"one_in": one_in})


def _print_end(sampled: Sampled, *, people: bool) -> None:
    heard, left_out, lost = sampled.heard, sampled.left_out, sampled.lost
    if not people:
        output.json_line({"heard": heard, "left_out": left_out, "lost": lost})
        return
    text = f"heard of {heard} beginnings and ends"
    if left_out:
        text += f", left out about {left_out}"
    if lost:
        text += f", and {lost} times more came than could be read: the kernel dropped some"
    output.marked(output.NOTE, text)
