"""The node of a client: the evidence of slices and of the Node's pod networks, and when the node does not matter."""

from __future__ import annotations

import pytest

from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask.connection import tell
from kubeproxy.ask.desk import Desk
from kubeproxy.ask.explanation import Explanation
from kubeproxy.ask.question import counted_host, packet
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.ask.why import explain
from kubeproxy.backends import iptables
from kubeproxy.backends.nftables import MODE
from kubeproxy.features import PORT_RANGES
from kubeproxy.kernel.proc import processes
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced, Upserted
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import Detector
from kubeproxy.model.planner import Planner
from support.cluster_objects import (
    HERE,
    NODE_IPS,
    THERE,
    address,
    endpoint,
    endpoint_slice,
    node_object,
    service,
    world,
)
from support.snapshots import snapshot

PORTS = [EndpointPort(port=8080, name="http")]
GATEWAY = "10.244.0.1"
"""An address of this node in its pod network, as assigned by network plugins that use podCIDRs."""


def subject(*local: str, policy: str = "Cluster") -> Snapshot:
    planner = Planner(world())
    ports = [ServicePort(port=80, name="http", node_port=30080)]
    web = service("web", "10.96.0.10", ports=ports, external_traffic_policy=policy)
    slices = [
        endpoint_slice(endpoint("10.244.1.7"), endpoint("10.244.0.7", HERE), endpoint("10.244.3.9", None), ports=PORTS),
        endpoint_slice(endpoint("10.244.2.7", "third", ready=False), name="other-1", of="other", ports=[]),
    ]
    nodes = [node_object(HERE, pod_cidrs=["10.244.0.0/24"])]
    planner.apply([Replaced("services", [web]), Replaced("endpointslices", slices), Replaced("nodes", nodes)])
    planner.take()
    return snapshot(planner, {Family.IPV4: [address(a) for a in (NODE_IPS[Family.IPV4], *local)]})


@pytest.mark.parametrize(
    ("source", "local", "node", "reason"),
    [
        ("10.244.1.7", (), THERE, f"10.244.1.7 is on {THERE}"),
        ("10.244.2.7", (), "third", "10.244.2.7 is on third"),
        (
            "10.244.9.9",
            (GATEWAY,),
            "",
            "10.244.9.9 is a pod's, and of none of this node's pod networks (10.244.0.0/24)",
        ),
        (
            "10.244.3.9",
            (GATEWAY,),
            "",
            "10.244.3.9 is a pod's, and of none of this node's pod networks (10.244.0.0/24)",
        ),
    ],
)
def test_a_client_of_another_node_is_named_with_it(source, local, node, reason):
    there = subject(*local)
    found = explain(there, packet(there, source, "10.96.0.10:80")).why.elsewhere
    assert found is not None
    assert (found.node, found.reason) == (node, reason)


@pytest.mark.parametrize(
    ("source", "target", "interface", "local"),
    [
        ("node", "10.96.0.10:80", "", (GATEWAY,)),
        (NODE_IPS[Family.IPV4], "10.96.0.10:80", "", (GATEWAY,)),
        ("10.244.0.7", "10.96.0.10:80", "", (GATEWAY,)),
        ("10.244.0.99", "10.96.0.10:80", "", (GATEWAY,)),  # no endpoint, in this node's network
        ("10.244.9.9", "10.96.0.10:80", "", ()),  # there is no evidence that podCIDRs are pod networks
        ("192.0.2.99", "10.96.0.10:80", "", (GATEWAY,)),  # not a pod
        ("10.244.1.7", f"{NODE_IPS[Family.IPV4]}:30080", "", ()),  # the request arrived at this very node
        ("10.244.1.7", "10.96.0.10:80", "veth7", ()),  # the trace shows that the packet arrived here
    ],
)
def test_clients_on_this_node_and_of_its_addresses_are_answered_here(source, target, interface, local):
    there = subject(*local)
    assert explain(there, packet(there, source, target, interface)).why.elsewhere is None


