"""New connections by service port and endpoint, as the kernel counts them in the elements of the endpoint maps.

nat sees the first packet of a connection alone, so what an element has counted is what was sent to its endpoint. One
that is written anew begins at 0, as when an endpoint is replaced: what it counted since it was read last is lost.
"""

from __future__ import annotations

import logging
import time
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from kubeproxy.backends.mode import Counter, Labelled, Registry
from kubeproxy.backends.nftables.layout import ENDPOINT_MAPS, TABLE, slot_bytes
from kubeproxy.backends.nftables.numbering import Numbers
from kubeproxy.backends.nftables.render import Parts, Placed
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.nftables import counts
from kubeproxy.kernel.nftables.counts import AT_ONCE, Count
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import ServiceName, ServicePlan, ServicePortKey

log = logging.getLogger("kubeproxy.nftables")

PERIOD: Final = 30.0
"""Seconds from the beginning of one pass over the counters to that of the next, at least."""

TURN: Final = 0.005
"""Seconds of a pass at a time, once a second: what it takes of a processor, at any number of endpoints."""

TOP: Final = 100
"""Service ports of a family with a series of their own; all others are summed."""


def _elements(item: Placed) -> list[tuple[str, bytes]]:
    """Return map and key of each element of a service port in the endpoint maps."""
    pools = Parts([item]).pools
    return [
        (set_id, key + slot) for (set_id, key), pool in pools.items() for slot in slot_bytes(len(pool))[: len(pool)]
    ]


class Total(NamedTuple):
    """New connections, and the bytes of their first packets."""

    connections: int
    bytes: int


def connections(counters: KernelCounters, plans: Iterable[ServicePlan]) -> Mapping[tuple[ServicePortKey, bytes], Total]:
    """Return the new connections of each endpoint (address and port, packed) of service ports, over all frontends.

    Asks the kernel for the elements of these service ports and no others, 7 us each. Endpoints without any connection
    are left out, and so is everything where nothing is counted. Raises ApplyError.
    """
    found: dict[tuple[ServicePortKey, bytes], Total] = {}
    for plan in plans:
        # In which slot an endpoint is makes no difference: which slots there are follows from the number of endpoints.
        asked: defaultdict[str, list[bytes]] = defaultdict(list)
        for endpoint_map, key in _elements(Placed.fresh(plan, Numbers())):
            asked[endpoint_map].append(key)
        for count in (count for name, keys in asked.items() for count in counters.read(name, keys) if count.packets):
            place = plan.key, count.data[:-2]
            before = found.get(place, Total(0, 0))
            found[place] = Total(before.connections + count.packets, before.bytes + count.bytes)
    return found


class Totals:
    """Connections of the busiest service ports, and of all others together. No sum of them ever goes down."""

    def __init__(self) -> None:
        self.busiest: dict[ServicePortKey, int] = {}
        self.others = 0

    def add(self, new: Mapping[ServicePortKey, int], known: Collection[ServicePortKey]) -> None:
        """Add what came in one pass; `known` are the service ports that there are.

        Who has no series gets one while there are any left, or takes that of one which had not half as many this time.
        """
        for key in self.busiest.keys() - known:
            self.others += self.busiest.pop(key)
        quietest = sorted(self.busiest, key=lambda key: new.get(key, 0), reverse=True)
        for key, count in sorted(new.items(), key=lambda item: -item[1]):
            if key in self.busiest:
                self.busiest[key] += count
            elif len(self.busiest) < TOP:
                self.busiest[key] = count
            elif quietest and 2 * new.get(quietest[-1], 0) < count:
                # What it had this time comes later in this order, and is among the others' then.
                self.others += self.busiest.pop(quietest.pop())
                self.busiest[key] = count
            else:
                self.others += count


class ConnectionMetrics:
    """The series of all families: those of one appear together."""

    def __init__(self, registry: Registry) -> None:
        self._series: Labelled[Counter] = registry.counter(
            "kubeproxy_service_new_connections_total",
            f"New connections by service port, of the {TOP} busiest of each family; all others are those without a name"
            " (not in the Go kube-proxy)",
            *("namespace", "service", "port", "protocol", "ip_family"),
        )
        self._age = registry.gauge(
            "kubeproxy_service_new_connections_read_timestamp_seconds",
            "When the new connections were read from the kernel last (not in the Go kube-proxy)",
            "ip_family",
        )
        self._totals: dict[Family, Totals] = {}

    def publish(self, family: Family, totals: Totals) -> None:
        """Show the totals of a family."""
        self._totals[family] = totals
        self._series.clear()
        for each, found in self._totals.items():
            for key, count in found.busiest.items():
                labels = key.namespace, key.name, key.port_name, PROTOCOL_NAMES[key.protocol], each.label
                self._series.labels(*labels).inc(count)
            self._series.labels("", "", "", "", each.label).inc(found.others)
        self._age.labels(family.label).set(time.time())


