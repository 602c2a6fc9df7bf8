"""The answers of `kube-proxy flows`: the open connections of Services, or, with -f, the beginning and the end of each
connection, with the names of the Service and the pods."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple

from msgspec import Struct

from kubeproxy.ask import cluster
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.flows.owners import nodeport_addresses
from kubeproxy.ask.flows.sampling import Sampled
from kubeproxy.ask.flows.users import Census, ServedPort, ServedPorts, target_text
from kubeproxy.ask.source import Source, knowing
from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.kernel.conntrack.tracked import ANSWERED, EVERYTHING, Event, Events, Tracked, Wanted, announced, entries
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.model.addresses import Family, destination_text
from kubeproxy.model.plan import ServiceName
from kubeproxy.setup import host, modes

MOST_REMEMBERED = 1 << 16
"""Maximum number of connections with a stored start time, from which the duration is computed; the oldest are
removed."""
_RENEWAL = 5.0  # minimum seconds between two reloads of Services and pods
_RENEWAL_SHARE = 0.05  # maximum fraction of the time that reloads may take


class FlowEvent(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The beginning or the end of a connection. `seconds` is the connection's duration, or None if its beginning was
    not observed."""

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
    """Maps addresses to Services and pods; an unknown address causes a reload."""

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
        """Return the service port to which a client's destination belongs."""
        port = self._served.of(target)
        if port is None and not self._names:
            self._meet(target)
        return port

    def pod(self, place: bytes) -> str:
        """Return the name of the pod at a packed address and port; '' if unknown."""
        return self._pods.get(place[:-2], "")

    def endpoint(self, port: ServedPort, server: bytes) -> str:
        """Return the name of the pod behind an endpoint."""
        if port.endpoint(server) not in port.endpoints:
            self._meet(server)
        return self.pod(server)

    def look_up_pods(self) -> None:
        """Load the names of pods."""
        self._pods, self.trouble = cluster.pods(self._where.facts, self._names[0] if self._names else None)

    def renew(self) -> None:
        """Reload Services and pods if an address was unknown; else reload only Services, if the question names them. Do
        nothing before the minimum interval has passed. Raises KubeProxyError."""
        now = time.monotonic()
        if not (self._stale or self._names) or now < self._due:
            return
        self._served = self._where.served(self._names)
        if self._stale:
            self.look_up_pods()
        self._stale = False
        self._due = time.monotonic() + max(_RENEWAL, (time.monotonic() - now) / _RENEWAL_SHARE)

    def _meet(self, stranger: bytes) -> None:
        if stranger not in self._strangers and len(self._strangers) < MOST_REMEMBERED:
            self._strangers.add(stranger)
            self._stale = True


class Follower:
    """Converts events to lines."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._began: dict[bytes, float] = {}

    def line(self, event: Event) -> FlowEvent | None:
        """Return the line for an event, or None if the event does not belong to a followed Service."""
        entry, known = event.entry, self._known
        port = known.port(entry.target)
        if port is None:
            return None
        now = time.time()
        seconds = answered = None
        if event.ended:
            answered = entry.answered
            if (began := self._began.pop(entry.entry_id, None)) is not None:
                seconds = round(now - began, 3)
        else:
            self._began[entry.entry_id] = now
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


MOST_SILENT = 1 << 17
"""Maximum number of stored unanswered connections. If there are more, `unanswered` includes connections that have just
begun."""


class Cost(Struct, frozen=True, rename="camel"):
    """The cost of a reading: the CPU time and the connections in `seconds` of listening. The number of `new`
    connections is known only if the kernel announces connections (`announced`)."""

    seconds: float
    processor_seconds: float
    connections: int
    new: int
    left_out: int
    lost: int
    announced: bool


def read(where: Ground, served: ServedPorts, seconds: float) -> Cost:
    """Count the connections of the service ports: listen for `seconds`, then read all entries. Raises ApplyError."""
    spent, is_own = time.process_time(), where.own is not None
    census, wanted = Census(served, where.own), EVERYTHING if is_own else where.wanted
    with Netlink.open(NETLINK_NETFILTER) as link:
        silent, began = _silent(where, link), time.monotonic()
        with Events.listen(wanted) as events:
            sampled = Sampled(events)
            while time.monotonic() < began + seconds:
                for event, weight in sampled.for_a_while(began + seconds):
                    if not event.ended:
                        census.began(event.entry, weight)
        listened, count = time.monotonic() - began, 0
        for count, entry in enumerate(_entries(where, link, wanted), 1):  # noqa: B007 - the last number is used
            census.add(entry, silent=not entry.answered and (silent is None or entry.entry_id in silent))
    spent = time.process_time() - spent
    return Cost(listened, spent, count, sampled.received, sampled.left_out, sampled.lost, announced())


def _entries(where: Ground, link: Netlink, wanted: Wanted) -> Iterator[Tracked]:
    for family in where.facts.world.families:
        yield from entries(link, family, wanted)


def _silent(where: Ground, link: Netlink) -> frozenset[bytes] | None:
    """Return the unanswered connections, or None if there are more than MOST_SILENT."""
    clients = 0 if where.own is not None else where.mode.tracked_as
    found = set()
    for entry in _entries(where, link, Wanted(clients, clients | ANSWERED)):
        found.add(entry.entry_id)
        if len(found) > MOST_SILENT:
            return None
    return frozenset(found)


class Ground(NamedTuple):
    """The source of the answers, its mode, and this node's addresses."""

    source: Source
    facts: Facts
    mode: Mode
    local: Mapping[Family, Sequence[bytes]]

    @property
    def own(self) -> frozenset[bytes] | None:
        """Return this node's addresses if clients' connections end at the proxy in this mode, else None."""
        return frozenset(chain(*self.local.values())) if self.mode.flows_end is FlowsEnd.PROXY else None

    @property
    def wanted(self) -> Wanted:
        """Return the filter that selects entries of connection tracking that may belong to Services."""
        return Wanted(self.mode.tracked_as, self.mode.tracked_as)

    def served(self, names: Sequence[ServiceName] = ()) -> ServedPorts:
        """Return the service ports of these Services, or of all, from the committed plans. Raises KubeProxyError."""
        held = self.source.services(names)
        asked = {family: ours.nodeport_ips for family, ours in self.facts.world.parts.items()}
        return ServedPorts((plan for one in held for plan in one.plans), nodeport_addresses(asked, self.local))


def ground(source: Source) -> Ground:
    """Return a source's facts, and this node's addresses. Raises KubeProxyError."""
    facts = knowing(source)
    local = host.packed_local_addresses(facts.world.families)
    return Ground(source, facts, modes.named(facts.mode), local)
