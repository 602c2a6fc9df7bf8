"""The engine's observer: updates metrics, health, Events and health check ports, and removes stale UDP flows. It never
changes rules."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from kubeproxy.backends.mode import ForeignChange
from kubeproxy.engine.observer import Commit, Notice, ServiceProblem
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, destination_text, unpack
from kubeproxy.model.objects import TYPES, VERSIONS
from kubeproxy.model.plan import Compiled, Globals, HealthCheck, Policy, ServiceName, ServicePlan, ServicePortKey
from kubeproxy.model.planner import Change, Counts
from kubeproxy.report.events import EventRecorder, ObjectReference
from kubeproxy.report.flows import FlowCleaner
from kubeproxy.report.health import HealthCheckAddress, LocalEndpoints, ProxyHealth, ServiceHealth
from kubeproxy.report.journal import Journal
from kubeproxy.report.logs import level
from kubeproxy.report.metrics import ProxyMetrics

log = logging.getLogger("kubeproxy.reporter")

EACH_SYNC = level(3)
EACH_SERVICE = level(4)


class Reporter(Struct):
    """Implements observer.Observer, and passes changes and problems on to `journal`."""

    # ruff: noqa: D102 - Observer documents its methods

    metrics: ProxyMetrics
    health: ProxyHealth
    service_health: ServiceHealth
    events: EventRecorder
    flows: FlowCleaner
    journal: Journal
    _families: int = 1  # the number of families; 1 until the first call of `world`
    _checks: dict[ServiceName, HealthCheck] = {}

    def queued(self, families: Sequence[Family]) -> None:
        now = time.time()
        for family in families:
            self.metrics.last_queued.labels(family.label).set(now)
            self.health.queued(family.label)

    def counted(self, fresh: Counts, pending: Counts) -> None:
        metrics = self.metrics
        self._count(fresh)
        metrics.service_changes_pending.set(pending.services)
        metrics.endpoint_changes_pending.set(pending.endpoints)

    async def count_resyncs(self, period: float, objects: Callable[[], Counts]) -> None:
        """Count all objects as changed every configSyncPeriod, like the informers of the Go kube-proxy."""
        while True:
            await asyncio.sleep(period)
            self._count(objects())

    def _count(self, changed: Counts) -> None:
        """Count changes. As in the Go kube-proxy, a Service counts in every family, and an EndpointSlice only in its
        own family."""
        self.metrics.service_changes.inc(changed.services * self._families)
        self.metrics.endpoint_changes.inc(changed.endpoints)

    def committing(self, family: Family, changes: Sequence[Change] | None) -> None:
        if changes is None:
            self.flows.hold(family)
        else:
            self.flows.committing(family, changes)

    def committed(self, commit: Commit) -> None:
        label, metrics, seconds = commit.family.label, self.metrics, commit.seconds
        if log.isEnabledFor(EACH_SYNC):
            log.log(EACH_SYNC, "Committed family=%s full=%s seconds=%.6f", label, commit.full, seconds)
        if commit.full:
            log.info("Committed everything family=%s services=%d seconds=%.3f", label, commit.services, seconds)
        metrics.sync_duration.labels(label).observe(seconds)
        (metrics.sync_full_duration if commit.full else metrics.sync_partial_duration).labels(label).observe(seconds)
        metrics.last_sync.labels(label).set(time.time())
        self.health.updated(label)
        self.flows.changed(commit.changes, full=commit.everything, families=(commit.family,))
        for age in commit.ages:
            metrics.network_programming.labels(label).observe(age)

    def refused(self, family: Family, error: ApplyError) -> None:  # noqa: ARG002 - the engine logs the error
        for counter in self.metrics.refusals:
            counter.labels(family.label).inc()
        self.flows.hold(family)
        # A failed repair counts as a queued change, which makes the node unhealthy and fires the alert.
        self.health.queued(family.label)
        queued, synced = self.metrics.last_queued.labels(family.label), self.metrics.last_sync.labels(family.label)
        if queued.value <= synced.value:
            queued.set(time.time())
        self.journal.look()

    def settled(self, changes: Sequence[Change]) -> None:
        checks_changed = False
        for change in changes:
            if change.before.health != change.after.health:
                checks_changed = True
                if change.after.health is not None:
                    self._checks[change.name] = change.after.health
                else:
                    self._checks.pop(change.name, None)
            if (before := ejected(change.before)) != (after := ejected(change.after)):
                self._report_ejections(change, before, after)
            for compiled, step in ((change.before, -1), (change.after, 1)):
                self._count_services(compiled, step)
                for policy, family in _without_local(compiled):
                    self.metrics.no_local_endpoints.labels(policy, family.label).add(step)
        if checks_changed:
            self.service_health.sync(_ports(self._checks))
        if log.isEnabledFor(EACH_SERVICE):
            for change in changes:
                pools = [len(plan.cluster or plan.local) for plan in change.after.plans]
                log.log(EACH_SERVICE, "Settled service=%s endpoints=%s", "/".join(change.name), pools)
        self.journal.settled(changes)

    def _report_ejections(self, change: Change, before: Ejected, after: Ejected) -> None:
        regarding, own = service_reference(change.name, change.uid), self.metrics.own
        here = {(plan.key, one) for plan in change.after.plans for one in {*plan.cluster, *plan.local}}
        for key, endpoint in sorted(before.keys() ^ after.keys()):
            is_new, family = (key, endpoint) in after, key.family.label
            own.ejected.labels(family).add(1 if is_new else -1)
            what = f"{destination_text(endpoint)}/{PROTOCOL_NAMES[key.protocol]}"
            if is_new:
                own.ejections.labels(family).inc()
                reasons = self.journal.engine.planner.ejections.reasons(after[key, endpoint])
                note = (
                    f"endpoint {what} does not answer ({reasons[endpoint]}), and gets no new connections from this node"
                )
                self.events.record(regarding, "Warning", "EndpointEjected", "Ejecting", note)
                self.journal.unusable("/".join(change.name), note)
            elif (key, endpoint) in here:
                note = f"endpoint {what} gets new connections from this node again"
                self.events.record(regarding, "Normal", "EndpointReturned", "Returning", note)

    def _count_services(self, compiled: Compiled, step: int) -> None:
        own, counted, lacking = self.metrics.own, None, None
        for plan in compiled.plans:
            family = plan.key.family
            if family is not counted:
                counted = family
                own.services.labels(family.label).add(step)
            own.endpoints.labels(family.label).add(step * len(plan.cluster or plan.local))
            if family is not lacking and not plan.usable:
                lacking = family
                own.without_endpoints.labels(family.label).add(step)

    def noticed(self, notice: Notice) -> None:
        record = self.events.record
        if isinstance(notice, ForeignChange):
            self.journal.look()
            self.metrics.own.repairs.inc()
            self.events.on_node("Warning", "RulesChangedByOthers", notice.what, "Repairing")
        elif isinstance(notice, ServiceProblem):
            note = f"{notice.problem.field}: {notice.problem.reason}"
            regarding = service_reference(notice.service, notice.uid)
            record(regarding, "Warning", "UnusableServiceField", "Programming", note)
            self.journal.unusable("/".join(notice.service), note)
        else:
            kind, version = TYPES[notice.resource].__name__, VERSIONS[notice.resource]
            regarding = ObjectReference(kind, notice.name or "unnamed", notice.namespace, notice.uid, version)
            note = f"{notice.field or 'object'}: {notice.reason}"
            record(regarding, "Warning", "UnusableField", "Reading", note)
            self.journal.unusable("", f"{kind} {'/'.join(filter(None, (notice.namespace, notice.name)))}: {note}")

    def world(self, world: Globals) -> None:
        self._families, own = len(world.families), self.metrics.own
        addresses: dict[Family, list[str] | None] = {}
        for family, ours in world.parts.items():
            for policy in ("internal", "external"):
                self.metrics.no_local_endpoints.labels(policy, family.label)  # creates the series with 0
            for metric in (own.services, own.endpoints, own.without_endpoints):
                metric.labels(family.label)
            served = ours.health_check_ips
            addresses[family] = None if served is None else [unpack(ip) for ip in served]
        self.service_health.listen_on(addresses)
        self.flows.world(world)


Ejected = Mapping[tuple[ServicePortKey, bytes], ServicePlan]
"""The plan of each ejected endpoint, by the plan's key and the packed endpoint."""


def ejected(compiled: Compiled) -> Ejected:
    """Return the ejected endpoints of a Service."""
    return {(plan.key, one): plan for plan in compiled.plans if plan.ejected for one in plan.ejected}


def service_reference(name: ServiceName, uid: str) -> ObjectReference:
    """Return the reference to a Service for an Event."""
    return ObjectReference("Service", name[1], name[0], uid)


def _without_local(compiled: Compiled) -> Iterable[tuple[str, Family]]:
    for plan in compiled.plans:
        if plan.local or not plan.usable:
            continue
        if plan.policies.internal is Policy.LOCAL:
            yield "internal", plan.key.family
        if plan.policies.external is Policy.LOCAL:
            yield "external", plan.key.family


def _ports(checks: Mapping[ServiceName, HealthCheck]) -> dict[HealthCheckAddress, LocalEndpoints]:
    """Return the answer of each health check port. If two Services have the same port, the first Service by name gets
    it."""
    ports: dict[HealthCheckAddress, LocalEndpoints] = {}
    for (namespace, name), check in sorted(checks.items()):
        for family, count in check.counts:
            ports.setdefault(HealthCheckAddress(family, check.port), LocalEndpoints(namespace, name, count))
    return ports
