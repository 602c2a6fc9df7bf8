"""NodePorts on loopback: this process accepts connections to 127.0.0.1 and ::1 and relays them to an endpoint.

Rules can translate IPv4 packets from loopback only if hosts on the link can reach loopback too (route_localnet,
kubernetes issue 90259), and cannot translate IPv6 packets from loopback. Therefore TCP is relayed, and the rules refuse
and count other packets to NodePorts on loopback. A loopback network in nodePortAddresses enables the relay. Source:
KEP-6032 of Kubernetes 1.37."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from kubeproxy.backends.nftables.layout import COUNTERS, STICKY_SLOTS, TABLE
from kubeproxy.backends.nftables.render import repeated
from kubeproxy.backends.relay import tcp
from kubeproxy.backends.relay.datapath import SWITCH_INTERVAL, DataPath
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import LastingLink
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FrontendKind, Policy, Pool, ServiceName, ServicePlan, ServicePortKey
from kubeproxy.registry import CounterMetric, GaugeMetric, MetricRegistry

log = logging.getLogger("kubeproxy.nftables")

RETRY_SECONDS: Final = 10.0
"""Seconds between attempts to bind a port that another program uses."""

LOOPBACK: Final = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


class RelayTarget(NamedTuple):
    """Desired state of a listener: service port, endpoints, and session affinity in seconds (0 for none). With weights
    the pool lists an endpoint several times."""

    key: ServicePortKey
    pool: Pool
    affinity: int


class LocalhostRelay:
    """The listeners of one family, by NodePort. Not thread-safe; a separate thread relays the bytes."""

    def __init__(self, family: Family, path: DataPath, listeners: GaugeMetric, failures: CounterMetric) -> None:
        self._family = family
        self._path = path
        self._listeners = listeners
        self._failures = failures
        self._wanted: dict[ServiceName, dict[int, RelayTarget]] = {}
        self._open: dict[int, tcp.TcpListener] = {}
        self._missing: dict[int, RelayTarget] = {}
        self._again = 0.0

    def update(self, services: Iterable[tuple[ServiceName, Iterable[ServicePlan]]]) -> None:
        """Open, change and close the listeners of these Services. A port in use by another program is logged and
        retried later."""
        before: dict[int, RelayTarget] = {}
        after: dict[int, RelayTarget] = {}
        for name, plans in services:
            before |= self._wanted.pop(name, {})
            if wanted := dict(relay_targets(plans)):
                self._wanted[name] = wanted
                after |= wanted
        for port in before.keys() - after.keys():
            self._close(port)
        for port, target in after.items():
            if before.get(port) != target or port not in self._open:
                self._serve(port, target)
        self._listeners.set(len(self._open))

    def replace(self, services: Mapping[ServiceName, Iterable[ServicePlan]]) -> None:
        """Open, change and close listeners so that exactly these Services have listeners."""
        self.update([(name, ()) for name in self._wanted if name not in services])
        self.update(services.items())

    def upkeep(self) -> None:
        """Retry ports that could not be bound, at most once per RETRY_SECONDS."""
        if self._missing and time.monotonic() >= self._again:
            for port, target in list(self._missing.items()):
                self._serve(port, target)
            self._listeners.set(len(self._open))

    def close(self) -> None:
        """End all connections."""
        self._path.stop()

    def _serve(self, port: int, target: RelayTarget) -> None:
        listener = self._open.get(port)
        try:
            if listener is None or listener.key != target.key:
                self._close(port)
                listener = self._opened(port, target.key)
            self._path.call(lambda: listener.retarget(target.pool, target.affinity, target.pool))
        except (OSError, ApplyError) as error:
            self._note_failure(port, target, error)
            return
        self._missing.pop(port, None)

    def _opened(self, port: int, key: ServicePortKey) -> tcp.TcpListener:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.prepare(sock)
            sock.bind((LOOPBACK[self._family], port))
            sock.listen(tcp.BACKLOG)
        except OSError:
            sock.close()
            raise
        listener = self._open[port] = tcp.TcpListener(self._path, sock, key)
        self._path.call(listener.open)
        return listener

    def _close(self, port: int) -> None:
        self._missing.pop(port, None)
        listener = self._open.pop(port, None)
        if listener is not None:
            self._path.call(listener.close)

    def _note_failure(self, port: int, target: RelayTarget, error: Exception) -> None:
        if port not in self._missing:
            why = error.strerror if isinstance(error, OSError) else str(error)
            where = f"{LOOPBACK[self._family]} port {port}"
            log.error("%s: its NodePort cannot listen on %s: %s; does another program use it?", target.key, where, why)
            self._failures.inc()
        self._missing[port] = target
        self._again = time.monotonic() + RETRY_SECONDS


def relay_targets(plans: Iterable[ServicePlan]) -> Iterator[tuple[int, RelayTarget]]:
    """Yield each TCP NodePort with its target. NodePorts without endpoints are omitted; if externalTrafficPolicy is
    Local, only endpoints on this node are used."""
    for plan in plans:
        if plan.key.protocol != socket.IPPROTO_TCP:
            continue
        pool = plan.local if plan.policies.external is Policy.LOCAL else plan.cluster
        for frontend in plan.frontends if pool else ():
            if frontend.kind is FrontendKind.NODEPORT:
                weights = plan.weights(plan.policies.external)
                served = repeated(pool, weights, STICKY_SLOTS) if weights else pool
                yield frontend.port, RelayTarget(plan.key, served, plan.remembers)


def relays(registry: MetricRegistry, families: Iterable[Family]) -> dict[Family, LocalhostRelay]:
    """Return the relay of each family. All relays share one thread, which forwards the bytes."""
    listeners = registry.gauge(
        "kubeproxy_nftables_localhost_nodeport_listeners",
        "[ALPHA] Number of NodePorts that are relayed from loopback",
        "ip_family",
    )
    failures = registry.counter(
        "kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total",
        "[ALPHA] Number of NodePorts that could not be listened for on loopback",
        "ip_family",
    )
    sys.setswitchinterval(SWITCH_INTERVAL)
    path = DataPath.open(0.0)
    return {
        each: LocalhostRelay(each, path, listeners.labels(each.label), failures.labels(each.label)) for each in families
    }


def count_refusals(registry: MetricRegistry, families: Iterable[Family]) -> None:
    """Register the metrics of packets that the rules refuse on loopback NodePorts."""
    refusals = registry.counter(
        "kubeproxy_nftables_localhost_nodeport_rejected_packets_total",
        "[ALPHA] Number of packets rejected on localhost NodePorts: UDP and SCTP always, TCP where it is not relayed",
        "ip_family",
        "protocol",
    )
    for family in families:
        counters = TableCounters(family)
        for counter, protocol in COUNTERS.items():
            refusals.labels(family.label, protocol).follow(partial(counters.packets, counter))


class TableCounters(LastingLink):
    """The counters of one family, read once for all series of a scrape."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._packets: Mapping[str, int] = {}
        self._asked = set(COUNTERS)  # counters used since the last read; a second use of a counter starts a new read

    def packets(self, counter: str) -> float:
        """Return the packets of a counter; 0 if the table is missing."""
        if counter in self._asked:
            self._packets = {}
            with suppress(ApplyError), self.link() as link:
                self._packets = TableReader(self._family, TABLE, link).counter_packets()
            self._asked.clear()
        self._asked.add(counter)
        return self._packets.get(counter, 0)
