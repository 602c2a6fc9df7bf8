"""Tracked UDP flows that a change made wrong: which they are, and when they are removed.

What a flow is, and how the kernel removes it, lives in kernel/conntrack/udp_flows.py. Services that lost all
endpoints, or are gone, count as having none. Source: docs/reference.md "Conntrack clean-up".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from kubeproxy.engine.turns import to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Conntrack, Endpoints, Translation
from kubeproxy.model.addresses import PORT_BYTES, Family
from kubeproxy.model.plan import Compiled, Frontend, FrontendKind, Globals, ServiceName, ServicePlan, ServicePortKey
from kubeproxy.model.planner import Change
from kubeproxy.report.metrics import ProxyMetrics

log = logging.getLogger("kubeproxy.flows")

UDP = 17

LONGEST_PAUSE = 5.0
SECOND_LOOK = 0.5
"""Seconds after which what changed is looked for once more: a packet that was on its way through the kernel when the
rules changed is tracked, with the old endpoint, only when it leaves."""

RETRY = 10.0
"""Seconds after which flows are looked for again that could not be removed; the next change does so at once."""

MOST_REMEMBERED = 1 << 16
"""Frontends whose flows are looked for again; beyond it the first are forgotten: some kernels never remove any, as
those without nf_conntrack_netlink."""

MOST_LOST = 100
"""Endpoints of a frontend that are told apart then; beyond it any may be wrong that does not serve."""

UNTRANSLATED = b""
"""Stands for the frontend itself among the endpoints that a flow may still go to."""

NOTHING_LOST: Endpoints = frozenset()

PortsOf = Callable[[ServicePortKey], Collection[int]]
"""Returns the ports of this proxy to which the flows of a service port go now."""


class Ports(frozenset[bytes]):
    """Endpoints (packed) of which the port alone is known, as two bytes: an address of this node comes before it."""

    def __contains__(self, endpoint: object) -> bool:
        return isinstance(endpoint, bytes) and super().__contains__(endpoint[-2:])


class Key(NamedTuple):
    """A UDP frontend: its packed address (b'' for a NodePort) and its port."""

    address: bytes
    port: int


class Suspects(NamedTuple):
    """Flows to look for: those to one frontend that go to an endpoint which is `lost`, or, if that is None, to any
    that does not serve it now.
    """

    serving: Endpoints
    lost: Endpoints | None


Looks = dict[Key, Suspects]


def joined(looks: Iterable[Looks]) -> Looks:
    """Return several looks as one; all know what is serving now."""
    found: Looks = {}
    for look in looks:
        for key, (serving, lost) in look.items():
            other = found[key].lost if key in found else NOTHING_LOST
            found[key] = Suspects(serving, None if lost is None or other is None else lost | other)
    return found


def remembered(wanted: Looks, fresh: Looks) -> Looks:
    """Return what could not be removed together with what is new, bounded."""
    found = joined((wanted, fresh))
    for key in list(found)[: max(0, len(found) - MOST_REMEMBERED)]:
        del found[key]
    for key, (serving, lost) in found.items():
        if lost is not None and len(lost) > MOST_LOST:
            found[key] = Suspects(serving, None)
    return found


def suspects(changes: Sequence[Change], family: Family, *, certain: bool) -> Looks:
    """Return the UDP frontends that changes concern, and which flows to them they made wrong.

    A flow goes to an endpoint that served when it began, so one that is added makes nothing wrong, and one that goes
    does. Flows went untranslated when nothing translated them: before a frontend appeared; and in the very moment in
    which a frontend begins to serve somebody, or ends to. What is refused is not tracked, but a packet passes the rules
    that translate first and those that refuse later (in iptables mode another transaction may come in between, in
    nftables mode each hook sees the ruleset as it is by then): it may meet neither. Unless it is `certain` that the
    kernel had what changed, any flow may be wrong.
    """
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
    """Return the same looks where flows go to listeners of the proxy: wrong are those that go to none that is open.

    Endpoints that go make none wrong, as the listener leaves them; only what goes elsewhere, or to nobody, does. The
    port of a listener that closed may become that of another service port, so they are told by theirs.
    """
    open_now: dict[Key, set[bytes]] = {key: set() for key in found}
    for key, service_port in _keys((change.after for change in changes), family):
        open_now[key] |= {PORT_BYTES[port] for port in ports_of(service_port)}
    rerouted = [change for change in changes if _routes(change.before) != _routes(change.after)]
    moved = {key for change in rerouted for key, _ in _keys((change.before, change.after), family)}
    return {
        key: Suspects(
            Ports(open_now[key]), None if lost is None or UNTRANSLATED in lost or key in moved else NOTHING_LOST
        )
        for key, (_, lost) in found.items()
    }


def _routes(compiled: Compiled) -> list[object]:
    """Return what decides to which listeners flows go."""
    return [(plan.key, plan.internal, plan.external) for plan in compiled.plans]


class _Frontend(NamedTuple):
    """What a frontend's flows may go to, and whose are translated: by origin (pod, node, outside) and source range."""

    serving: Endpoints
    clients: tuple[object, ...]


