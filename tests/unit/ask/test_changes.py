"""The effects of a changed configuration on clients: a row has the worlds or modes before and after, and the resulting
sentences.
"""

from __future__ import annotations

import pytest
from msgspec.structs import astuple, replace

from kubeproxy.ask.shifts import ConfiguredNode, KnownPod, known_pods, lasting, remarks, resized, shifts, spared
from kubeproxy.features import Features
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.objects import Annotations, EndpointPort, EndpointSlice, Service, ServicePort
from kubeproxy.model.plan import Affinity, Detector, Habits
from kubeproxy.model.planner import Planner
from support.cluster_objects import HERE, NODE_IPS, THERE, endpoint, endpoint_slice, service, world
from support.snapshots import planner_of

V4 = Family.IPV4
OWN, OTHER = pack(NODE_IPS[V4]), pack("192.0.2.99")
LOCAL = {V4: [OWN, OTHER]}
PORTS = [EndpointPort(port=8080, name="http", protocol="TCP")]
HTTP = [ServicePort(port=80, name="http", node_port=30080)]
WEB = service("web", "10.96.0.10", ports=HTTP, external_ips=["198.51.100.1"])
SLICE = endpoint_slice(endpoint("10.244.1.1"), ports=PORTS)
DEAD = service("dead", "10.96.0.11", ports=[ServicePort(port=80, name="http")])


def planner(*objects, external="served", nodeports=(NODE_IPS[V4],)) -> Planner:
    there = world(families=[V4])
    chosen = None if nodeports is None else tuple(map(pack, nodeports))
    ours = replace(there, external_ips=external, ipv4=replace(there.ipv4, nodeport_ips=chosen))
    return planner_of(ours, *objects)


def side(*objects, habits: Habits | None = None, **globals_) -> ConfiguredNode:
    return ConfiguredNode(planner(*objects, **globals_), habits or Habits())


def said(before: ConfiguredNode, after: ConfiguredNode) -> list[str]:
    return [one.text for one in shifts(before, after, LOCAL)]


def test_the_same_changes_nothing():
    assert said(side(WEB, SLICE, DEAD), side(WEB, SLICE, DEAD)) == []


def test_nodeports_begin_and_cease_to_answer():
    mine, theirs = side(WEB, SLICE, nodeports=[NODE_IPS[V4]]), side(WEB, SLICE, nodeports=["192.0.2.99"])
    texts = said(mine, theirs)
    assert "NodePorts on 192.0.2.1 cease to answer this node, outside, pods (default/web)" in texts
    assert any(text.startswith("NodePorts on 192.0.2.99 begin to answer this node, outside, pods") for text in texts)


def test_link_local_addresses_are_no_addresses_of_nodeports():
    family, places = Family.IPV6, [pack(one) for one in ("2001:db8::1", "fe80::1")]
    web = service("web", "fd00:96::1", ports=HTTP)
    piece = endpoint_slice(endpoint("fd00:10:244::7"), ports=PORTS, family="IPv6")
    none, every = (
        ConfiguredNode(planner_of(world(families=[family], nodeports=one), web, piece), Habits())
        for one in ("none", "all")
    )
    texts = [one.text for one in shifts(none, every, {family: places})]
    assert texts
    assert [text for text in texts if "fe80" in text] == []
    assert any("NodePorts on 2001:db8::1" in text for text in texts)


def test_external_ips_that_are_ignored():
    (text,) = said(side(WEB, SLICE), side(WEB, SLICE, external="ignored"))
    assert text == "IPv4 external IPs cease to answer this node, outside, pods (default/web)"


@pytest.mark.parametrize(
    ("habits", "text"),
    [
        (Habits(carries=True), "IPv4 cluster IPs, for pods: served -> served, with this node's address"),
        (Habits(loopback=(V4,)), "NodePorts on 127.0.0.1 begin to answer this node, with this node's address"),
        (Habits(refuses_node=False), ""),
    ],
)
def test_habits_of_another_mode(habits, text):
    globals_ = {"nodeports": None}
    texts = said(side(WEB, SLICE, **globals_), side(WEB, SLICE, habits=habits, **globals_))
    assert any(one.startswith(text) for one in texts) if text else texts == []