@pytest.mark.parametrize(
    ("source", "target", "heading"),
    [
        ("node", "10.96.0.10:80", "this node -> 10.96.0.10:80/tcp: kube-proxy forwards it"),
        (
            "node",
            "10.96.0.10:81",
            "this node -> 10.96.0.10:81/tcp: refused, the client sees connection refused, by a reset",
        ),
        (
            "10.244.1.7",
            "10.96.0.10:80",
            f"10.244.1.7 -> 10.96.0.10:80/tcp: decided on {THERE}, where the client is; here it would be: forwarded",
        ),
        (
            "10.244.9.9",
            "10.96.0.10:80",
            "10.244.9.9 -> 10.96.0.10:80/tcp: decided on another node, where the client is; here it would",
        ),
    ],
)
def test_the_first_line_is_the_proxys_decision(source, target, heading):
    there = subject(GATEWAY)
    why = explain(there, packet(there, source, target)).why
    assert why.heading.startswith(heading)
    assert why.next == ("kube-proxy trace node 10.96.0.10:80/tcp" if why.heading.endswith("proxy forwards it") else "")
    if why.elsewhere is not None:
        name = why.elsewhere.node or "the client's node"
        question = f"why {source} 10.96.0.10:80/tcp"
        fix = f"ask on {name}: `kube-proxy {question}`; or with kubectl from anywhere: `kubectl kubeproxy {question}`"
        assert why.fixes == (fix,)


@pytest.mark.parametrize(
    ("source", "target", "interface", "unknown"),
    [
        ("192.0.2.99", "10.96.0.10:80", "", True),
        ("192.0.2.99", f"{NODE_IPS[Family.IPV4]}:30080", "", False),  # decided on this node, wherever the client is
        ("192.0.2.99", "10.96.0.10:80", "eth0", False),
        ("192.0.2.99", "192.0.2.200:80", "", False),  # no Service has this address
        ("node", "10.96.0.10:80", "", False),
        ("10.244.0.7", "10.96.0.10:80", "", False),
        ("10.244.9.9", "10.96.0.10:80", "", False),  # a pod's address
    ],
)
def test_a_client_outside_may_be_another_node(source, target, interface, unknown):
    there = subject(GATEWAY)
    made = explain(there, packet(there, source, target, interface))
    assert ("client" in [end for _, end in made.unplaced]) is unknown


@pytest.mark.parametrize(
    ("source", "policy", "mode", "lost"),
    [
        ("10.244.1.7", "Local", MODE, {"10.244.1.7:8080"}),  # the client sends to itself
        ("10.244.2.7", "Local", MODE, {"10.244.1.7:8080"}),  # two other nodes, which have different results
        ("10.244.9.9", "Local", MODE, {"10.244.1.7:8080"}),  # by the pod networks of this node
        ("10.244.3.9", "Local", MODE, {"10.244.1.7:8080", "10.244.3.9:8080"}),  # the only evidence for its node
        ("10.244.1.7", "Local", iptables.MODE, set()),  # this mode masquerades all connections of a pod to itself
        ("10.244.1.7", "Cluster", MODE, set()),  # all are masqueraded
        ("10.244.0.7", "Local", MODE, set()),  # a pod of this node
    ],
)
def test_answers_that_do_not_return_through_this_node(source, policy, mode, lost, monkeypatch):
    monkeypatch.setattr(processes, "proxies", lambda: [processes.ProxyProcess(1, (), ours=True)])
    monkeypatch.setattr("kubeproxy.ask.connection._beside", lambda *_: ())  # the rules in the kernel
    there = subject(GATEWAY, policy=policy)._replace(mode=mode)
    desk = Desk(there)
    told = tell(desk, desk.facts(), explain(there, packet(there, source, f"{NODE_IPS[Family.IPV4]}:30080")), ())
    assert {one.address for one in told.why.endpoints if not one.returns} == lost
    assert len(told.why.endpoints) == 3
    itself = {one for one in lost if one == "10.244.3.9:8080"}  # the client's endpoint has no nodeName
    assert [one.what for one in told.findings if one.about != "proxy"] == [
        f"{len(each) / 3:.1%} of the connections time out" for each in (itself, lost - itself) if each
    ]
    assert any("has no nodeName" in one.why for one in told.findings) is bool(itself)
    assert (
        told.answer,
        told.heading.endswith(f", but {len(lost) / 3:.1%} of the connections do not get through (x)"),
    ) == (("no", True) if lost else ("yes", False))


def test_a_proxy_without_a_node_of_its_name_does_not_send_to_another_one():
    known = subject()
    watched = (WatchStanding(resource="nodes", synced=True, connected=True, stale=0.0),)
    reach = Reach(server="https://h", trouble="", watched=watched, certificates={})
    known.planner.nodes.clear()
    known = known._replace(reach=lambda: reach)
    (fix,) = explain(known, packet(known, "10.244.1.7", "10.96.0.10:80")).why.fixes
    assert fix == f"there is no Node {HERE}: set hostnameOverride to the name of this node, which may be {THERE}"