_NOBODY: Final = _Frontend(NOTHING_LOST, ())


def _frontends(compiled: Iterable[Compiled], family: Family) -> dict[Key, _Frontend]:
    found: dict[Key, _Frontend] = {}
    for plan in _udp_plans(compiled, family):
        endpoints = frozenset(plan.serving)
        for frontend in plan.frontends:
            sources = plan.source_ranges if frontend.kind is FrontendKind.LOADBALANCER else None
            clients = *(action.forwards for action in plan.traffic(frontend)), sources
            found[key_of(frontend)] = _Frontend(endpoints, clients)
    return found


def key_of(frontend: Frontend) -> Key:
    """Return by what flows to a frontend are known."""
    return Key(b"" if frontend.kind is FrontendKind.NODEPORT else frontend.address, frontend.port)


def _keys(compiled: Iterable[Compiled], family: Family) -> Iterator[tuple[Key, ServicePortKey]]:
    for plan in _udp_plans(compiled, family):
        yield from ((key_of(frontend), plan.key) for frontend in plan.frontends)


def _udp_plans(compiled: Iterable[Compiled], family: Family) -> Iterator[ServicePlan]:
    for entry in compiled:
        yield from (plan for plan in entry.plans if plan.key.protocol == UDP and plan.key.family is family)


def translations(wanted: Mapping[Key, Suspects], node_addresses: Iterable[bytes]) -> list[Translation] | None:
    """Return exactly the flows that are wrong, None when that takes a look at all flows to these frontends."""
    found: list[Translation] = []
    addresses = list(node_addresses)
    for key, (serving, lost) in wanted.items():
        if lost is None:
            return None
        for address in (key.address,) if key.address else addresses:
            itself = address + PORT_BYTES[key.port]
            found += (Translation(itself, endpoint or itself) for endpoint in lost - serving)
    return found


