"""Counts new connections per service port and endpoint, with the counters of elements in the maps of endpoints. All
ranges of ports of a Service count as one service port. Only the first packet of a connection passes the nat chains, so
the counter of an element is the number of connections to its endpoint. When an element is written again, its counter
begins at 0, so the connections since the last read are lost."""

from __future__ import annotations

import logging
import time
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from kubeproxy.backends.nftables.layout import COUNTED_MAPS, ENDPOINT_MAPS, SetId, slot_keys
from kubeproxy.backends.nftables.render import Parts, Placed
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables.elements import COUNTED_AT_ONCE, ElementCount
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import ServiceName, ServicePortKey
from kubeproxy.registry import CounterMetric, MetricFamily, MetricRegistry

log = logging.getLogger("kubeproxy.nftables")

PERIOD: Final = 30.0
"""Minimum seconds between the beginnings of two passes over the counters."""

TURN: Final = 0.005
"""Seconds after which a call of `step` stops reading. With one call per second, this is also the share of a processor
for reading counters, at any number of endpoints."""

TOP: Final = 100
"""Maximum number of service ports of a family with their own series. One more series is the sum of all other service
ports."""


Read = Callable[[str, Sequence[bytes]], Sequence[ElementCount]]
"""Returns key, data and counter of each requested element that exists in the map. Raises ApplyError."""


def _elements(item: Placed) -> Iterator[tuple[str, bytes, ServicePortKey]]:
    parts, own = Parts([item]), item.plan.key
    for numbered, series in ((SetId.SESSION_ENDPOINTS, own), (SetId.RANGE_ENDPOINTS, _of_ranges(own))):
        yield from ((numbered, key, series) for key in parts.elements.get(numbered, ()))
    for (name, key), pool in parts.pools.items():
        if name in ENDPOINT_MAPS:
            yield from ((name, element, own) for element in slot_keys(key, len(pool)))


def _of_ranges(key: ServicePortKey) -> ServicePortKey:
    return key._replace(port_name="ranges", protocol=0)


class Totals:
    """Connections of the busiest service ports, and of all other service ports together. The totals never decrease."""

    def __init__(self) -> None:
        self.busiest: dict[ServicePortKey, int] = {}
        self.others = 0

    def add(self, new: Mapping[ServicePortKey, int], known: Collection[ServicePortKey]) -> None:
        """Add the new connections of one pass; `known` are the service ports that still exist. A service port without a
        series gets a free series, or replaces a port that has less than half as many new connections."""
        for key in self.busiest.keys() - known:
            self.others += self.busiest.pop(key)
        quietest = sorted(self.busiest, key=lambda key: new.get(key, 0), reverse=True)
        for key, count in sorted(new.items(), key=lambda item: -item[1]):
            if key in self.busiest:
                self.busiest[key] += count
            elif len(self.busiest) < TOP:
                self.busiest[key] = count
            elif quietest and 2 * new.get(quietest[-1], 0) < count:
                # The replaced port comes later in this order, so its new connections are then added to `others`.
                self.others += self.busiest.pop(quietest.pop())
                self.busiest[key] = count
            else:
                self.others += count


class ConnectionMetrics:
    """The metrics of all families. All series of one family are updated together."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._series: MetricFamily[CounterMetric] = registry.counter(
            "kubeproxy_service_new_connections_total",
            f"New connections of the {TOP} busiest service ports of each family; the series without a name is the sum"
            " of all other service ports (not in the Go kube-proxy)",
            *("namespace", "service", "port", "protocol", "ip_family"),
        )
        self._age = registry.gauge(
            "kubeproxy_service_new_connections_read_timestamp_seconds",
            "Time of the last reading of new connections from the kernel (not in the Go kube-proxy)",
            "ip_family",
        )
        self._totals: dict[Family, Totals] = {}

    def publish(self, family: Family, totals: Totals) -> None:
        """Set the metrics to the totals of a family."""
        self._totals[family] = totals
        self._series.clear()
        for each, found in self._totals.items():
            for key, count in found.busiest.items():
                labels = key.namespace, key.name, key.port_name, PROTOCOL_NAMES.get(key.protocol, ""), each.label
                self._series.labels(*labels).inc(count)
            self._series.labels("", "", "", "", each.label).inc(found.others)
        self._age.labels(family.label).set(time.time())


class Counting:
    """Reads all counters of one family repeatedly, in short turns. Each lookup of an element takes 7 us."""

    def __init__(self, family: Family, read: Read, metrics: ConnectionMetrics) -> None:
        self._family = family
        self._read = read
        self._metrics = metrics
        self._totals = Totals()
        self._placed: Mapping[ServiceName, Sequence[Placed]] = {}
        self._seen: dict[tuple[str, bytes], ElementCount] = {}
        self._pass: Iterator[None] = iter(())
        self._next = 0.0

    def step(self, placed: Mapping[ServiceName, Sequence[Placed]]) -> None:
        """Continue a pass over the counters, or begin a pass if it is due; `placed` is the content of the table."""
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
                # The table may be missing; a resync then creates it.
                log.debug("Cannot read the counters of connections error=%r", str(error))
                self._pass = iter(())
                return
            now = time.monotonic()

    def _over_all(self) -> Iterator[None]:
        seen: dict[tuple[str, bytes], ElementCount] = {}
        new: Counts[ServicePortKey] = Counts()
        asked: dict[str, list[tuple[bytes, ServicePortKey]]] = {name: [] for name in COUNTED_MAPS}
        for number, service in enumerate(list(self._placed.values())):
            if number % COUNTED_AT_ONCE == 0:
                yield
            for item in service:
                for name, key, series in _elements(item):
                    asked[name].append((key, series))
            for name, elements in asked.items():
                while len(elements) >= COUNTED_AT_ONCE:
                    self._count(name, elements[:COUNTED_AT_ONCE], seen, new)
                    del elements[:COUNTED_AT_ONCE]
                    yield
        for name, elements in asked.items():
            self._count(name, elements, seen, new)
            yield
        self._seen = seen
        self._totals.add(new, {key for key in self._totals.busiest if self._is_there(key)})
        self._metrics.publish(self._family, self._totals)

    def _count(
        self,
        name: str,
        elements: Sequence[tuple[bytes, ServicePortKey]],
        seen: dict[tuple[str, bytes], ElementCount],
        new: Counts[ServicePortKey],
    ) -> None:
        """Store the counters of elements in `seen`, and add their increase since the earlier pass to `new`. If an
        element has a lower count or another endpoint than before, its whole count is added."""
        owners = dict(elements)
        for count in self._read(name, list(owners)) if owners else ():
            if count.packets:
                last, seen[name, count.key] = self._seen.get((name, count.key)), count
                known = last.packets if last is not None and last.data == count.data else 0
                new[owners[count.key]] += count.packets - (known if known <= count.packets else 0)

    def _is_there(self, key: ServicePortKey) -> bool:
        placed = [item.plan for item in self._placed.get((key.namespace, key.name), ())]
        return any(key == plan.key or (plan.port_ranges and key == _of_ranges(plan.key)) for plan in placed)
