"""Services without local endpoints are counted by policy and family, as changes come and go."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

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
from kubeproxy.model.planner import Change
from kubeproxy.observe.events import ObjectReference
from kubeproxy.observe.metrics import Metrics
from kubeproxy.reporter import Reporter

POD = bytes([10, 244, 0, 1, 0, 80])
CLUSTER_IP = Frontend(FrontendKind.CLUSTER, bytes([10, 96, 0, 1, 6, 0, 80]))
NODE_PORT = Frontend(FrontendKind.NODEPORT, bytes([6, 0x75, 0x30]))
DROPPED, REJECTED = (Traffic(action, action, action) for action in (Action.DROP, Action.REJECT))


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
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), frontends=(CLUSTER_IP,)), 1, 0),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), frontends=(NODE_PORT,)), 1, 1),
        (meaning(Policies(Policy.LOCAL, Policy.LOCAL), traffic=REJECTED), 0, 0),
    ],
    ids=[
        "cluster",
        "internal",
        "external",
        "both",
        "endpoint here",
        "cluster IP only",
        "NodePort only",
        "no endpoints",
    ],
)
def test_services_without_local_endpoints_are_counted(plans, internal, external):
    metrics = Metrics()
    node = ObjectReference("Node", "node-a")
    reporter = Reporter(metrics, Mock(), Mock(), Mock(), Mock(), node)

    def counts():
        return [metrics.no_local_endpoints.labels(policy, "IPv4").value for policy in ("internal", "external")]

    reporter.settled([Change(("ns", "web"), NOTHING, plans)])
    assert counts() == [internal, external]
    reporter.settled([Change(("ns", "web"), plans, NOTHING)])
    assert counts() == [0, 0]