def test_a_change_of_one_protocol_names_it():
    dns = ServicePort(port=53, name="dns", protocol="UDP")
    both = service("web", "10.96.0.10", ports=[*HTTP, dns], external_ips=["198.51.100.1"])
    assert said(side(both, SLICE), side(both, SLICE, external="ignored")) == [
        "IPv4 external IPs (TCP) cease to answer this node, outside, pods (default/web)",
        "IPv4 external IPs (UDP), for this node, outside, pods: refused -> not answered by Services (default/web)",
    ]


def test_services_that_change_by_different_protocols_are_not_joined():
    """The web server loses only its TCP port, the name server only its UDP port."""
    dns = ServicePort(port=53, name="dns", protocol="UDP")
    web = service("web", "10.96.0.10", ports=[*HTTP, dns], external_ips=["198.51.100.1"])
    names = service("names", "10.96.0.12", ports=[*HTTP, dns], external_ips=["198.51.100.2"])
    udp = endpoint_slice(
        endpoint("10.244.1.2"), ports=[EndpointPort(port=53, name="dns", protocol="UDP")], of="names", name="names-1"
    )
    texts = said(side(web, SLICE, names, udp), side(web, SLICE, names, udp, external="ignored"))
    assert [text for text in texts if "cease" in text] == [
        "IPv4 external IPs (UDP) cease to answer this node, outside, pods (default/names)",
        "IPv4 external IPs (TCP) cease to answer this node, outside, pods (default/web)",
    ]


def test_health_check_ports_move_with_node_port_addresses():
    local = {"type": "LoadBalancer", "external_traffic_policy": "Local", "health_check_node_port": 32000}
    web = service("web", "10.96.0.10", ports=HTTP, **local)
    texts = said(*(side(web, SLICE, nodeports=[address]) for address in (NODE_IPS[V4], "192.0.2.99")))
    assert f"health check ports on {NODE_IPS[V4]} cease to answer load balancers (default/web)" in texts
    assert "health check ports on 192.0.2.99 begin to answer load balancers (default/web)" in texts


def recognising(value: str, web: Service = WEB, piece: EndpointSlice = SLICE, kind="network") -> ConfiguredNode:
    made = planner(web, piece, nodeports=None).world
    ours = replace(made, ipv4=replace(made.ipv4, detector=Detector(kind, value)))
    return ConfiguredNode(planner_of(ours, web, piece), Habits())


NETWORK = "the pod network 10.244.0.0/16"


@pytest.mark.parametrize(
    ("pods", "said_of"),
    [
        ({"10.244.1.1": HERE}, []),
        ({"10.244.1.1": HERE, "10.244.200.1": HERE}, [f"pods on this node by {NETWORK} (10.244.200.1)"]),
        ({"10.244.1.1": HERE, "10.244.200.1": THERE}, [f"pods on other nodes by {NETWORK} (10.244.200.1)"]),
        (
            {"10.244.200.1": HERE, "10.244.200.2": HERE, "10.244.201.1": THERE, "10.244.202.1": ""},
            [
                f"pods on this node by {NETWORK} (10.244.200.1, 10.244.200.2)",
                f"pods on other nodes by {NETWORK} (10.244.201.1)",
                f"pods by {NETWORK} (10.244.202.1)",
            ],
        ),
        (
            {f"10.244.200.{end}": HERE for end in range(1, 8)},
            [f"pods on this node by {NETWORK} ({', '.join(f'10.244.200.{n}' for n in range(1, 6))}, and 2 more)"],
        ),
        (
            {"10.244.200.1": THERE, "10.244.201.1": "", "10.244.202.1": HERE},
            [
                f"pods on this node by {NETWORK} (10.244.202.1)",
                f"pods on other nodes by {NETWORK} (10.244.200.1)",
                f"pods by {NETWORK} (10.244.201.1)",
            ],
        ),
        ({}, [f"pods by {NETWORK}"]),  # unknown node
    ],
    ids=[
        "all in both",
        "one here",
        "one of another node",
        "here, there and somewhere",
        "this node first",
        "many",
        "none is known",
    ],
)
def test_a_pod_network_that_is_cut_matters_to_pods_outside_of_it(pods, said_of):
    before, after = recognising("10.244.0.0/16"), recognising("10.244.0.0/17")
    made = shifts(before, after, LOCAL, [KnownPod(pack(pod), pod, node) for pod, node in pods.items()])
    assert [list(one.who) for one in made if one.where == ("IPv4 cluster IPs",)] == [said_of] * bool(said_of)
    assert bool(made) is bool(said_of)


