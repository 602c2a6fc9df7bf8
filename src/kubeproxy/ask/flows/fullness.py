"""The state of the connection tracking table: use, growth, failures, and the largest users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from kubeproxy.ask.flows.users import MOST_CLIENTS, ServedPorts
from kubeproxy.kernel.conntrack.tracked import TCP_STATES, Level, Refusals, Tracked
from kubeproxy.model.addresses import PROTOCOL_NAMES, unpack
from kubeproxy.wording import counted

NEARLY_FULL: Final = 0.9  # fraction of the limit
_SOON: Final = 60.0
"""The growth of the table is reported as a problem if the table will be full within this number of seconds."""
_MANY: Final = 0.25  # the fraction of all entries above which a single Service or client is reported as a cause
_TCP = 6


class Filler(Struct, frozen=True, rename="camel"):
    """A user of entries: a Service, or, for entries that belong to no Service, a client's address."""

    name: str
    entries: int


class Fullness(Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of connection tracking."""

    entries: int
    limit: int
    growth: float  # entries a second
    refused: dict[str, int]  # entries that the kernel refused between the two readings
    refused_before: dict[str, int]  # entries that the kernel refused since the start of the network namespace
    states: dict[str, int]  # entries of both families, by protocol and state
    services: tuple[Filler, ...]
    clients: tuple[Filler, ...]
    problems: tuple[str, ...]
    fixes: tuple[str, ...]


class Fillers:
    """Counts entries by Service, and the other entries by client."""

    def __init__(self, ports: ServedPorts) -> None:
        self._ports = ports
        self._services: Counter[str] = Counter()
        self._clients: Counter[bytes] = Counter()
        self._states: Counter[tuple[int, int, bool]] = Counter()

    def add(self, entry: Tracked) -> None:
        """Count an entry."""
        self._states[entry.target[-3], entry.state, entry.answered] += 1
        port = self._ports.of(entry.target)
        if port is not None:
            self._services[port.service] += 1
            return
        client = entry.client[:-2]
        if client in self._clients or len(self._clients) < MOST_CLIENTS:
            self._clients[client] += 1
        else:
            self._clients[b""] += 1

    @property
    def services(self) -> tuple[Filler, ...]:
        """Return the Services and their numbers of entries, the largest first."""
        return tuple(Filler(name, count) for name, count in self._services.most_common())

    @property
    def clients(self) -> tuple[Filler, ...]:
        """Return the clients and their numbers of entries without a Service, the largest first."""
        return tuple(Filler(unpack(c) if c else "others", count) for c, count in self._clients.most_common())

    @property
    def states(self) -> dict[str, int]:
        """Return the number of entries by protocol and state."""
        found: Counter[str] = Counter()
        for (protocol, state, answered), count in self._states.items():
            name = PROTOCOL_NAMES.get(protocol, str(protocol))
            if protocol == _TCP and 0 < state < len(TCP_STATES):
                word = TCP_STATES[state]
            else:
                word = "answered" if answered else "unanswered"
            found[f"{name} {word}"] += count
        return dict(found.most_common())


def fullness(before: tuple[Level, Refusals], after: tuple[Level, Refusals], seconds: float, who: Fillers) -> Fullness:
    """Return the state of connection tracking from two readings with `seconds` between them."""
    level, refused = after[0], Refusals(*(b - a for a, b in zip(before[1], after[1], strict=True)))
    growth = (level.entries - before[0].entries) / seconds
    problems = tuple(_problems(level, growth, refused))
    return Fullness(
        entries=level.entries,
        limit=level.limit,
        growth=round(growth, 1),
        refused=refused._asdict(),
        refused_before=before[1]._asdict(),
        states=who.states,
        services=who.services,
        clients=who.clients,
        problems=problems,
        fixes=tuple(fixes(level, who)) if problems else (),
    )


def _problems(level: Level, growth: float, refused: Refusals) -> Iterator[str]:
    share = level.entries / level.limit if level.limit else 0.0
    if share >= 1:
        yield "it is full: new connections are dropped, unless the kernel can remove an unanswered one"
    elif share >= NEARLY_FULL:
        yield f"it is nearly full: {int(share * 100)}%"
    elif level.limit and growth > 0 and (level.limit - level.entries) / growth < _SOON:
        yield f"at the present rate, the table is full in {(level.limit - level.entries) / growth:.0f} s"
    for count, noun, reason in (
        (refused.dropped, "packet", "dropped just now, because the table had no room for their connection"),
        (refused.early, "entry", "removed just now, to make room for new entries"),
        (refused.failed, "packet", "dropped just now, as their entry or translated address was taken"),
        (refused.chains, "packet", "dropped just now, as the hash table is too small for its entries"),
    ):
        if count:
            yield f"{counted(count, noun, 'was')} {reason}"


def fixes(level: Level, who: Fillers) -> Iterator[str]:
    """Yield changes that make room in the table."""
    states = who.states
    for filler in (*who.services[:1], *who.clients[:1]):
        if filler.entries > _MANY * max(level.entries, 1):
            yield (
                f"{filler.name} has {filler.entries} of {level.entries} entries: see whether it leaks connections, or "
                "opens one for each request that could be kept"
            )
    total = max(sum(states.values()), 1)
    if states.get("TCP established", 0) > total / 2:
        yield (
            "most entries are established TCP connections: end the programs that abandoned connections, or remove the "
            "entries of a client and break its connections: `conntrack -D -p tcp -s CLIENT`; a shorter "
            "conntrack.tcpEstablishedTimeout applies to an entry only from its next packet on"
        )
    if states.get("TCP close-wait", 0) > total / 4:
        yield (
            "many entries are in CLOSE_WAIT, because a program does not close its connections: a shorter "
            "conntrack.tcpCloseWaitTimeout removes the entries earlier"
        )
    if sum(count for name, count in states.items() if name.startswith("UDP")) > total / 2:
        yield "most entries are UDP, which has no close: shorten conntrack.udpTimeout and conntrack.udpStreamTimeout"
    yield (
        f"raise conntrack.maxPerCore in the proxy's configuration, or conntrack.min unless maxPerCore is 0 (now "
        f"{level.limit} in all; an entry takes some 320 bytes), and net.netfilter.nf_conntrack_buckets with it"
    )
