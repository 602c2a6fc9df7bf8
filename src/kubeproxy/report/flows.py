"""Finds stale UDP flows, and removes them through kernel/conntrack/udp_flows.py. A stale flow is an entry of connection
tracking that a change of a Service made invalid. Source: docs/reference.md "Conntrack clean-up"."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from kubeproxy.engine.pacing import to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack, Endpoints, Translation
from kubeproxy.kernel.proc.processes import listening
from kubeproxy.model.addresses import PORT_BYTES, Family
from kubeproxy.model.plan import (
    Compiled,
    Frontend,
    FrontendKind,
    Globals,
    PortRange,
    ServiceName,
    ServicePlan,
    ServicePortKey,
)
from kubeproxy.model.planner import Change
from kubeproxy.report.metrics import ProxyMetrics

log = logging.getLogger("kubeproxy.flows")

UDP = 17

LONGEST_PAUSE = 5.0
SECOND_LOOK = 0.5
"""Seconds until the second search for a change's stale flows. While a change is written, the kernel may process a
packet by the old rules and add the packet's flow to connection tracking after the first search."""

ANSWER_TIME = 0.2
"""Seconds in which a removed endpoint may still answer before the proxy deletes its flows. The Go kube-proxy waits up
to a second."""

RETRY = 10.0  # seconds until a failed removal is repeated, if no change comes earlier
DISTURBED_PAUSE = 0.2  # seconds between attempts while `disturbed` (see FlowCleaner) returns True
MOST_REMEMBERED = 1 << 16
"""The maximum number of frontends for which a failed removal is repeated. If the module nf_conntrack_netlink is
missing, every removal fails."""

MOST_LOST = 100
"""The maximum number of lost endpoints stored per frontend. If a frontend has lost more endpoints, all endpoints that
do not serve count as lost."""

UNTRANSLATED = b""  # the endpoint of a flow without translation
NOTHING_LOST: Endpoints = frozenset()

PortsOf = Callable[[ServicePortKey], Collection[int]]
"""A function that returns the ports of this proxy's listeners for a service port."""


class Ports(frozenset[bytes]):
    """Contains every endpoint with one of these ports (two bytes each)."""

    def __contains__(self, endpoint: object) -> bool:
        return isinstance(endpoint, bytes) and super().__contains__(endpoint[-2:])


class AnyPort(frozenset[bytes]):
    """Contains every endpoint with one of these addresses, because a packet to a range of ports keeps its port."""

    def __contains__(self, endpoint: object) -> bool:
        return isinstance(endpoint, bytes) and super().__contains__(endpoint[:-2])

    def __or__(self, others: AbstractSet[object]) -> AnyPort:
        return AnyPort(each for each in (*self, *others) if isinstance(each, bytes))


class Key(NamedTuple):
    """A UDP frontend. `address` is packed, and b'' for a NodePort; `last` is the last port of a range, or 0 for a
    single port."""

    address: bytes
    port: int
    last: int = 0

    @property
    def ports(self) -> range:
        """All ports of the frontend."""
        return range(self.port, max(self.port, self.last) + 1)


FORMER: Final = Key(b"", 0)
"""Stands for all destinations that are no frontend: flows to them may lead to listeners of an earlier process."""


class Suspects(Struct):
    """Selects stale flows of a frontend: flows to the endpoints in `lost`, or to all endpoints outside `serving` if
    `lost` is None. A container of the serving endpoints, which may change while the kernel's table is read."""

    serving: Endpoints
    lost: Endpoints | None

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self.serving


Looks = dict[Key, Suspects]


def joined(looks: Iterable[Looks]) -> Looks:
    """Combine several searches into one; the `serving` of the last search applies."""
    found: Looks = {}
    for look in looks:
        for key, one in look.items():
            other = found[key].lost if key in found else NOTHING_LOST
            found[key] = Suspects(one.serving, None if one.lost is None or other is None else one.lost | other)
    return found


def remembered(wanted: Looks, fresh: Looks) -> Looks:
    """Combine the failed search `wanted` with the new search `fresh`, within MOST_REMEMBERED and MOST_LOST."""
    found = joined((wanted, fresh))
    for key in list(found)[: max(0, len(found) - MOST_REMEMBERED)]:
        del found[key]
    for one in found.values():
        if one.lost is not None and len(one.lost) > MOST_LOST:
            one.lost = None
    return found