def test_it_is_reported_that_no_pod_of_this_node_is_affected():
    before, after = recognising("10.244.0.0/16"), recognising("10.244.0.0/17")
    for node, count in ((THERE, 1), (HERE, 0), ("", 0)):
        made = shifts(before, after, LOCAL, [KnownPod(pack("10.244.200.1"), "10.244.200.1", node)])
        assert list(spared(made)) == ["no known pod of this node is affected, only pods of other nodes"] * count
    assert list(spared([])) == []


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("10.244.0.0/16", "10.244.0.0/17", ["10.244.128.0/17 would no longer count"]),
        ("10.244.0.0/16", "10.244.128.0/18", ["10.244.0.0/17, 10.244.192.0/18 would no longer count"]),
        ("10.244.0.0/17", "10.244.0.0/16", ["10.244.128.0/17 would newly count"]),
        ("10.1.0.0/16", "10.2.0.0/16", ["10.1.0.0/16 would no longer count", "10.2.0.0/16 would newly count"]),
        ("10.1.0.0/16", "10.1.0.0/16", []),
    ],
)
def test_addresses_of_one_pod_network_only_are_named(old, new, parts):
    pods = [KnownPod(pack("10.244.1.1"), "10.244.1.1", HERE), KnownPod(pack("fd00::1"), "fd00::1", HERE)]
    compared = "as a pod; only 1 known pod or network was compared"
    assert list(resized(recognising(old), recognising(new), pods)) == [f"a client in {one} {compared}" for one in parts]


def test_a_pod_that_is_an_endpoint_of_the_service_tells_of_others():
    """Through the Service's address it may reach itself, with this node's address as source, in both configurations."""
    web = [WEB, endpoint_slice(endpoint("10.244.1.1", HERE), endpoint("10.244.9.9"), ports=PORTS)]
    before, after = recognising("10.244.0.0/16", *web), recognising("10.244.128.0/17", *web)
    made = shifts(before, after, LOCAL, [KnownPod(pack("10.244.1.1"), "10.244.1.1", HERE)])
    who = (f"pods on this node by {NETWORK} (10.244.1.1)",)
    change = ("IPv4 cluster IPs",), who, "served", "served, with this node's address", ("default/web",)
    assert change in [astuple(one)[:5] for one in made]


def test_a_pod_that_is_no_endpoint_represents_the_pods_of_this_node():
    web = service("web", "10.96.0.10", ports=HTTP, external_traffic_policy="Local", type="NodePort")
    piece = endpoint_slice(
        endpoint("10.244.1.1", HERE), endpoint("10.244.200.1", HERE), endpoint("10.244.9.9", THERE), ports=PORTS
    )
    before, after = (recognising(network, web, piece) for network in ("10.244.0.0/16", "10.244.0.0/17"))
    pods = [KnownPod(pack(pod), pod, HERE) for pod in ("10.244.200.1", "10.244.200.2")]
    found = [one for one in shifts(before, after, LOCAL, pods) if one.where[0].startswith("NodePorts")]
    assert {(one.before, one.after) for one in found} == {("served", "other endpoints")}