class _Pass:
    """One pass: what the elements have counted now, and what is new of it, beside the pass before."""

    def __init__(self, before: Mapping[tuple[str, bytes], Count]) -> None:
        self.seen: dict[tuple[str, bytes], Count] = {}
        self.new: Counts[ServicePortKey] = Counts()
        self._before = before

    def take(self, name: str, count: Count, owner: ServicePortKey) -> None:
        """Take what an element of a service port has counted; with less, or for another endpoint, it is a new one."""
        self.seen[name, count.key] = count
        last = self._before.get((name, count.key))
        known = last.packets if last is not None and last.data == count.data else 0
        self.new[owner] += count.packets - (known if known <= count.packets else 0)


class Counting:
    """Passes over the counters of one family, a little at a time.

    Each element that is placed is asked for, so a pass costs what there is in the table: 7 us an element.
    """

    def __init__(self, family: Family, counters: KernelCounters, metrics: ConnectionMetrics) -> None:
        self._family = family
        self._counters = counters
        self._metrics = metrics
        self._totals = Totals()
        self._placed: Mapping[ServiceName, Sequence[Placed]] = {}
        self._seen: dict[tuple[str, bytes], Count] = {}
        self._pass: Iterator[None] = iter(())
        self._next = 0.0

    def close(self) -> None:
        """Let go of the kernel."""
        self._pass = iter(())
        self._counters.close()

    def step(self, placed: Mapping[ServiceName, Sequence[Placed]]) -> None:
        """Go on with a pass, or begin one when it is time; `placed` is all that the table has."""
        self._placed = placed
        began = now = time.monotonic()
        while now < began + TURN:
            try:
                next(self._pass)
            except StopIteration:
                if now < self._next:
                    return
                self._next = now + PERIOD
                self._pass = self._over_all()
            except ApplyError as error:
                # As when the table was deleted; it is repaired elsewhere.
                log.debug("Cannot read the counters of connections error=%r", str(error))
                self._pass = iter(())
                return
            now = time.monotonic()

    def _over_all(self) -> Iterator[None]:
        made = _Pass(self._seen)
        asked: dict[str, list[tuple[bytes, ServicePortKey]]] = {name: [] for name in ENDPOINT_MAPS}
        for number, service in enumerate(list(self._placed.values())):
            if number % AT_ONCE == 0:
                yield
            for item in service:
                for name, key in _elements(item):
                    asked[name].append((key, item.plan.key))
            for name, elements in asked.items():
                while len(elements) >= AT_ONCE:
                    self._read(name, elements[:AT_ONCE], made)
                    del elements[:AT_ONCE]
                    yield
        for name, elements in asked.items():
            self._read(name, elements, made)
            yield
        self._seen = made.seen
        self._totals.add(made.new, {key for key in self._totals.busiest if self._is_there(key)})
        self._metrics.publish(self._family, self._totals)

    def _read(self, name: str, elements: Sequence[tuple[bytes, ServicePortKey]], made: _Pass) -> None:
        owners = dict(elements)
        for count in self._counters.read(name, list(owners)) if owners else ():
            if count.packets:
                made.take(name, count, owners[count.key])

    def _is_there(self, key: ServicePortKey) -> bool:
        return any(item.plan.key == key for item in self._placed.get((key.namespace, key.name), ()))


class KernelCounters:
    """Reads the counters of a family's table."""

    def __init__(self, family: Family, link: Netlink) -> None:
        self._family = family
        self._link = link

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open the socket. Raises NetlinkError."""
        return cls(family, Netlink.open(NETLINK_NETFILTER))

    def read(self, name: str, keys: Sequence[bytes]) -> Sequence[Count]:
        """Return key, data and counter of those of these elements that a map has. Raises NetlinkError."""
        return counts.counts(self._family, TABLE, name, keys, self._link)

    def close(self) -> None:
        """Close the socket."""
        self._link.close()
