"""The fix that `why` proposes for a connection without a Service: it names the object and the field to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.ask import why as why_module
from kubeproxy.ask.question import packet
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.ask.why import explain
from kubeproxy.backends import iptables
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.kernel.route import Address
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import Annotations, EndpointPort, NodeSpec, ServicePort, Taint
from kubeproxy.model.plan import Detector
from kubeproxy.model.world import TO_BE_DELETED_TAINT
from support.cluster_objects import HERE, NODE_IPS, endpoint, endpoint_slice, node_object, service, world
from support.snapshots import planner_of, snapshot

NODE_RANGE = f"{NODE_IPS[Family.IPV4]}/32"


@pytest.fixture(scope="module")
def subject() -> Snapshot:
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http", node_port=30080)])
    own = {Family.IPV4: [pack(NODE_IPS[Family.IPV4]) or b"", pack("10.244.0.1") or b""]}
    return snapshot(planner_of(world(), web), own)


@pytest.mark.parametrize(
    ("target", "fix"),
    [
        (
            "10.96.0.10:53/udp",
            "use a port of the Service (with /udp or /sctp unless it is TCP), or add 53/UDP to its spec.ports",
        ),
        (
            "127.0.0.1:30080",
            (
                "use an address of this node on which NodePorts answer, or set "
                "featureGates.KubeProxyNFTablesLocalhostNodePorts to true: TCP NodePorts then answer on 127.0.0.1 if "
                "nodePortAddresses contains localhost"
            ),
        ),
        (
            "10.244.0.1:30080",
            (
                "use an address on which NodePorts answer, or add its network to nodePortAddresses in the proxy's "
                "configuration beside the present ones, which otherwise cease to have NodePorts; the list holds for "
                "all nodes that share the configuration, so it needs networks with an address of each; see first what "
                "it changes on this node: `kube-proxy plan --nodeport-addresses "
                f"192.0.2.0/24,{NODE_IPS[Family.IPV6]}/128,10.244.0.0/16`"
            ),
        ),
    ],
)
def test_a_fix_names_the_field(subject, target, fix, monkeypatch):
    here = [Address(pack(text) or b"", bits, "eth0", 0) for text, bits in (("192.0.2.1", 24), ("10.244.0.1", 16))]
    monkeypatch.setattr(why_module, "local_addresses", lambda family: here if family is Family.IPV4 else [])
    assert explain(subject, packet(subject, "node", target)).why.fixes == (fix,)


def test_a_fix_keeps_the_configured_networks_of_nodeports(subject, monkeypatch):
    """Other nodes that share the configuration have other addresses in these networks."""
    monkeypatch.setattr(why_module, "local_addresses", lambda _: [])
    options = build_options(parse(["--nodeport-addresses=192.0.2.0/24,2001:db8::/32"]))
    configured = subject._replace(options=options)
    (fix,) = explain(configured, packet(configured, "node", "10.244.0.1:30080")).why.fixes
    assert fix.endswith("`kube-proxy plan --nodeport-addresses 192.0.2.0/24,2001:db8::/32,10.244.0.1/32`"), fix


@pytest.mark.parametrize("policy", ["Local", "Cluster"])
def test_a_closed_nodeport_at_an_address_without_nodeports_needs_another_address_too(policy):
    own, ports = pack(NODE_IPS[Family.IPV4]) or b"", [ServicePort(port=80, node_port=30080)]
    web = service("web", "10.96.0.10", ports=ports, type="NodePort", external_traffic_policy=policy)
    planner = planner_of(world(nodeports="none"), web)
    there = snapshot(planner, {Family.IPV4: [own]}, SimpleNamespace(name="iptables", habits=iptables.MODE.habits))
    address, *others = explain(there, packet(there, "198.51.100.9", f"{NODE_IPS[Family.IPV4]}:30080")).why.fixes
    assert (address.startswith("use an address on which NodePorts answer"), len(others)) == (True, 1)


@pytest.mark.parametrize(
    ("source", "allowed"), [("node", f"{NODE_IPS[Family.IPV4]}/32"), ("198.51.100.9", "198.51.100.9/32")]
)
def test_clients_outside_the_source_ranges_are_named_in_the_fix(source, allowed):
    guarded = service(type="LoadBalancer", ingress=["203.0.113.1"], load_balancer_source_ranges=["10.9.0.0/16"])
    planner = planner_of(world(), guarded, endpoint_slice(endpoint("10.1.0.7")))
    there = snapshot(planner, {Family.IPV4: [pack(NODE_IPS[Family.IPV4]) or b""]})
    why = explain(there, packet(there, source, "203.0.113.1:80")).why
    assert (why.outcome, why.fixes) == ("dropped", (f"add {allowed} to spec.loadBalancerSourceRanges",))


def test_a_pod_that_is_kept_out_is_not_let_in_by_its_own_address():
    guarded = service(type="LoadBalancer", ingress=["203.0.113.1"], load_balancer_source_ranges=[NODE_RANGE])
    pods = world(detector=Detector("network", "10.1.0.0/16"))
    planner = planner_of(pods, guarded, endpoint_slice(endpoint("10.1.0.7")))
    there = snapshot(planner, {Family.IPV4: [pack(NODE_IPS[Family.IPV4]) or b""]})
    why = explain(there, packet(there, "10.1.0.9", "203.0.113.1:80")).why
    (fix,) = why.fixes
    assert "cluster IP" in fix
    assert fix.endswith("add 10.1.0.0/16 to spec.loadBalancerSourceRanges")
    # The rules also admit the load balancer's own address from the node, but the field does not list it.
    (step,) = [step for step in why.steps if step.field == "spec.loadBalancerSourceRanges"]
    assert step.text == f"10.1.0.9 is not among the source ranges ({NODE_RANGE})"


def test_an_address_without_a_service_has_no_fix(subject):
    assert explain(subject, packet(subject, "node", "198.51.100.1:80")).why.fixes == ()


@pytest.mark.parametrize(
    ("node", "other", "source", "returns"),
    [
        (None, None, "10.244.0.7", False),
        (HERE, None, "10.244.0.7", True),
        (None, HERE, "10.244.0.7", True),  # the kernel has one element for each address
        (None, None, "10.244.0.8", True),
        (None, None, NODE_IPS[Family.IPV4], True),
    ],
)
def test_a_pod_without_a_node_name_does_not_reach_itself(node, other, source, returns):
    ends = [endpoint("10.244.0.7", node=node), endpoint(NODE_IPS[Family.IPV4], node=node)]
    objects = [service(), endpoint_slice(*ends, name="mine")]
    if other:
        objects.append(service("other", "10.96.0.77"))
        objects.append(endpoint_slice(endpoint("10.244.0.7", node=other), name="theirs", of="other"))
    there = snapshot(planner_of(world(), *objects), {Family.IPV4: [pack(NODE_IPS[Family.IPV4]) or b""]})
    why = explain(there, packet(there, source, "10.96.0.1:80")).why
    (end,) = [one for one in why.endpoints if one.address.startswith(source)] or why.endpoints[:1]
    fix = f"set endpoints[].nodeName: {HERE} for 10.244.0.7 in EndpointSlice default/mine"
    assert (why.outcome, end.returns, why.fixes) == ("forwarded", returns, () if returns else (fix,))


def test_a_service_without_slices_may_need_one_made_by_hand():
    there = snapshot(planner_of(world(), service()))
    (fix,) = explain(there, packet(there, "node", "10.96.0.1:80")).why.fixes
    made = "without spec.selector, create an EndpointSlice with the label kubernetes.io/service-name=web"
    assert ("compare spec.selector" in fix, fix.endswith(made)) == (True, True), fix


@pytest.mark.parametrize(("ranges", "noted"), [(["10.0.0.0/8"], True), (["2001:db8::/32"], False), (None, False)])
def test_source_ranges_of_the_other_family_alone_are_noted(ranges, noted):
    open_to_all = service("web", "fd00:96::1", type="LoadBalancer", ingress=["2001:db8::9"])
    open_to_all = replace(open_to_all, spec=replace(open_to_all.spec, load_balancer_source_ranges=ranges))
    ends = endpoint_slice(endpoint("fd00:10:244::7"), family="IPv6")
    there = snapshot(planner_of(world(), open_to_all, ends))
    why = explain(there, packet(there, "2001:db8::50", "[2001:db8::9]:80")).why
    assert why.outcome == "forwarded"
    assert any("no source range is IPv6: all IPv6 clients are admitted" in one.text for one in why.steps) is noted


LOCAL = {"type": "NodePort", "external_traffic_policy": "Local", "internal_traffic_policy": "Local"}
OWN = {Family.IPV4: [pack(NODE_IPS[Family.IPV4]), pack("10.244.0.1")]}


def test_an_endpoint_without_a_node_is_named_with_its_slice():
    planner = planner_of(world(), service(**LOCAL), endpoint_slice(endpoint("10.244.0.10", node=None)))
    there = snapshot(planner, OWN)
    why = explain(there, packet(there, "10.244.0.2", "10.96.0.1:80")).why
    assert [(one.address, one.field) for one in why.missing] == [("10.244.0.10:8080", "endpoints[].nodeName")]
    assert why.fixes == ("set nodeName of the endpoint 10.244.0.10 in EndpointSlice default/web-1",)


@pytest.mark.parametrize(("cidr", "said"), [("10.244.0.0/24", True), ("10.99.0.0/24", False)])
def test_a_pod_that_cluster_cidr_leaves_out_is_recognised_by_the_nodes_pod_cidrs(cidr, said):
    """Without this detector the rules do not use the pod networks, so no address of the node is in them."""
    base = world()
    narrow = replace(base, ipv4=replace(base.ipv4, detector=Detector("network", "10.244.128.0/17")))
    ports = [ServicePort(port=80, node_port=30080)]
    planner = planner_of(narrow, service(ports=ports, **LOCAL), endpoint_slice(endpoint("10.244.9.9", node="far")))
    planner.nodes[HERE] = node_object(pod_cidrs=[cidr])
    there = snapshot(planner, OWN)
    why = explain(there, packet(there, "10.244.0.13", f"{NODE_IPS[Family.IPV4]}:30080")).why
    assert why.fixes[0].startswith("set clusterCIDR to" if said else "run an endpoint on this node")
    assert any("in the podCIDRs of this Node, but not in" in step.text for step in why.steps) is said


@pytest.mark.parametrize(
    ("taints", "passes", "sees"), [((), True, "an answer"), ((Taint(TO_BE_DELETED_TAINT),), False, "503: a load")]
)
def test_the_health_port_of_a_node_that_is_deleted_answers_503(taints, passes, sees):
    planner = planner_of(world())
    planner.nodes[HERE] = replace(node_object(), spec=NodeSpec(taints=taints))
    there = snapshot(planner, OWN)
    why = explain(there, packet(there, "198.51.100.9", f"{NODE_IPS[Family.IPV4]}:10256")).why
    assert (why.passes, why.client_sees.startswith(sees)) == (passes, True)


@pytest.mark.parametrize(
    ("serving", "said"),
    [
        ((False, False), ["all endpoints are terminating: start others"]),
        ((False, None), ["1 endpoint is not ready: look at the readiness", "1 endpoint is terminating: start others"]),
    ],
)
def test_terminating_endpoints_are_counted(serving, said):
    states = [
        {"ready": False} if one is None else {"ready": False, "terminating": True, "serving": one} for one in serving
    ]
    ends = [endpoint(f"10.244.1.{number}", HERE, **state) for number, state in enumerate(states, 1)]
    slices = endpoint_slice(*ends, ports=[EndpointPort(port=8080)])
    made = snapshot(planner_of(world(), service("web", "10.96.0.10"), slices))
    fixes = explain(made, packet(made, "192.0.2.77", "10.96.0.10:80")).why.fixes
    assert len(fixes) == len(said)
    assert all(fix.startswith(begin) for fix, begin in zip(fixes, said, strict=True)), fixes


def test_a_port_in_a_range_that_another_service_keeps_from_being_served_names_the_range():
    first, second = (
        service(
            name,
            f"10.96.0.1{number}",
            created=f"2024-01-0{number}T00:00:00Z",
            external_ips=["203.0.113.1"],
            ports=[ServicePort(port=80 + number)],
            annotations=Annotations(port_ranges=text),
        )
        for number, (name, text) in enumerate({"old": "2990-3005/tcp", "young": "3001-3010/tcp"}.items(), 1)
    )
    asked = snapshot(planner_of(world(), first, second), {Family.IPV4: []})
    made = explain(asked, packet(asked, "198.51.100.9", "203.0.113.1:3008")).why
    assert made.steps[-1].text == (
        "203.0.113.1:3008/TCP: in a range of default/young that overlaps another Service's ports; "
        "default/old has 2990-3005/TCP, 81/TCP there, default/young has 82/TCP there"
    )
    assert made.fixes == (
        "change the annotation so that its ranges contain no port that another Service has at this address",
    )


def test_a_slice_made_by_hand_with_another_protocol_is_named():
    """A Service without a selector does not use targetPort."""
    ports = [EndpointPort(name="http", port=3000, protocol="UDP")]
    web = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http")])
    made = snapshot(planner_of(world(), web, endpoint_slice(endpoint("10.244.1.1"), ports=ports)))
    (fix,) = explain(made, packet(made, "192.0.2.77", "10.96.0.10:80")).why.fixes
    assert fix.startswith(
        "without spec.selector (a slice made by hand), give a port of the slice the name 'http' and the protocol TCP "
        "(`kubectl -n default edit endpointslice web-1`); with spec.selector, targetPort of default/web may be a name"
    )