class _Now(Mapping[bytes, Endpoints]):
    """Who serves frontends at the moment: that changes while the kernel's table is read, and flows to it begin."""

    def __init__(self, wanted: Mapping[Key, Suspects], keys: Mapping[bytes, Key]) -> None:
        self._wanted, self._keys = wanted, keys

    def __getitem__(self, name: bytes) -> Endpoints:
        return self._wanted[self._keys[name]].serving

    def keys(self) -> KeysView[bytes]:
        """Return the frontends; each flow that is read is looked up here."""
        return self._keys.keys()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class FlowCleaner:
    """Removes tracked UDP flows that a change made wrong, off the event loop, one run at a time.

    Where flows of a family go to listeners of the proxy instead of the endpoints themselves (`relays`, as in userspace
    mode), those are wrong that go to none that is open for their service port: a listener itself leaves endpoints that
    serve no more.
    """

    def __init__(
        self,
        metrics: ProxyMetrics,
        families: Sequence[Family],
        local_addresses: Callable[[], Mapping[Family, Iterable[bytes]]],
        conntrack: Conntrack | None = None,
        *,
        relays: Mapping[Family, PortsOf] = MappingProxyType({}),
    ) -> None:
        self._metrics = metrics
        self._relays = relays
        self._conntrack = conntrack or Conntrack()
        self._local_addresses = local_addresses
        self._first: dict[Family, Looks] = {family: {} for family in families}
        self._second: dict[Family, deque[tuple[float, Looks]]] = {family: deque() for family in families}
        self._underway: dict[Family, Looks] = {family: {} for family in families}
        self._nodeport_ips: dict[Family, tuple[bytes, ...] | None] = dict.fromkeys(families, ())
        self._wake = asyncio.Event()

    def world(self, world: Globals) -> None:
        """Take the addresses that NodePorts answer on."""
        for family in self._nodeport_ips:
            ours = world.of(family)
            self._nodeport_ips[family] = ours.nodeport_ips if ours is not None else ()

    def changed(self, changes: Sequence[Change], *, full: bool, families: Sequence[Family] | None = None) -> None:
        """Note what changed for UDP frontends, of some families or of all; the work is done by `run`.

        After a full sync nobody knows what the kernel had before: at a start, when a sync had failed half-way, or when
        another program took our rules away for a while. What went untranslated then stays so; `changes` has everything.
        """
        for family in families or tuple(self._first):
            first = self._first[family]
            fresh = suspects(changes, family, certain=not full)
            if ports_of := self._relays.get(family):
                fresh = relayed(fresh, changes, family, ports_of)
            for look in (first, self._underway[family], *(look for _, look in self._second[family])):
                look |= {key: look[key]._replace(serving=fresh[key].serving) for key in look.keys() & fresh.keys()}
            wrong = {key: found for key, found in fresh.items() if found.lost != NOTHING_LOST}
            if wrong:
                self._first[family] = joined((first, wrong))
                self._wake.set()

    def recheck(self, compiled: Mapping[ServiceName, Compiled]) -> None:
        """Look at all flows to UDP frontends once more: another proxy's rules led some of them until just now."""
        udp = [name for name, entry in compiled.items() if entry.has(UDP)]
        self.changed([Change(name, compiled[name], compiled[name]) for name in udp], full=True)

    async def run(self) -> None:
        """Clean whenever something changed, until cancelled."""
        loop = asyncio.get_running_loop()
        with self._conntrack:
            while True:
                await self._wake.wait()
                self._wake.clear()
                began = loop.time()
                cleaned: set[Family] = set()
                for family in self._first:
                    if wanted := self.due(family, began):
                        cleaned.add(family)
                        loop.call_later(SECOND_LOOK * 1.01, self._wake.set)  # timers may be a bit early
                        self._underway[family] = wanted
                        done = await self._clean(family, wanted)
                        self._underway[family] = {}
                        if not done:
                            self._first[family] = remembered(wanted, self._first[family])
                            loop.call_later(RETRY, self._wake.set)
                if any(self._first[family] for family in self._first.keys() - cleaned):
                    continue  # a family that was committed meanwhile, as the second one of a start, does not wait
                # A look at the kernel's whole table takes 9 ms at its usual size: a tenth of the time is enough.
                await asyncio.sleep(min(9 * (loop.time() - began), LONGEST_PAUSE))

    def due(self, family: Family, now: float) -> Looks:
        """Return what is to be looked for at `now`, in seconds, and note what is new in it for its second look."""
        first, self._first[family] = self._first[family], {}
        second = self._second[family]
        looks = [first]
        while second and second[0][0] <= now:
            looks.append(second.popleft()[1])
        if first:
            second.append((now + SECOND_LOOK, first))
        return joined(looks)

    async def _clean(self, family: Family, wanted: Mapping[Key, Suspects]) -> bool:
        """Remove what is wrong; return whether that was possible."""
        began = time.monotonic()
        try:
            deleted = await to_its_end(self._remove, family, wanted, self._nodeport_ips[family])
        except ApplyError as error:
            log.error("Cannot clean stale UDP flows family=%s error=%r", family.label, str(error))
            return False
        self._metrics.conntrack_duration.labels(family.label).observe(time.monotonic() - began)
        self._metrics.conntrack_deleted.labels(family.label).inc(deleted)
        if deleted:
            log.info("Removed stale UDP flows family=%s count=%d", family.label, deleted)
        return True

    def _remove(self, family: Family, wanted: Mapping[Key, Suspects], chosen: Sequence[bytes] | None) -> int:
        node_addresses = chosen if chosen is not None else tuple(self._local_addresses()[family])
        number: Literal[2, 10] = 2 if family is Family.IPV4 else 10
        exactly = translations(wanted, node_addresses)
        deleted = self._conntrack.forget(number, exactly, len(wanted)) if exactly is not None else None
        if deleted is not None:
            return deleted
        services = _Now(wanted, {target_of(key.address, UDP, key.port): key for key in wanted if key.address})
        nodeports = _Now(wanted, {PORT_BYTES[key.port]: key for key in wanted if not key.address})
        return self._conntrack.clean(number, services, nodeports, frozenset(node_addresses))