def test_an_endpoint_of_another_node_reaches_itself_through_this_node_in_one_mode_only():
    web = service("web", "10.96.0.10", ports=HTTP, external_traffic_policy="Local", type="NodePort")
    piece = endpoint_slice(endpoint("10.244.1.1"), endpoint("10.244.2.1", node=THERE), ports=PORTS)
    pods = [KnownPod(pack("10.244.1.1"), "10.244.1.1", HERE), KnownPod(pack("10.244.2.1"), "10.244.2.1", THERE)]
    iptables, nftables = side(web, piece, habits=Habits(hairpins="all")), side(web, piece)
    clients = "endpoints with another nodeName, or without one, that receive their own connections"
    who = f"NodePorts on {NODE_IPS[V4]}, for {clients}: "
    served, lost = "served, with this node's address", "a timeout, as the pod gets a packet from itself"
    assert [one.text for one in shifts(iptables, nftables, LOCAL, pods)] == [f"{who}{served} -> {lost} (default/web)"]
    assert [one.text for one in shifts(nftables, iptables, LOCAL, pods)] == [f"{who}{lost} -> {served} (default/web)"]
    assert shifts(iptables, nftables, LOCAL, pods[:1]) == []


def test_a_service_with_only_the_compared_pod_changes_like_others():
    """Its connections to itself are masqueraded when the detector does not recognise it as a pod."""
    web = service("web", "10.96.0.10", ports=HTTP)
    piece = endpoint_slice(endpoint("10.244.200.1", node=THERE), ports=PORTS)
    sides = [recognising(network, web, piece) for network in ("10.244.0.0/16", "10.244.0.0/17")]
    made = shifts(*sides, LOCAL, [KnownPod(pack("10.244.200.1"), "10.244.200.1", THERE)])
    assert [(one.where, one.after) for one in made] == [(("IPv4 cluster IPs",), "served, with this node's address")]


def test_pods_by_interface_are_mostly_those_of_the_network():
    """A pod of the pod network that arrives over the bridge is recognised by both detectors: nothing changes."""
    before, after = recognising("10.244.0.0/16"), recognising("cbr0", kind="bridge")
    made = {who: one.after for one in shifts(before, after, LOCAL) for who in one.who if "cluster IPs" in one.where[0]}
    assert made == {
        f"pods by {NETWORK} that do not come in by the interface cbr0": "served, with this node's address",
        f"what comes in by the interface cbr0 from outside of {NETWORK}": "served",
    }


def test_pods_that_are_known_are_endpoints_and_the_nodes_network():
    pieces = [SLICE, endpoint_slice(endpoint("10.244.2.1", HERE), endpoint(NODE_IPS[V4]), ports=PORTS)]
    assert known_pods(map(parse_slice, pieces), ["10.244.7.0/24"], HERE, LOCAL) == [
        KnownPod(pack("10.244.1.1"), "10.244.1.1", THERE),
        KnownPod(pack("10.244.2.1"), "10.244.2.1", HERE),
        KnownPod(pack("10.244.7.254"), "10.244.7.0/24", HERE),
    ]


def test_other_endpoints():
    zones = side(WEB, SLICE), side(WEB, endpoint_slice(endpoint("10.244.1.2"), ports=PORTS))
    assert all(shift.after == "other endpoints" for shift in shifts(*zones, LOCAL))
    assert shifts(*zones, LOCAL)


def test_a_service_without_endpoints():
    guarded = side(service("dead", "10.96.0.11", ports=HTTP, external_ips=["198.51.100.1"]), habits=Habits())
    open_ = side(
        service("dead", "10.96.0.11", ports=HTTP, external_ips=["198.51.100.1"]), habits=Habits(refuses_node=False)
    )
    (one,) = shifts(guarded, open_, LOCAL)
    assert (one.where, one.who) == (("IPv4 external IPs",), ("this node",))
    assert (one.before, one.after) == ("refused", "not answered by Services")


def test_many_services_are_counted():
    webs = [service(f"web-{n}", f"10.96.1.{n}", ports=HTTP[:1], external_ips=[f"198.51.100.{n}"]) for n in range(1, 8)]
    one, *_ = said(side(*webs), side(*webs, external="ignored"))
    services = ", ".join(f"default/web-{n}" for n in range(1, 6))
    assert one.endswith(f": refused -> not answered by Services (7 Services: {services}, ...)"), one