def suspects(changes: Sequence[Change], family: Family, *, certain: bool) -> Looks:
    """Return a search for the flows of UDP frontends that these changes made stale.

    A translated flow becomes stale when its endpoint is removed. An untranslated flow becomes stale when its frontend
    is created, or when the origins or source ranges of the frontend's translated clients change. An untranslated flow
    may also begin during a change, because a packet passes the translating rules before the refusing rules, and the
    ruleset may change in between. `certain` means that the kernel had the state before the changes; otherwise every
    flow to an endpoint that does not serve counts as stale."""
    before = _frontends((change.before for change in changes), family)
    after = _frontends((change.after for change in changes), family)
    suspected: Looks = {}
    for key in before | after:
        earlier, now = before.get(key), after.get(key, _NOBODY)
        lost = frozenset({UNTRANSLATED}) if earlier is None else earlier.serving - now.serving
        if earlier is not None and key in after and earlier.clients != now.clients:
            lost |= {UNTRANSLATED}
        suspected[key] = Suspects(now.serving, lost if certain else None)
    return suspected


def relayed(found: Looks, changes: Sequence[Change], family: Family, ports_of: PortsOf) -> Looks:
    """Return the search for a mode with listeners, in which every flow that does not go to an open listener is stale.

    The removal of an endpoint makes no flow stale, because the listener stays open; a change of listeners makes flows
    stale. Each service port has its own set of ports, because another service port may reuse the port of a closed
    listener."""
    open_now: dict[Key, set[bytes]] = {key: set() for key in found}
    for frontend, plan in _udp_frontends((change.after for change in changes), family):
        open_now[key_of(frontend)] |= {PORT_BYTES[port] for port in ports_of(plan.key)}
    rerouted = [each for each in changes if _routes(each.before) != _routes(each.after)]
    sides = (side for each in rerouted for side in (each.before, each.after))
    moved = {key_of(frontend) for frontend, _ in _udp_frontends(sides, family)}
    lost = {
        key: None if one.lost is None or UNTRANSLATED in one.lost or key in moved else NOTHING_LOST
        for key, one in found.items()
    }
    return {key: Suspects(Ports(open_now[key]), lost[key]) for key in found}


def _routes(compiled: Compiled) -> list[object]:
    return [(plan.key, plan.internal, plan.external) for plan in compiled.plans]


class _Frontend(NamedTuple):
    """The serving endpoints of a frontend, and the origins and source ranges of the clients with translated flows."""

    serving: Endpoints
    clients: tuple[object, ...]


_NOBODY: Final = _Frontend(NOTHING_LOST, ())


def _frontends(compiled: Iterable[Compiled], family: Family) -> dict[Key, _Frontend]:
    found: dict[Key, _Frontend] = {}
    for frontend, plan in _udp_frontends(compiled, family):
        is_range = isinstance(frontend, PortRange)
        endpoints = AnyPort(one[:-2] for one in plan.serving) if is_range else frozenset(plan.serving)
        sources = plan.source_ranges if frontend.kind is FrontendKind.LOADBALANCER else None
        clients = *(action.forwards for action in plan.traffic(frontend)), sources
        found[key_of(frontend)] = _Frontend(endpoints, clients)
    return found


def key_of(frontend: Frontend) -> Key:
    """Return the key of a frontend's flows."""
    address = b"" if frontend.kind is FrontendKind.NODEPORT else frontend.address
    return Key(address, frontend.port, frontend.last if isinstance(frontend, PortRange) else 0)


def _udp_frontends(compiled: Iterable[Compiled], family: Family) -> Iterator[tuple[Frontend, ServicePlan]]:
    for plan in (plan for entry in compiled for plan in entry.plans if plan.key.family is family):
        if plan.key.protocol == UDP or plan.port_ranges:
            yield from ((frontend, plan) for frontend in plan.all_frontends if frontend.protocol == UDP)


