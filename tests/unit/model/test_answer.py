"""The model's answers: the steps with their fields, the client's outcome, and excluded endpoints with reasons."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kubeproxy.backends import iptables, nftables, userspace
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.answer import Answer, AnswerStep, Notice, Outcome, Packet, answer
from kubeproxy.model.choosing import Absent
from kubeproxy.model.objects import EndpointPort, ServicePort
from kubeproxy.model.plan import Detector, Habits, Loopback
from kubeproxy.model.planner import Planner
from support.cluster_objects import HERE, NODE_IPS, THERE, dest, draining, endpoint, endpoint_slice, service, world
from support.snapshots import planner_of

TCP, UDP = 6, 17
NODE = pack(NODE_IPS[Family.IPV4])
POD, STRANGER = "10.244.7.7", "203.0.113.77"


def planner(*objects, **globals_) -> Planner:
    return planner_of(world(**globals_), *objects)


def ask(
    made: Planner, destination: str, port: int = 80, source: str | None = POD, protocol: int = TCP, **more
) -> Answer:
    habits = more.pop("habits", None)
    asked = Packet(pack(source) if source else None, pack(destination), protocol, port, **more)
    return answer(made, asked, {NODE}, habits)


def told(made: Answer) -> str:
    return "\n".join(f"{'ok' if step.passes else 'no'} {step.text} [{step.field}]" for step in made.steps)


WEB = service("web", "10.96.0.10", ports=[ServicePort(port=80, name="http", node_port=30080)], ingress=["198.51.100.1"])
UNNAMED = [EndpointPort(port=8080)]
PORTS = [EndpointPort(port=8080, name="http", protocol="TCP")]


def slice_of(*endpoints, ports=PORTS):
    return endpoint_slice(*endpoints, ports=ports)


def test_the_path_of_a_connection_is_reported_step_by_step():
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1", HERE), endpoint("10.244.2.1", THERE))), "10.96.0.10")
    assert told(made) == (
        "ok 10.96.0.10:80/TCP is the cluster IP of default/web, port http [spec.clusterIPs]\n"
        "ok the client is a pod: 10.244.7.7 is recognised by the pod network 10.244.0.0/16 []\n"
        "ok policy Cluster: 2 endpoints, all eligible endpoints [spec.internalTrafficPolicy]"
    )
    assert (made.outcome, made.notice, made.affinity) == (Outcome.FORWARDED, Notice.ENDPOINT, 0)
    assert [(c.destination, c.share, c.masqueraded) for c in made.choices] == [
        (dest("10.244.1.1:8080"), 0.5, False),
        (dest("10.244.2.1:8080"), 0.5, False),
    ]


def test_other_claimants_of_an_address_are_named():
    ports = [ServicePort(port=80, name="http", protocol="TCP")]
    older = service("older", "10.96.0.11", ports=ports, external_ips=["198.51.100.7"], created="2020-01-01T00:00:00Z")
    newer = service("newer", "10.96.0.12", ports=ports, external_ips=["198.51.100.7"], created="2021-01-01T00:00:00Z")
    assert told(ask(planner(newer, older), "198.51.100.7")).startswith(
        "ok 198.51.100.7:80/TCP is the external IP of default/older, port http; default/newer claims this address too, "
        "and does not get it [spec.externalIPs]\n"
    )


@pytest.mark.parametrize(
    ("habits", "protocol", "address", "notice"),
    [
        (Habits(), "TCP", "10.96.0.10", Notice.RESET),
        (Habits(), "UDP", "10.96.0.10", Notice.ICMP),
        (Habits(), "TCP", "fd00:96::10", Notice.LATE_ICMP),
        (Habits(resets_tcp=()), "TCP", "10.96.0.10", Notice.ICMP),
    ],
)
def test_outcomes_of_refused_clients(habits, protocol, address, notice):
    empty = service("web", address, ports=[ServicePort(port=80, protocol=protocol)])
    made = ask(planner(empty), address, protocol={"TCP": TCP, "UDP": UDP}[protocol], habits=habits)
    assert (made.outcome, made.notice) == (Outcome.REFUSED, notice)
    assert told(made).endswith("no no endpoint anywhere takes new connections []")


@pytest.mark.parametrize(
    ("mode", "target", "source", "notice"),
    [
        (nftables, "10.96.0.10", None, Notice.NOT_PERMITTED),
        (nftables, "10.96.0.10", NODE_IPS[Family.IPV4], Notice.NOT_PERMITTED),
        (nftables, "10.96.0.10", POD, Notice.ICMP),
        (nftables, STRANGER, None, Notice.NOT_PERMITTED),
        (nftables, NODE_IPS[Family.IPV4], None, Notice.ICMP),
        (nftables, "127.0.0.1", None, Notice.NOT_PERMITTED),
        (iptables, "10.96.0.10", None, Notice.NOT_PERMITTED),
        (iptables, NODE_IPS[Family.IPV4], None, Notice.ICMP),
        (userspace, NODE_IPS[Family.IPV4], None, Notice.NOT_PERMITTED),
    ],
)
def test_a_program_on_the_node_cannot_send_udp_that_rules_refuse_as_it_is_sent(mode, target, source, notice):
    """In the other cases the hook input refuses the packet, and the program gets ECONNREFUSED."""
    port = ServicePort(port=53, protocol="UDP", node_port=30053)
    made = planner(service("dns", "10.96.0.10", ports=[port], external_ips=[STRANGER]))
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, loopback=Loopback.REFUSED)))
    number = 53 if target in {"10.96.0.10", STRANGER} else 30053
    answered = ask(made, target, number, source, UDP, habits=mode.MODE.habits)
    assert (answered.outcome, answered.notice) == (Outcome.REFUSED, notice)


def test_a_client_that_the_source_ranges_keep_out():
    closed = service(
        "web", "10.96.0.10", ingress=["198.51.100.1"], load_balancer_source_ranges=["10.1.0.0/16", "10.2.0.0/16"]
    )
    made = ask(planner(closed, slice_of(endpoint("10.244.1.1"), ports=UNNAMED)), "198.51.100.1", source=STRANGER)
    assert (made.outcome, made.notice) == (Outcome.DROPPED, Notice.TIMEOUT)
    assert made.steps[-1] == AnswerStep(
        False,
        "203.0.113.77 is not among the source ranges (10.1.0.0/16, 10.2.0.0/16)",
        "spec.loadBalancerSourceRanges",
    )


def test_policy_local_without_an_endpoint_here():
    local = service("web", "10.96.0.10", ports=[ServicePort(port=80, node_port=30080)], external_traffic_policy="Local")
    cluster = planner(local, slice_of(endpoint("10.244.2.1", THERE), ports=UNNAMED))
    made = ask(cluster, NODE_IPS[Family.IPV4], 30080, source=STRANGER)
    assert (made.outcome, made.steps[-1].field) == (Outcome.DROPPED, "spec.externalTrafficPolicy")
    assert ask(cluster, NODE_IPS[Family.IPV4], 30080).outcome is Outcome.FORWARDED, "pods get the cluster's"


@pytest.mark.parametrize(
    ("entry", "reason", "field"),
    [
        (endpoint("10.244.1.9", ready=False), "not ready", "conditions.ready"),
        (draining("10.244.1.9"), "terminating, while other endpoints are ready", "conditions.terminating"),
        (
            endpoint("10.244.1.9", ready=False, serving=False, terminating=True),
            "terminating and no longer serving",
            "conditions.serving",
        ),
    ],
)
def test_an_endpoint_that_gets_nothing(entry, reason, field):
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1"), entry)), "10.96.0.10")
    assert made.absent == (Absent(dest("10.244.1.9:8080"), "web-1", reason, field),)


def test_an_endpoint_of_another_zone_node_or_port():
    zoned = slice_of(endpoint("10.244.1.1", zones=["zone-a"]), endpoint("10.244.1.2", zones=["zone-b"]))
    assert [a.field for a in ask(planner(WEB, zoned, zone="zone-a"), "10.96.0.10").absent] == ["hints.forZones"]
    local = service("web", "10.96.0.10", internal_traffic_policy="Local")
    spread = slice_of(endpoint("10.244.1.1", HERE), endpoint("10.244.2.1", THERE), ports=UNNAMED)
    assert [a.reason for a in ask(planner(local, spread), "10.96.0.10").absent] == [
        "it is on node-b, and the policy is Local"
    ]
    wrong = slice_of(endpoint("10.244.1.1"), ports=[EndpointPort(port=8080, name="web", protocol="TCP")])
    made = ask(planner(WEB, wrong), "10.96.0.10")
    assert [(a.reason, a.field) for a in made.absent] == [
        ("the slice has no port http (TCP); it has web (TCP)", "ports")
    ]


def test_a_port_that_no_service_has_at_the_address():
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1"))), "10.96.0.10", 8443)
    assert made.outcome is Outcome.REFUSED
    assert made.steps[-1].text == "10.96.0.10:8443/TCP: no such port; default/web has 80/TCP there"
    shared = {"external_ips": ["192.0.2.1"], "ports": [ServicePort(port=p, name=f"p{p}") for p in (80, 88)]}
    both = planner(
        service("first", "10.96.0.11", external_ips=["192.0.2.1"]), service("second", "10.96.0.12", **shared)
    )
    said = "192.0.2.1:99/TCP: no such port; default/first has 80/TCP there, default/second has 88/TCP there"
    assert ask(both, "192.0.2.1", 99).steps[-1].text == said
    elsewhere = ask(planner(WEB), "10.96.0.10", 8443, habits=Habits(refuses_ports=(), drops_unowned=False))
    assert elsewhere.outcome is Outcome.NOT_OURS


def test_an_address_without_an_owner():
    made = ask(planner(WEB), "192.0.2.200")
    assert (made.outcome, made.notice) == (Outcome.NOT_OURS, Notice.UNKNOWN)
    assert made.steps[-1].text == "192.0.2.200:80/TCP: no Service has this address and port"


def test_a_pod_that_reaches_itself_is_masqueraded():
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1", HERE))), "10.96.0.10", source="10.244.1.1")
    assert [c.masqueraded for c in made.choices] == [True]


@pytest.mark.parametrize(
    ("detector", "interface", "who"),
    [
        (Detector("bridge", "cbr0"), "cbr0", "a pod"),
        (Detector("bridge", "cbr0"), "cbr00", "outside"),
        (Detector("prefix", "cali"), "cali123", "a pod"),
        (Detector(), "cbr0", "outside"),
    ],
)
def test_the_detector_recognises_the_client(detector, interface, who):
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1")), detector=detector), "10.96.0.10", interface=interface)
    assert made.steps[1].text.startswith(f"the client is {who}: ")


def test_unrecognisable_pods_are_reported():
    made = ask(planner(WEB, slice_of(endpoint("10.244.1.1")), detector=Detector()), "10.96.0.10")
    assert made.steps[1].text.endswith("10.244.7.7 is not this node's, and pods are not recognised (see clusterCIDR)")


@pytest.mark.parametrize(
    ("detector", "source", "policies", "kept"),
    [
        (Detector(), POD, {}, True),
        (Detector(), None, {}, False),  # this node
        (Detector(), POD, {"internal_traffic_policy": "Local"}, False),
        (True, POD, {}, False),
        (True, STRANGER, {}, False),
    ],
)
def test_a_client_outside_keeps_its_address_if_no_pod_network_is_configured(detector, source, policies, kept):
    web = service("web", "10.96.0.10", ports=WEB.spec.ports, **policies)
    made = ask(planner(web, slice_of(endpoint("10.244.1.1", HERE)), detector=detector), "10.96.0.10", source=source)
    assert (made.outcome, made.keeps_outside) == (Outcome.FORWARDED, kept)
    assert not ask(planner(web, slice_of(endpoint("10.244.1.1"))), NODE_IPS[Family.IPV4], 30080).keeps_outside


def test_a_nodeport_is_known_on_an_address_that_does_not_answer_it():
    made = planner(WEB, slice_of(endpoint("10.244.1.1", HERE)))
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, nodeport_ips=(pack("192.0.2.9"),))))
    answered = ask(made, NODE_IPS[Family.IPV4], 30080, STRANGER)
    assert answered.outcome is Outcome.NOT_OURS
    assert told(answered) == (
        "no 192.0.2.1:30080/TCP: a NodePort of default/web, port http, but not on this address: they answer on "
        "192.0.2.9 [nodePortAddresses]"
    )
    assert told(ask(made, STRANGER, 30080)) == (
        f"no {STRANGER}:30080/TCP: no Service has this address and port; on an address of a Node it is a NodePort of "
        "default/web, port http [spec.ports[].nodePort]"
    )
    assert told(ask(made, STRANGER, 30081)).endswith("no Service has this address and port []")


CHECKED = {"type": "LoadBalancer", "external_traffic_policy": "Local", "health_check_node_port": 30088}
BALANCED = service("web", "10.96.0.10", ports=[ServicePort(port=80, node_port=30080)], ingress=[STRANGER], **CHECKED)


@pytest.mark.parametrize("target", ["127.0.0.1", "192.0.2.9"])
def test_a_health_check_port_answers_on_configured_loopback_addresses(target):
    made = planner(BALANCED, slice_of(endpoint("10.244.1.1", HERE), ports=UNNAMED))
    chosen = {"nodeport_ips": (pack("192.0.2.9"),), "health_check_only_ips": (pack("127.0.0.1"),)}
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, **chosen)))
    answered = ask(made, target, 30088, None)
    assert (answered.outcome, answered.notice) == (Outcome.HEALTH, Notice.ANSWER)
    assert told(answered).startswith("ok port 30088 of this node is the health check of default/web [")
    assert ask(made, target, 30088, None, UDP).outcome is Outcome.NOT_OURS


@pytest.mark.parametrize(
    ("address", "port", "said"),
    [
        ("192.0.2.1", 30080, "a NodePort of default/web, but not on this address: they answer on 192.0.2.9 [nodePort"),
        ("192.0.2.1", 30088, "a health check port of default/web, but not on this address: they answer on 192.0.2.9 ["),
        (STRANGER, 30088, "no Service has this address and port; on an address of a Node it is a health check port of"),
        ("192.0.2.1", 30089, "no such port; default/own has 8080/TCP there [spec.ports]"),
        (STRANGER, 30080, "no such port; default/web has 80/TCP there [spec.ports]"),
    ],
)
def test_a_port_of_nodes_is_named_on_an_address_of_another_service(address, port, said):
    own = service("own", "10.96.0.11", ports=[ServicePort(port=8080)], external_ips=["192.0.2.1"])
    made = planner(BALANCED, own, slice_of(endpoint("10.244.1.1", HERE), ports=UNNAMED))
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, nodeport_ips=(pack("192.0.2.9"),))))
    assert told(ask(made, address, port, "198.51.100.9")).startswith(f"no {address}:{port}/TCP: {said}")


@pytest.mark.parametrize(
    ("care", "protocol", "outcome", "said"),
    [
        (Loopback.RELAYED, TCP, Outcome.FORWARDED, "the proxy itself carries it"),
        (Loopback.RELAYED, UDP, Outcome.REFUSED, "the proxy relays only TCP to loopback"),
        (Loopback.REFUSED, TCP, Outcome.REFUSED, "nodePortAddresses has no loopback network"),
        (Loopback.NOTHING, TCP, Outcome.NOT_OURS, "but not on this address: they answer on 192.0.2.1"),
    ],
)
def test_nodeports_on_loopback(care, protocol, outcome, said):
    both = [ServicePort(port=80, node_port=30080, protocol=name) for name in ("TCP", "UDP")]
    ports = [EndpointPort(port=8080, protocol=name) for name in ("TCP", "UDP")]
    made = planner(service("web", "10.96.0.10", ports=both), slice_of(endpoint("10.244.1.1", HERE), ports=ports))
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, loopback=care)))
    answered = ask(made, "127.0.0.1", 30080, "127.0.0.1", protocol)
    assert (answered.outcome, said in told(answered)) == (outcome, True), told(answered)


@pytest.mark.parametrize(
    ("address", "place", "said", "notice"),
    [
        ("127.0.0.2", HERE, "the proxy relays only connections to 127.0.0.1 and ::1 [nodePortAddresses]", Notice.RESET),
        (
            "127.0.0.1",
            THERE,
            "policy Local, and none of the Service's endpoints is on this node [spec.ext",
            Notice.RESET,
        ),
        ("127.0.0.1", "", "no endpoint anywhere takes new connections", Notice.RESET),
        ("::1", "", "no endpoint anywhere takes new connections", Notice.RESET),
    ],
)
def test_a_nodeport_on_loopback_that_is_not_relayed_has_its_cause(address, place, said, notice):
    family = Family.IPV6 if ":" in address else Family.IPV4
    cluster, end = ("10.96.0.10", "10.244.1.1") if family is Family.IPV4 else ("fd00:96::a", "fd00:244:1::1")
    ports = [ServicePort(port=80, node_port=30080)]
    local = {"external_traffic_policy": "Local"} if place == THERE else {}
    web = service("web", cluster, ports=ports, type="NodePort", **local)
    made = planner(web, *([slice_of(endpoint(end, place), ports=UNNAMED)] if place else []))
    part = {family.label.lower(): replace(made.world.of(family), loopback=Loopback.RELAYED)}
    made.set_world(replace(made.world, **part))
    answered = ask(made, address, 30080, None, TCP)
    assert (answered.outcome, said in told(answered)) == (Outcome.REFUSED, True), told(answered)
    assert answered.notice is notice


def test_a_closed_nodeport_has_its_cause():
    ports = [ServicePort(port=80, node_port=30080)]
    far = service("web", "10.96.0.10", ports=ports, type="NodePort", external_traffic_policy="Local")
    for pieces, said in (
        (
            [slice_of(endpoint("10.244.1.1", THERE), ports=UNNAMED)],
            "policy Local, and none of the Service's endpoints is on this node",
        ),
        ([], "no endpoint anywhere takes new connections"),
    ):
        made = planner(far, *pieces, nodeports="all")
        made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, nodeport_ips=())))
        answered = ask(made, NODE_IPS[Family.IPV4], 30080, STRANGER, habits=iptables.MODE.habits)
        assert f"is closed: a NodePort of default/web: {said}" in told(answered), told(answered)
        assert answered.steps[1].text.endswith("but not on this address: they answer on no address"), told(answered)


@pytest.mark.parametrize(
    ("loopback", "outcome"), [(Loopback.SERVED, Outcome.FORWARDED), (Loopback.NOTHING, Outcome.NOT_OURS)]
)
def test_nodeports_answer_on_loopback_in_iptables_mode_only_if_configured(loopback, outcome):
    made = planner(WEB, slice_of(endpoint("10.244.1.1", HERE)), nodeports="all")
    made.set_world(replace(made.world, ipv4=replace(made.world.ipv4, loopback=loopback)))
    assert ask(made, "127.0.0.1", 30080, None, habits=iptables.MODE.habits).outcome is outcome


@pytest.mark.parametrize(("address", "outcome"), [(STRANGER, Outcome.NOT_OURS), ("node", Outcome.REFUSED)])
def test_an_external_address_without_endpoints_is_refused_in_iptables_mode_on_the_node_that_has_it(address, outcome):
    address = NODE_IPS[Family.IPV4] if address == "node" else address
    made = planner(service("web", "10.96.0.10", external_ips=[address]))
    assert ask(made, address, source=None, habits=iptables.MODE.habits).outcome is outcome


@pytest.mark.parametrize(("habits", "masqueraded"), [(Habits(), False), (iptables.MODE.habits, True)])
def test_an_endpoint_without_a_node_name_that_reaches_itself_is_masqueraded_in_iptables_mode(habits, masqueraded):
    made = planner(WEB, slice_of(endpoint(POD)))
    (choice,) = ask(made, "10.96.0.10", habits=habits).choices
    assert choice.masqueraded is masqueraded
