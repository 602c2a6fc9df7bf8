"""Counters: changes, as the Go kube-proxy counts them, and Services without local endpoints."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from msgspec import structs

from kubeproxy.backends.mode import ForeignChange
from kubeproxy.engine.observer import Commit
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import (
    NOTHING,
    Action,
    Compiled,
    Frontend,
    FrontendKind,
    Policies,
    Policy,
    ServicePlan,
    ServicePortKey,
    Traffic,
)
from kubeproxy.model.planner import Change, Counts
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.report.reporter import Reporter
from support.cluster_objects import world

POD = bytes([10, 244, 0, 1, 0, 80])
CLUSTER_IP = Frontend(FrontendKind.CLUSTER, bytes([10, 96, 0, 1, 6, 0, 80]))
NODE_PORT = Frontend(FrontendKind.NODEPORT, bytes([6, 0x75, 0x30]))
DROPPED, REJECTED = (Traffic(action, action, action) for action in (Action.DROP, Action.REJECT))


def made(metrics: ProxyMetrics) -> Reporter:
    return Reporter(metrics, Mock(), Mock(), Mock(), Mock(), Mock())


def meaning(policies: Policies, *, local=(), traffic=DROPPED, frontends=(CLUSTER_IP, NODE_PORT)) -> Compiled:
    key = ServicePortKey("ns", "web", "", 6, Family.IPV4)
    return Compiled((ServicePlan(key, frontends, (POD,), local, policies, traffic, traffic, 0, (), (POD,)),))


@pytest.mark.parametrize(
    ("plans", "internal", "external"),
    [
        (meaning(Policies(Policy.CLUSTER, Policy.CLUSTER)), 0, 0),
        (meaning(Policies(Policy.LOCAL, Policy.CLUSTER)), 1, 0),
        (meaning(Policies(Policy.CLUSTER, Policy.LOCAL)), 0, 1),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL)), 1, 1),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), local=(POD,)), 0, 0),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), frontends=(CLUSTER_IP,)), 1, 1),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), frontends=(NODE_PORT,)), 1, 1),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), traffic=REJECTED), 0, 0),
    ],
    ids=[
        "cluster",
        "internal",
        "external",
        "both",
        "endpoint here",
        "a load balancer without an address",
        "NodePort only",
        "no endpoints",
    ],
)
def test_services_without_local_endpoints_are_counted(plans, internal, external):
    metrics = ProxyMetrics()
    reporter = made(metrics)

    def counts():
        return [metrics.no_local_endpoints.labels(policy, "IPv4").value for policy in ("internal", "external")]

    reporter.settled([Change(("ns", "web"), NOTHING, plans)])
    assert counts() == [internal, external]
    reporter.settled([Change(("ns", "web"), plans, NOTHING)])
    assert counts() == [0, 0]


@pytest.mark.parametrize(("families", "services"), [((Family.IPV4,), 3), ((Family.IPV4, Family.IPV6), 6)])
def test_changes_count_in_each_family_as_in_the_go_kube_proxy(families, services):
    """A slice belongs to one family only."""
    metrics = ProxyMetrics()
    reporter = made(metrics)
    reporter.world(world(families=families))
    reporter.counted(Counts(3, 5), Counts(1, 2))
    assert (metrics.service_changes.value, metrics.endpoint_changes.value) == (services, 5)
    assert (metrics.service_changes_pending.value, metrics.endpoint_changes_pending.value) == (1, 2)


def test_all_objects_count_again_with_every_resync():
    metrics = ProxyMetrics()
    reporter = made(metrics)
    reporter.world(world())
    asked = []

    def objects() -> Counts:
        if len(asked) == 2:
            raise EOFError
        asked.append(True)
        return Counts(10, 20)

    with pytest.raises(EOFError):
        asyncio.run(reporter.count_resyncs(0.0, objects))
    assert (metrics.service_changes.value, metrics.endpoint_changes.value) == (40, 40)


TWO_PORTS = Compiled(
    tuple(
        ServicePlan(
            ServicePortKey("ns", "web", port, 6, family),
            (CLUSTER_IP,),
            pool,
            local,
            Policies(Policy.CLUSTER, Policy.CLUSTER),
            traffic,
            traffic,
            0,
            (),
            pool,
        )
        for family, port, pool, local, traffic in (
            (Family.IPV4, "a", (POD, POD), (), DROPPED),
            (Family.IPV4, "b", (), (POD,), DROPPED),
            (Family.IPV6, "a", (), (), REJECTED),
            (Family.IPV6, "b", (), (), REJECTED),
        )
    )
)


def test_services_and_endpoints_are_counted_with_each_change():
    metrics = ProxyMetrics()
    reporter = made(metrics)
    own = metrics.own

    def counts(label):
        return [family.labels(label).value for family in (own.services, own.endpoints, own.without_endpoints)]

    reporter.world(world())
    assert b'kubeproxy_services{ip_family="IPv6"} 0\n' in metrics.render()
    reporter.settled([Change(("ns", "web"), NOTHING, TWO_PORTS)])
    assert (counts("IPv4"), counts("IPv6")) == ([1, 3, 0], [1, 0, 1])
    reporter.settled([Change(("ns", "web"), TWO_PORTS, TWO_PORTS), Change(("ns", "x"), NOTHING, NOTHING)])
    assert (counts("IPv4"), counts("IPv6")) == ([1, 3, 0], [1, 0, 1])
    reporter.settled([Change(("ns", "web"), TWO_PORTS, NOTHING)])
    assert (counts("IPv4"), counts("IPv6")) == ([0, 0, 0], [0, 0, 0])


def test_repairs_are_counted():
    metrics = ProxyMetrics()
    reporter = made(metrics)
    assert metrics.own.repairs.value == 0
    reporter.noticed(ForeignChange("rules were changed"))
    assert metrics.own.repairs.value == 1


def test_a_retry_counts_as_queued_unless_a_change_was_queued_before():
    """So the alert about pending changes also fires for a repair that the kernel refuses."""
    metrics = ProxyMetrics()
    reporter = made(metrics)
    queued, synced = metrics.last_queued.labels("IPv4"), metrics.last_sync.labels("IPv4")
    reporter.queued([Family.IPV4])
    reporter.committed(Commit(Family.IPV4))
    assert queued.value <= synced.value
    reporter.refused(Family.IPV4, ApplyError("owned by another program"))
    since = queued.value
    assert since > synced.value
    reporter.refused(Family.IPV4, ApplyError("owned by another program"))
    assert queued.value == since
    reporter.committed(Commit(Family.IPV4))
    assert queued.value <= synced.value


def test_ejections_are_counted_and_recorded_as_events() -> None:
    metrics = ProxyMetrics()
    reporter = made(metrics)
    reporter.journal.engine.planner.ejections.reasons = lambda plan: dict.fromkeys(plan.ejected, "connection refused")
    whole = meaning(Policies(Policy.CLUSTER, Policy.CLUSTER))
    (plan,) = whole.plans
    other = bytes([10, 244, 0, 2, 0, 80])
    both = structs.replace(whole, plans=(structs.replace(plan, cluster=(POD, other), ejected=()),))
    one = structs.replace(whole, plans=(structs.replace(plan, cluster=(other,), ejected=(POD,)),))
    lost = structs.replace(whole, plans=(structs.replace(plan, cluster=(other,), ejected=()),))
    shown = []
    for before, after in ((NOTHING, both), (both, one), (one, both), (both, one), (one, lost)):
        reporter.settled([Change(("ns", "web"), before, after, "uid-of-web")])
        shown.append(metrics.own.ejected.labels("IPv4").value)
    assert shown == [0, 1, 0, 1, 0]
    assert metrics.own.ejections.labels("IPv4").value == 2
    events = [call.args for call in reporter.events.record.call_args_list]
    assert [reason for _, _, reason, _, _ in events] == ["EndpointEjected", "EndpointReturned", "EndpointEjected"]
    assert events[0][0].name == "web"
    assert events[0][4] == (
        "endpoint 10.244.0.1:80/TCP does not answer (connection refused), and gets no new connections from this node"
    )