def translations(wanted: Mapping[Key, Suspects], node_addresses: Iterable[bytes]) -> list[Translation] | None:
    """Return the translations of the stale flows, or None if the caller must search all flows to these frontends."""
    found: list[Translation] = []
    addresses = list(node_addresses)
    for key, one in wanted.items():
        if one.lost is None or key.last:
            return None
        for address in (key.address,) if key.address else addresses:
            itself = address + PORT_BYTES[key.port]
            found += (Translation(itself, endpoint or itself) for endpoint in one.lost - one.serving)
    return found


class FlowCleaner:
    """Removes stale UDP flows in a thread, one run at a time. `relays` contains the families with listeners.

    The cleaner waits during a full sync, from a refusal until the next commit, and while `disturbed` returns True for
    the family. In these periods another kube-proxy may have written newer plans, and a flow that is stale by this
    proxy's plans may be valid."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        families: Sequence[Family],
        local_addresses: Callable[[], Mapping[Family, Iterable[bytes]]],
        conntrack: Conntrack | None = None,
        *,
        relays: Mapping[Family, PortsOf] = MappingProxyType({}),
        disturbed: Mapping[Family, Callable[[], bool]] = MappingProxyType({}),
    ) -> None:
        self._metrics = metrics
        self._relays = relays
        self._disturbed = disturbed
        self._held: set[Family] = set()
        self._conntrack = conntrack or Conntrack()
        self._local_addresses = local_addresses
        self._first: dict[Family, Looks] = {family: {} for family in families}
        self._second: dict[Family, deque[tuple[float, Looks]]] = {family: deque() for family in families}
        self._underway: dict[Family, Looks] = {family: {} for family in families}
        self._nodeport_ips: dict[Family, tuple[bytes, ...] | None] = dict.fromkeys(families, ())
        self._wake = asyncio.Event()

    def world(self, world: Globals) -> None:
        """Set the addresses on which NodePorts answer."""
        for family in self._nodeport_ips:
            ours = world.of(family)
            self._nodeport_ips[family] = ours.nodeport_ips if ours is not None else ()

    def changed(self, changes: Sequence[Change], *, full: bool, families: Sequence[Family] | None = None) -> None:
        """Record changes of UDP frontends in some or all families, for `run`.

        `full` means that the commit was a full sync, that `changes` contains all Services, and that the state of the
        kernel before the sync is unknown."""
        for family in families or tuple(self._first):
            self._held.discard(family)
            first = self._first[family]
            fresh = suspects(changes, family, certain=not full)
            if ports_of := self._relays.get(family):
                fresh = relayed(fresh, changes, family, ports_of)
            underway, later = self._underway[family], [look for _, look in self._second[family]]
            for look in (first, underway, *later):
                # In the search that is under way, a deleted frontend keeps its serving endpoints: its ports may now
                # belong to a new range of ports, and this search does not contain the range.
                for key in look.keys() & fresh.keys():
                    if fresh[key].serving or look is not underway:
                        look[key].serving = fresh[key].serving
            wrong = {key: found for key, found in fresh.items() if found.lost != NOTHING_LOST}
            for look in later:
                if FORMER in look or any(key.last for key in fresh):
                    look |= {key: found for key, found in wrong.items() if key not in look}
            if full and ports_of:
                wrong[FORMER] = Suspects(NOTHING_LOST, None)
            if wrong:
                self._first[family] = joined((first, wrong))
                self._wake.set()

    def hold(self, family: Family) -> None:
        """Remove no flows of a family until its next commit."""
        self._held.add(family)

    def committing(self, family: Family, changes: Sequence[Change]) -> None:
        """Keep flows to endpoints that these changes add, because the kernel may use these endpoints before `changed`
        is called."""
        looks = (self._first[family], self._underway[family], *(look for _, look in self._second[family]))
        if family in self._relays or not any(looks):
            return
        coming = _frontends((change.after for change in changes), family)
        for look in looks:
            for key in look.keys() & coming.keys():
                look[key].serving |= coming[key].serving

    def recheck(self, compiled: Mapping[ServiceName, Compiled]) -> None:
        """Check all flows to UDP frontends again after the removal of another proxy's rules."""
        udp = [name for name, entry in compiled.items() if entry.has(UDP)]
        self.changed([Change(name, compiled[name], compiled[name]) for name in udp], full=True)

    async def run(self) -> None:
        """Remove stale flows after each change, until cancelled."""
        loop = asyncio.get_running_loop()
        with self._conntrack:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._may_answer():
                    await asyncio.sleep(ANSWER_TIME)
                began = loop.time()
                cleaned: set[Family] = set()
                for family in self._first:
                    if wanted := self.due(family, began):
                        cleaned.add(family)
                        loop.call_later(SECOND_LOOK * 1.01, self._wake.set)  # timers may fire early
                        self._underway[family] = wanted
                        again = await self._clean(family, wanted)
                        self._underway[family] = {}
                        if again:
                            self._first[family] = remembered(wanted, self._first[family])
                            loop.call_later(again, self._wake.set)
                if any(self._first[family] for family in self._first.keys() - cleaned):
                    continue  # another family has just committed
                # Reading a table of the usual size takes 9 ms. The pause limits reading to a tenth of the time.
                await asyncio.sleep(min(9 * (loop.time() - began), LONGEST_PAUSE))

    def _may_answer(self) -> bool:
        lost = [look.lost for first in self._first.values() for look in first.values()]
        return bool(lost) and all(found is not None and UNTRANSLATED not in found for found in lost)

    def due(self, family: Family, now: float) -> Looks:
        """Return the searches that are due at `now` (seconds), and schedule the repetition of new searches after
        SECOND_LOOK."""
        first, self._first[family] = self._first[family], {}
        second = self._second[family]
        looks = [first]
        while second and second[0][0] <= now:
            looks.append(second.popleft()[1])
        if first:
            second.append((now + SECOND_LOOK, first))
        return joined(looks)

    async def _clean(self, family: Family, wanted: Mapping[Key, Suspects]) -> float:
        """Remove stale flows; return the seconds until the next attempt, 0 after success."""
        began = time.monotonic()
        try:
            deleted = await to_its_end(self._remove, family, wanted, self._nodeport_ips[family])
        except ApplyError as error:
            log.error("Cannot clean stale UDP flows family=%s error=%r", family.label, str(error))
            return RETRY
        if deleted is None:
            return DISTURBED_PAUSE
        self._metrics.conntrack_duration.labels(family.label).observe(time.monotonic() - began)
        self._metrics.conntrack_deleted.labels(family.label).inc(deleted)
        if deleted:
            log.info("Removed stale UDP flows family=%s count=%d", family.label, deleted)
        return 0.0

    def _is_certain(self, family: Family) -> bool:
        disturbed = self._disturbed.get(family)
        return family not in self._held and not (disturbed and disturbed())

    def _remove(self, family: Family, wanted: Mapping[Key, Suspects], chosen: Sequence[bytes] | None) -> int | None:
        """Remove stale flows and return their number; return None if the caller must repeat the removal later."""
        certain = partial(self._is_certain, family)
        if not certain():
            return None
        node_addresses = chosen if chosen is not None else tuple(self._local_addresses()[family])
        number: Literal[2, 10] = 2 if family is Family.IPV4 else 10
        exactly = translations(wanted, node_addresses)
        deleted = self._conntrack.forget(number, exactly, len(wanted)) if exactly is not None else None
        if deleted is not None:
            return deleted
        # Single ports take precedence over ranges, and present frontends over former frontends.
        first = sorted((key for key in wanted if key.address), key=lambda key: (bool(wanted[key].serving), -key.last))
        services = {target_of(key.address, UDP, port): wanted[key] for key in first for port in key.ports}
        nodeports = {PORT_BYTES[key.port]: found for key, found in wanted.items() if not key.address}
        former: Callable[[bytes], bool] | None = None
        if FORMER in wanted:
            ours = NOTHING_LOST.union(*(found.serving for found in wanted.values()))
            local = self._local_addresses()[family]
            bound = {PORT_BYTES[one.port] for each in Family for one in listening(each, UDP)}

            def former(server: bytes) -> bool:  # another program's redirection to its own socket is not stale
                return server[:-2] in local and (server[-2:] in ours or server[-2:] not in bound)

        return self._conntrack.clean(number, services, nodeports, frozenset(node_addresses), certain, former)