@pytest.mark.parametrize(("ready", "passes"), [(True, True), (False, False)])
def test_a_health_check_port_without_local_endpoints_takes_the_node_out(ready, passes):
    planner = Planner(world())
    spec = {"type": "LoadBalancer", "external_traffic_policy": "Local", "health_check_node_port": 31000}
    web = service("web", "10.96.0.10", ingress=["203.0.113.1"], **spec)
    ends = endpoint_slice(endpoint("10.244.0.7", HERE, ready=ready))
    planner.apply([Replaced("services", [web]), Replaced("endpointslices", [ends])])
    planner.take()
    node = NODE_IPS[Family.IPV4]
    there = snapshot(planner, {Family.IPV4: [address(node)]})
    told = Explanation(explain(there, packet(there, "198.51.100.9", f"{node}:31000")).why)
    seen = "an answer" if passes else "503: a load balancer takes this node out"
    assert (told.answer, told.why.passes) == ("yes" if passes else "no", passes)
    assert f"answered by the proxy, the client sees {seen}" in told.heading


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        (f"{NODE_IPS[Family.IPV4]}:10256", "answered by the proxy"),
        ("127.0.0.1:10249", "answered by the proxy"),
        (f"{NODE_IPS[Family.IPV4]}:10249", "not ours"),  # metricsBindAddress is 127.0.0.1
        (f"{NODE_IPS[Family.IPV4]}:10256/udp", "not ours"),
        ("192.0.2.99:10256", "not ours"),
    ],
)
def test_the_proxys_own_ports_are_answered_by_it(target, outcome):
    there = subject()
    assert explain(there, packet(there, "node", target)).why.outcome == outcome


@pytest.mark.parametrize(
    ("source", "target", "heading", "node"),
    [
        ("10.244.1.7", "10.244.0.7:8080", "this node forwards it, untranslated", HERE),
        ("192.0.2.99", "10.244.0.7:8080", "this node forwards it, untranslated", HERE),
        ("10.244.0.7", "10.244.1.7:8080", "this node forwards it, untranslated", THERE),
        ("10.244.1.7", "10.244.2.7:8080", f"decided on {THERE}, where the client is; here it would be: kube", None),
        ("10.244.0.7", "10.244.1.7:8081", "kube-proxy does not handle it", None),
        ("10.244.0.7", "10.244.1.7:8080/udp", "kube-proxy does not handle it", None),
        ("10.244.0.7", "10.244.0.7:8080", "the endpoint is the client itself", HERE),
    ],
)
def test_an_endpoints_own_address_is_forwarded_untranslated(source, target, heading, node):
    there = subject(GATEWAY)
    why = explain(there, packet(there, source, target)).why
    assert f": {heading}" in why.heading
    assert [one.node for one in why.endpoints] == ([node] if node else [])
    assert why.direct is bool(node)


@pytest.mark.parametrize(
    ("target", "direct"),
    [("3005", True), ("3000/udp", True), ("8080", True), ("3011", False), ("3005/udp", False), ("3005/sctp", False)],
)
def test_each_port_of_a_range_is_an_endpoints_port(target: str, direct: bool):
    there = subject(GATEWAY)
    ranged = service("web", "10.96.0.10", annotations=Annotations(port_ranges="3000-3010/tcp,3000-3001/udp"))
    there.planner.set_world(PORT_RANGES.on(there.planner.world, 16))
    there.planner.apply([Upserted("services", ranged)])
    there.planner.take()
    assert explain(there, packet(there, "10.244.1.7", f"10.244.0.7:{target}")).why.direct is direct


@pytest.mark.parametrize(
    ("network", "client", "counted"),
    [
        ("0.0.0.0/0", "192.0.2.77", NODE_IPS[Family.IPV4]),  # a host, and the network contains this Node
        ("0.0.0.0/0", "10.244.9.9", ""),  # near the Node's podCIDRs: probably a pod of another node
        ("10.244.0.0/16", "192.0.2.77", ""),  # not recognised as a pod
        ("10.0.0.0/8", "10.1.2.3", ""),  # the network contains no known host
    ],
)
def test_a_host_in_a_pod_network_that_is_too_wide_is_not_a_pod_of_another_node(
    network: str, client: str, counted: str
) -> None:
    wide = world(detector=Detector("network", network))
    found = counted_host(wide, node_object(HERE, pod_cidrs=["10.244.0.0/24"]), address(client))
    assert found == counted
    planner = subject(GATEWAY).planner
    planner.set_world(wide)
    planner.take()
    made = snapshot(planner, {Family.IPV4: [address(a) for a in (NODE_IPS[Family.IPV4], GATEWAY)]})
    explained = explain(made, packet(made, client, "default/web:80"))
    assert explained.keeps_outside is bool(counted)
    is_pod = wide.of(Family.IPV4).detector.holds(address(client), "")  # type: ignore[union-attr]
    assert (explained.why.elsewhere is None) is (bool(counted) or not is_pod)
