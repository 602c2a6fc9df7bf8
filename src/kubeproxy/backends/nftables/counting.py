"""New connections by service port and endpoint, as the kernel counts them in the elements of the endpoint maps.

nat sees the first packet of a connection alone, so what an element has counted is what was sent to its endpoint. One
that is written anew begins at 0, as when an endpoint is replaced: what it counted since it was read last is lost.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, Self

from kubeproxy.backends.mode import Counter, Labelled, Registry
from kubeproxy.backends.nftables.layout import ENDPOINT_MAPS, TABLE, service_key
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.errors import ApplyError
from kubeproxy.kernel import nft_counts
from kubeproxy.kernel.netlink import NETLINK_NETFILTER, Netlink
from kubeproxy.kernel.nft_counts import Count
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import ServiceName, ServicePlan, ServicePortKey

log = logging.getLogger("kubeproxy.nftables")

PERIOD: Final = 30.0
"""Seconds from the beginning of one pass over the counters to that of the next, at least."""

TURN: Final = 0.005
"""Seconds of a pass at a time, once a second: what it takes of a processor, at any number of endpoints."""

TOP: Final = 100
"""Service ports of a family with a series of their own; all others are summed."""

FORGOTTEN: Final = 8
"""Passes that did not show an element, after which it is taken for gone. One alone may have passed it over."""

_SERVICES: Final = 100  # looked through at a time


class Counters(Protocol):
    """Where counters are read."""

    def read(self, name: str) -> Iterator[Sequence[Count]]:
        """Read those of a map in pieces. Raises ApplyError."""

    def close(self) -> None:
        """Let go of the kernel."""


class Total(NamedTuple):
    """New connections, and the bytes of their first packets."""

    connections: int
    bytes: int


def connections(counted: Iterable[Count], plans: Iterable[ServicePlan]) -> Mapping[tuple[ServicePortKey, bytes], Total]:
    """Return the new connections of each endpoint (address and port, packed) of these service ports of one family.

    `counted` is what the elements of all endpoint maps have counted. Endpoints without any are left out.
    """
    owners = {service_key(frontend.key): plan.key for plan in plans for frontend in plan.frontends}
    found: dict[tuple[ServicePortKey, bytes], Total] = {}
    for count in counted:
        owner = owners.get(count.key[:-4])
        if owner is not None:
            place = owner, count.data[:-2]
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


class Counting:
    """Passes over the counters of one family, a little at a time."""

    def __init__(self, family: Family, counters: Counters, metrics: ConnectionMetrics) -> None:
        self._family = family
        self._counters = counters
        self._metrics = metrics
        self._totals = Totals()
        self._placed: Mapping[ServiceName, Sequence[Placed]] = {}
        self._seen: dict[tuple[str, bytes], tuple[Count, int]] = {}
        self._passes = 0
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
        self._passes += 1
        fronts: defaultdict[bytes, int] = defaultdict(int)
        for endpoint_map in ENDPOINT_MAPS:
            for counted in self._counters.read(endpoint_map):
                for count in counted:
                    fronts[count.key[:-4]] += self._new(endpoint_map, count)
                yield
        services = list(self._placed.values())
        known: set[ServicePortKey] = set()
        new: defaultdict[ServicePortKey, int] = defaultdict(int)
        for start in range(0, len(services), _SERVICES):
            for item in (item for service in services[start : start + _SERVICES] for item in service):
                known.add(item.plan.key)
                for frontend in item.plan.frontends:
                    if more := fronts.pop(service_key(frontend.key), 0):
                        new[item.plan.key] += more
            yield
        self._totals.add(new, known)
        self._totals.others += sum(fronts.values())  # of Services that went meanwhile
        self._seen = {k: seen for k, seen in self._seen.items() if seen[1] > self._passes - FORGOTTEN}
        self._metrics.publish(self._family, self._totals)

    def _new(self, endpoint_map: str, count: Count) -> int:
        """Return what an element has counted since it was seen last."""
        place = endpoint_map, count.key
        before = self._seen.get(place)
        self._seen[place] = count, self._passes
        if before is None or before[0].data != count.data or before[0].packets > count.packets:
            return count.packets
        return count.packets - before[0].packets


class KernelCounters:
    """Reads the counters of a family's table through a socket of its own, as a pass lies between other requests."""

    def __init__(self, family: Family, link: Netlink) -> None:
        self._family = family
        self._link = link

    @classmethod
    def open(cls, family: Family) -> Self:
        """Open the socket. Raises NetlinkError."""
        return cls(family, Netlink.open(NETLINK_NETFILTER))

    def read(self, name: str) -> Iterator[Sequence[Count]]:
        """See Counters."""
        return nft_counts.counts(self._family, TABLE, name, self._link)

    def close(self) -> None:
        """See Counters."""
        self._link.close()