STICKY = service("sticky", "10.96.0.12", ports=HTTP, session_affinity="ClientIP")


@pytest.mark.parametrize(
    ("before", "after", "same", "texts"),
    [
        (Habits(), Habits(), True, []),
        (Habits(), Habits(), False, ["session affinity starts again"]),
        (
            Habits(),
            Habits(affinity=Affinity.ADDRESS),
            False,
            ["session affinity keeps a client's endpoint for each address", "session affinity starts again"],
        ),
        (Habits(), Habits(refuses_ports=()), True, ["connections to cluster IPs on ports that no Service has"]),
    ],
)
def test_remarks(before, after, same, texts):
    made = list(remarks(side(STICKY, habits=before), side(STICKY, habits=after), same_mode=same))
    assert [one[: len(text)] for one, text in zip(made, texts, strict=True)] == texts


def test_a_strict_node_ignores_annotations():
    annotations = Annotations(algorithm="maglev", weights=f"{HERE}=50")
    mine = side(service("web", "10.96.0.10", ports=HTTP, annotations=annotations), SLICE)
    strict = planner_of(replace(mine.planner.world, features=Features(strict=True)))
    strict.adopt(mine.planner.services, mine.planner.slices)
    strict.take()
    theirs = mine._replace(planner=strict)
    text = "annotations for weights and consistent hashing are ignored: shares become equal (1 Service)"
    assert list(remarks(mine, theirs, same_mode=True)) == [text]
    assert list(remarks(mine, mine, same_mode=True)) == list(remarks(theirs, theirs, same_mode=True)) == []


@pytest.mark.parametrize(
    ("before", "after", "same", "text"),
    [
        (Habits(), Habits(), False, "established connections continue"),
        (Habits(outlives_mode=False), Habits(), False, "established connections end"),
        (Habits(outlives_mode=False), Habits(outlives_mode=False), True, "established connections continue"),
        (Habits(outlives_mode=False, carries=True), Habits(), True, "established connections end"),
        (Habits(), Habits(outlives_mode=False), False, "established connections continue; connections made in"),
    ],
)
def test_established_connections(before, after, same, text):
    assert lasting(before, after, same_mode=same).startswith(text)


def test_a_planner_takes_over_the_objects_of_another():
    first = planner(WEB, SLICE, DEAD)
    second = Planner(first.world)
    second.adopt(first.services, first.slices)
    second.take()
    assert second.compiled == first.compiled
    assert second.objects.endpoints == first.objects.endpoints


def test_answers_that_bypass_this_node_for_want_of_a_pod_network_are_reported():
    """Only connections of clients outside to cluster IPs with endpoints on other nodes."""
    web, near = service("web", "10.96.0.10"), service("near", "10.96.0.11")
    local = endpoint_slice(endpoint("10.244.0.7"), name="near-1", of="near")
    ends = endpoint_slice(endpoint("10.244.1.7", THERE)), local
    known, none = (world(families=[V4], detector=one) for one in (True, False))
    old, new = (ConfiguredNode(planner_of(one, web, near, *ends), Habits()) for one in (known, none))
    lost = "answers of endpoints on other nodes bypass this node"
    for mode, reason in (
        ("ClusterCIDR", "clusterCIDR has no IPv4 network"),
        ("NodeCIDR", "the podCIDRs of this Node have no IPv4 network (detectLocalMode is NodeCIDR)"),
    ):
        pods = [KnownPod(pack("10.244.1.7"), "10.244.1.7", THERE), KnownPod(pack("10.244.0.7"), "10.244.0.7", HERE)]
        made = shifts(old, new._replace(local_mode=mode), LOCAL, pods)
        found = [(one.who, one.services) for one in made if f"except that {lost} ({reason})" in one.after]
        assert found == [(("outside",), ("default/web",))], [one.text for one in made]
