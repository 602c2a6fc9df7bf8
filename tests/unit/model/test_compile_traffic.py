"""The action for each kind of traffic, for every combination of policies, endpoints, detector and masqueradeAll.

Source: docs/reference.md "Service semantics"; kube-proxy v1.36 pkg/proxy/nftables (the jumps to its masquerade chain).
"""

import pytest

from kubeproxy.model.addresses import Family
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import Action, Detector, Traffic
from support.cluster_objects import dests, draining, endpoint, endpoint_slice, parsed, service, world
from support.compiled import compile_service

C, CM, L, LM = Action.CLUSTER, Action.CLUSTER_MASQUERADE, Action.LOCAL, Action.LOCAL_MASQUERADE
REJECT, DROP = Action.REJECT, Action.DROP

NEAR, FAR = endpoint("10.244.0.1", "node-a"), endpoint("10.244.1.1", "node-b")
ENDPOINTS = {
    "both": (NEAR, FAR),
    "near": (NEAR,),
    "far": (FAR,),
    "none": (),
    "unready": (endpoint("10.244.0.1", "node-a", ready=False), endpoint("10.244.1.1", ready=False)),
    "gone": (endpoint("10.244.0.1", "node-a", ready=False, serving=False, terminating=True),),
    "draining near": (draining("10.244.0.1", "node-a"),),
    "draining far": (draining("10.244.1.1"),),
    "draining near, ready far": (draining("10.244.0.1", "node-a"), FAR),
}
NONE_USABLE = {"none", "unready", "gone"}
NONE_NEAR = {"far", "draining far"}


def plan_of(endpoints, *, internal=None, external=None, detector=True, masquerade_all=False, **spec):
    spec.setdefault("external_ips", ["203.0.113.1"])
    subject = service(internal_traffic_policy=internal, external_traffic_policy=external, **spec)
    globals_ = world(detector=detector, masquerade_all=masquerade_all, families=[Family.IPV4])
    (plan,) = compile_service(subject, [parsed(*endpoints)], globals_).plans
    return plan


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", [False, True])
@pytest.mark.parametrize("which", ENDPOINTS)
@pytest.mark.parametrize("policy", [None, "", "Cluster"])
def test_internal_cluster_policy(policy, which, detector, masquerade_all):
    plan = plan_of(ENDPOINTS[which], internal=policy, detector=detector, masquerade_all=masquerade_all)
    if which in NONE_USABLE:
        expected = Traffic(REJECT, REJECT, REJECT)
    elif masquerade_all:
        expected = Traffic(CM, CM, CM)
    else:
        expected = Traffic(C, CM, CM) if detector else Traffic(C, C, C)
    assert plan.internal == expected


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", [False, True])
@pytest.mark.parametrize("which", ENDPOINTS)
@pytest.mark.parametrize("accessible", [False, True])
def test_internal_local_policy(which, detector, masquerade_all, accessible):
    addresses = ["203.0.113.1"] if accessible else []
    plan = plan_of(
        ENDPOINTS[which], internal="Local", detector=detector, masquerade_all=masquerade_all, external_ips=addresses
    )
    if which in NONE_USABLE:
        expected = Traffic(REJECT, REJECT, REJECT)
    elif which in NONE_NEAR:
        expected = Traffic(DROP, DROP, DROP)
    elif masquerade_all:
        expected = Traffic(LM, LM, LM)
    else:
        expected = Traffic(L, LM, LM) if detector else Traffic(L, L, L)
    assert plan.internal == expected


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", [False, True])
@pytest.mark.parametrize("internal", ["Cluster", "Local"])
@pytest.mark.parametrize("which", ENDPOINTS)
@pytest.mark.parametrize("policy", [None, "", "Cluster"])
def test_external_cluster_policy(policy, which, internal, detector, masquerade_all):
    plan = plan_of(
        ENDPOINTS[which], internal=internal, external=policy, detector=detector, masquerade_all=masquerade_all
    )
    expected = Traffic(REJECT, REJECT, REJECT) if which in NONE_USABLE else Traffic(CM, CM, CM)
    assert plan.external == expected


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", [False, True])
@pytest.mark.parametrize("internal", ["Cluster", "Local"])
@pytest.mark.parametrize("which", ENDPOINTS)
def test_external_local_policy_short_cuts_pods_and_the_node(which, internal, detector, masquerade_all):
    plan = plan_of(
        ENDPOINTS[which], internal=internal, external="Local", detector=detector, masquerade_all=masquerade_all
    )
    if which in NONE_USABLE:
        expected = Traffic(REJECT, REJECT, REJECT)
    else:
        outside = DROP if which in NONE_NEAR else L
        expected = Traffic(C if detector else outside, CM, outside)
    assert plan.external == expected


@pytest.mark.parametrize("kind", ["bridge", "prefix"])
def test_interface_detectors_recognise_pods_too(kind):
    plan = plan_of((NEAR, FAR), external="Local", detector=Detector(kind, "cni0"))
    assert plan.internal == Traffic(C, CM, CM)
    assert plan.external == Traffic(C, CM, L)


def test_each_family_has_its_own_detector_and_endpoints():
    globals_ = world()
    subject = service("web", "10.96.0.1", "fd00:10:96::1")
    v4, v6 = compile_service(subject, [parsed(FAR)], globals_).plans
    assert (v4.internal, v6.internal) == (Traffic(C, CM, CM), Traffic(REJECT, REJECT, REJECT))
    six = parse_slice(endpoint_slice(endpoint("fd00:10:244::1"), name="web-6", family="IPv6"))
    v4, v6 = compile_service(subject, [six, parsed(FAR)], globals_).plans
    assert v4.cluster == dests("10.244.1.1:8080")
    assert v6.cluster == dests("[fd00:10:244::1]:8080")


def test_a_frontend_finds_its_traffic():
    plan = plan_of((NEAR,), internal="Local", external="Cluster", ports=[ServicePort(port=80, node_port=30080)])
    governed = {f.kind.name: plan.traffic(f) for f in plan.frontends}
    assert governed == {"CLUSTER": plan.internal, "EXTERNAL": plan.external, "NODEPORT": plan.external}
    assert plan.internal != plan.external


@pytest.mark.parametrize(
    ("action", "forwards", "local"),
    [
        (C, True, False),
        (CM, True, False),
        (L, True, True),
        (LM, True, True),
        (REJECT, False, False),
        (DROP, False, False),
    ],
)
def test_actions_have_their_properties(action, forwards, local):
    assert (action.forwards, action.picks_local) == (forwards, local)
