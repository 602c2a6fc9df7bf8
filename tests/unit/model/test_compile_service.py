"""A Service's own fields: frontends of every kind, families, source ranges, affinity, health checks, bad input.

Source: docs/reference.md "Service semantics"; kube-proxy v1.36 pkg/proxy/serviceport.go.
"""

import pytest
from msgspec.structs import replace

from kubeproxy.features import PROXY_NAME
from kubeproxy.model.addresses import Family, network_text
from kubeproxy.model.compile import skipped
from kubeproxy.model.objects import (
    ClientIPConfig,
    Labels,
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SessionAffinityConfig,
)
from kubeproxy.model.plan import NOTHING, FrontendKind, HealthCheck, Policies, Policy
from support.cluster_objects import HERE, address, dests, draining, endpoint, frontend_keys, key, parsed, service, world
from support.compiled import compile_service

CLUSTER, EXTERNAL = FrontendKind.CLUSTER, FrontendKind.EXTERNAL
LOADBALANCER, NODEPORT = FrontendKind.LOADBALANCER, FrontendKind.NODEPORT
V4, V6 = Family.IPV4, Family.IPV6


def compiled(subject, *slices, **more):
    return compile_service(subject, slices, world(**more))


def span(first, last):
    return address(first), address(last)


def only_plan(subject, **more):
    (plan,) = compiled(subject, **more).plans
    return plan


# -- eligible Services -------------------------------------------------------------------------------------------------

SKIPPED = {
    "headless": {"cluster_ip": "None", "cluster_ips": ["None"]},
    "headless, old API": {"cluster_ip": "None"},
    "ExternalName": {"type": "ExternalName"},
    "ExternalName with an address": {"type": "ExternalName", "cluster_ip": "10.96.0.1"},
    "no address yet": {"cluster_ip": "", "cluster_ips": []},
    "no address at all": {},
    "null lists": {"cluster_ips": None, "ports": None},
}


@pytest.mark.parametrize("case", SKIPPED)
def test_skipped_services_mean_nothing(case):
    spec = {"ports": [ServicePort(port=80)], "external_ips": ["203.0.113.1"]} | SKIPPED[case]
    subject = Service(ObjectMeta(name="web"), ServiceSpec(**spec))
    assert skipped(subject, world())
    assert compiled(subject) == NOTHING


@pytest.mark.parametrize(
    ("label", "name", "reason"),
    [
        (None, "", ""),
        ("", "", "by the label"),
        ("a", "", "by the label"),
        ("a", "a", ""),
        ("b", "a", "by the label service.kubernetes.io/service-proxy-name: 'b'"),
        (None, "a", "which lacks the label service.kubernetes.io/service-proxy-name"),
    ],
)
def test_the_label_of_the_proxy_decides_which_one_serves(label, name, reason):
    labels = Labels(service_proxy_name=label) if label is not None else None
    spec = ServiceSpec(cluster_ip="10.96.0.1", ports=[ServicePort(port=80)])
    node = PROXY_NAME.on(world(), name) if name else world()
    subject = Service(ObjectMeta(name="web", labels=labels), spec)
    assert (skipped(subject, node) == "") is (not reason)
    assert reason in skipped(subject, node)


def test_another_proxys_service_means_nothing():
    """The watch of the API server excludes such Services; a folder of manifests may contain one."""
    labels = Labels(service_proxy_name="")
    spec = ServiceSpec(cluster_ip="10.96.0.1", ports=[ServicePort(port=80)])
    assert compiled(Service(ObjectMeta(name="web", labels=labels), spec)) == NOTHING


def test_an_empty_spec_means_nothing():
    assert compiled(Service(ObjectMeta(name="web"))) == NOTHING


def test_the_old_field_is_enough():
    subject = Service(ObjectMeta(name="web"), ServiceSpec(cluster_ip="10.96.0.1", ports=[ServicePort(port=80)]))
    assert frontend_keys(only_plan(subject), CLUSTER) == {key("10.96.0.1:80")}


# -- frontends -----------------------------------------------------------------------------------------------------


def test_every_kind_of_frontend_in_one_service():
    subject = service(
        "web",
        "10.96.0.1",
        ports=[ServicePort(port=80, name="http", node_port=30080), ServicePort(port=53, name="dns", protocol="UDP")],
        external_ips=["203.0.113.1", "203.0.113.2"],
        ingress=["198.51.100.1"],
    )
    http, dns = compiled(subject).plans
    assert frontend_keys(http, CLUSTER) == {key("10.96.0.1:80")}
    assert frontend_keys(http, EXTERNAL) == {key("203.0.113.1:80"), key("203.0.113.2:80")}
    assert frontend_keys(http, LOADBALANCER) == {key("198.51.100.1:80")}
    assert frontend_keys(http, NODEPORT) == {key(":30080")}
    assert frontend_keys(dns, CLUSTER) == {key("10.96.0.1:53", "UDP")}
    assert frontend_keys(dns, NODEPORT) == set()
    assert [str(f) for f in http.frontends] == [
        "cluster 10.96.0.1 TCP 80",
        "external 203.0.113.1 TCP 80",
        "external 203.0.113.2 TCP 80",
        "loadbalancer 198.51.100.1 TCP 80",
        "nodeport nodePort TCP 30080",
    ]


def test_dual_stack_addresses_go_to_their_families():
    subject = service(
        "web",
        "fd00:10:96::1",
        "10.96.0.1",
        ports=[ServicePort(port=80, node_port=30080)],
        external_ips=["203.0.113.1", "2001:db8:1::1"],
        ingress=["2001:db8:2::1", "198.51.100.1"],
    )
    v4, v6 = compiled(subject).plans
    assert (v4.key.family, v6.key.family) == (V4, V6)
    assert {f.key for f in v4.frontends} == {
        key("10.96.0.1:80"),
        key("203.0.113.1:80"),
        key("198.51.100.1:80"),
        key(":30080"),
    }
    assert {f.key for f in v6.frontends} == {
        key("[fd00:10:96::1]:80"),
        key("[2001:db8:1::1]:80"),
        key("[2001:db8:2::1]:80"),
        key(":30080"),
    }


def test_no_plan_without_a_cluster_ip_of_the_family():
    subject = service("web", "10.96.0.1", external_ips=["2001:db8:1::1"])
    assert {plan.key.family for plan in compiled(subject).plans} == {V4}


@pytest.mark.parametrize("family", [V4, V6])
def test_a_single_stack_node_serves_its_family_only(family):
    subject = service("web", "10.96.0.1", "fd00:10:96::1")
    assert {plan.key.family for plan in compiled(subject, families=[family]).plans} == {family}


@pytest.mark.parametrize(
    ("ingress", "served"),
    [
        (LoadBalancerIngress(ip="198.51.100.1"), True),
        (LoadBalancerIngress(ip="198.51.100.1", ip_mode=""), True),
        (LoadBalancerIngress(ip="198.51.100.1", ip_mode="VIP"), True),
        (LoadBalancerIngress(ip="198.51.100.1", ip_mode="Proxy"), False),
        (LoadBalancerIngress(ip="198.51.100.1", ip_mode="Other"), False),
        (LoadBalancerIngress(), False),  # a hostname
        (LoadBalancerIngress(ip=""), False),
    ],
)
def test_load_balancer_addresses_are_served_in_vip_mode(ingress, served):
    found = compiled(service(ingress=[ingress]))
    assert bool(frontend_keys(found.plans[0], LOADBALANCER)) is served
    assert found.problems == ()


def test_an_address_given_twice_is_one_frontend():
    subject = service(external_ips=["203.0.113.1", "203.0.113.1"], ingress=["198.51.100.1", "198.51.100.1"])
    keys = [f.key for f in only_plan(subject).frontends]
    assert sorted(keys) == sorted([key("10.96.0.1:80"), key("203.0.113.1:80"), key("198.51.100.1:80")])


def test_stored_addresses_are_read_as_the_go_kube_proxy_reads_them():
    subject = service(
        "web", "010.096.0.01", external_ips=["::ffff:203.0.113.1", "0203.0.113.2"], ingress=["::ffff:c633:6401"]
    )
    found = compiled(subject, families=[V4])
    assert found.problems == ()
    (plan,) = found.plans
    assert frontend_keys(plan, CLUSTER) == {key("10.96.0.1:80")}
    assert frontend_keys(plan, EXTERNAL) == {key("203.0.113.1:80"), key("203.0.113.2:80")}
    assert frontend_keys(plan, LOADBALANCER) == {key("198.51.100.1:80")}


def test_external_ips_that_are_not_served_mean_nothing():
    """Gate AllowServiceExternalIPs=false: a user who may write Services cannot take other addresses (CVE-2020-8554)."""
    subject = service(
        external_ips=["203.0.113.1", "nonsense"], ingress=["198.51.100.1"], external_traffic_policy="Local"
    )
    (plan,) = compile_service(subject, (), replace(world(families=[V4]), external_ips="ignored")).plans
    assert [str(frontend) for frontend in plan.frontends] == [
        "cluster 10.96.0.1 TCP 80",
        "loadbalancer 198.51.100.1 TCP 80",
    ]


API_SERVER = address("192.0.2.10") + b"\x06" + (443).to_bytes(2, "big")


def beside_the_api_server(subject, *slices):
    return compile_service(subject, slices, replace(world(families=[V4]), api_servers=(API_SERVER,)))


def test_no_external_ip_hides_the_api_server_of_the_proxy():
    ports = [ServicePort(port=443), ServicePort(port=80, name="b")]
    subject = service("web", "10.96.0.1", ports=ports, external_ips=["192.0.2.10"])
    first, second = beside_the_api_server(subject).plans
    assert [frontend.kind for frontend in first.frontends] == [FrontendKind.CLUSTER]
    assert [frontend.kind for frontend in second.frontends] == [FrontendKind.CLUSTER, FrontendKind.EXTERNAL]
    (problem,) = beside_the_api_server(subject).problems
    assert problem.field == "spec.externalIPs"
    assert problem.reason == "192.0.2.10 port 443 is where this node reaches the API server; not served"


def test_the_service_of_the_api_server_may_have_its_address():
    subject = service("kubernetes", "10.96.0.1", ports=[ServicePort(port=443)], external_ips=["192.0.2.10"])
    assert len(beside_the_api_server(subject).plans[0].frontends) == 2


@pytest.mark.parametrize("endpoints", [0, 1])
def test_a_load_balancer_may_lead_to_the_api_server_but_not_refuse_it(endpoints):
    subject = service("web", "10.96.0.1", ports=[ServicePort(port=443)], ingress=["192.0.2.10"])
    slices = [parsed(endpoint("10.244.0.1"))] * endpoints
    found = beside_the_api_server(subject, *slices)
    assert len(found.plans[0].frontends) == 1 + endpoints
    assert len(found.problems) == 1 - endpoints


def test_an_external_ip_that_is_the_cluster_ip_stays_internal():
    plan = only_plan(service(external_ips=["10.96.0.1"], external_traffic_policy="Local"))
    assert [(f.kind, f.key) for f in plan.frontends] == [(CLUSTER, key("10.96.0.1:80"))]


def test_an_external_ip_that_is_the_load_balancers_keeps_its_source_ranges():
    subject = service(
        external_ips=["198.51.100.1"], ingress=["198.51.100.1"], load_balancer_source_ranges=["203.0.113.0/24"]
    )
    plan = only_plan(subject)
    (_, shared) = plan.frontends
    assert shared.key == key("198.51.100.1:80")
    assert plan.sources(shared) == (span("203.0.113.0", "203.0.113.255"),)


# -- source ranges -------------------------------------------------------------------------------------------------


SOURCE_CASES = {
    # ranges: (v4, v6); None is open to all
    "none": ([], None, None),
    "null": (None, None, None),
    "one": (["203.0.113.0/24"], [span("203.0.113.0", "203.0.113.255")], None),
    "host bits are cleared": (["203.0.113.77/24"], [span("203.0.113.0", "203.0.113.255")], None),
    "blanks around": ([" 203.0.113.0/24\t"], [span("203.0.113.0", "203.0.113.255")], None),
    "overlapping": (["203.0.113.0/24", "203.0.113.128/25"], [span("203.0.113.0", "203.0.113.255")], None),
    "adjoining": (["203.0.112.0/24", "203.0.113.0/24"], [span("203.0.112.0", "203.0.113.255")], None),
    "apart, unsorted": (
        ["203.0.113.0/24", "198.51.100.7/32"],
        [span("198.51.100.7", "198.51.100.7"), span("203.0.113.0", "203.0.113.255")],
        None,
    ),
    "/0": (["0.0.0.0/0"], None, None),
    "any /0 opens": (["203.0.113.0/24", "0.0.0.0/0"], None, None),
    "/0 with host bits": (["10.1.2.3/0"], None, None),
    "the other family only": (["2001:db8:5::/48"], None, [span("2001:db8:5::", "2001:db8:5:ffff:ffff:ffff:ffff:ffff")]),
    "each its own": (
        ["203.0.113.0/24", "2001:db8:5::1/128"],
        [span("203.0.113.0", "203.0.113.255")],
        [span("2001:db8:5::1", "2001:db8:5::1")],
    ),
    "/0 opens its own family only": (["::/0", "203.0.113.0/24"], [span("203.0.113.0", "203.0.113.255")], None),
    "unreadable stays closed": (["nonsense"], [], []),
    "unreadable beside a readable one": (["203.0.113.0/24", "x"], [span("203.0.113.0", "203.0.113.255")], []),
    "unreadable beside /0": (["x", "0.0.0.0/0"], None, []),
    "an empty entry is unreadable": ([""], [], []),
    "an address is no range": (["203.0.113.1"], [], []),
    "a zone is unreadable": (["fe80::1%eth0/64"], [], []),
    "too long a prefix": (["203.0.113.0/33"], [], []),
    "a netmask is no prefix": (["203.0.113.0/255.255.255.0"], [], []),
    "an open netmask opens nothing": (["203.0.113.0/0.0.0.0"], [], []),
    "leading zeros": (["0203.000.113.00/024"], [span("203.0.113.0", "203.0.113.255")], None),
    "a mapped network": (["::ffff:203.0.113.0/120"], [span("203.0.113.0", "203.0.113.255")], None),
    "all mapped addresses": (["::ffff:0.0.0.0/96", "203.0.113.0/24"], None, None),
    "the edges of the address space": (
        ["255.255.255.255/32", "0.0.0.0/8"],
        [span("0.0.0.0", "0.255.255.255"), span("255.255.255.255", "255.255.255.255")],
        None,
    ),
}


@pytest.mark.parametrize("case", SOURCE_CASES)
def test_source_ranges(case):
    ranges, *expected = SOURCE_CASES[case]
    subject = service(
        "web",
        "10.96.0.1",
        "fd00:10:96::1",
        ports=[ServicePort(port=80, node_port=30080)],
        external_ips=["198.51.100.9", "2001:db8:1::9"],
        ingress=["198.51.100.1", "2001:db8:1::1"],
        load_balancer_source_ranges=ranges,
    )
    for plan, wanted in zip(compiled(subject).plans, expected, strict=True):
        by_kind = {f.kind: plan.sources(f) for f in plan.frontends}
        assert by_kind[LOADBALANCER] == (None if wanted is None else tuple(wanted))
        assert {kind for kind, sources in by_kind.items() if sources is not None} <= {LOADBALANCER}


@pytest.mark.parametrize(
    ("ranges", "allowed"),
    [
        (["192.0.2.0/24"], [span("192.0.2.0", "192.0.2.255"), span("198.51.100.1", "198.51.100.1")]),
        (["192.0.2.1/32"], [span("192.0.2.1", "192.0.2.1"), span("198.51.100.1", "198.51.100.1")]),
        (["192.0.2.2/32"], [span("192.0.2.2", "192.0.2.2")]),
        (
            ["192.0.2.0/24", "198.51.100.0/24"],
            [span("192.0.2.0", "192.0.2.255"), span("198.51.100.0", "198.51.100.255")],
        ),
    ],
)
def test_a_range_with_the_node_in_it_lets_the_address_itself_in(ranges, allowed):
    plan = only_plan(service(ingress=["198.51.100.1"], load_balancer_source_ranges=ranges))
    (balancer,) = [f for f in plan.frontends if f.kind is LOADBALANCER]
    assert plan.sources(balancer) == tuple(allowed)


def test_addresses_of_one_service_let_each_other_in_when_the_node_is_let_in():
    """All of these addresses are on an interface of the node then, and the kernel may select any of them as source."""
    plan = only_plan(service(ingress=["198.51.100.1", "198.51.100.9"], load_balancer_source_ranges=["192.0.2.1/32"]))
    allowed = (
        span("192.0.2.1", "192.0.2.1"),
        span("198.51.100.1", "198.51.100.1"),
        span("198.51.100.9", "198.51.100.9"),
    )
    assert [plan.sources(f) for f in plan.frontends] == [None, allowed, allowed]


# -- policies ------------------------------------------------------------------------------------------------------

ALL, HERE_ONLY = Policy.CLUSTER, Policy.LOCAL


@pytest.mark.parametrize(("internal", "first"), [(None, ALL), ("", ALL), ("Cluster", ALL), ("Local", HERE_ONLY)])
@pytest.mark.parametrize(("external", "second"), [(None, ALL), ("", ALL), ("Cluster", ALL), ("Local", HERE_ONLY)])
def test_the_plan_carries_the_policies(internal, external, first, second):
    plan = only_plan(service(internal_traffic_policy=internal, external_traffic_policy=external))
    assert plan.policies == Policies(first, second)


def test_equal_policies_are_one_object():
    one, two = (only_plan(service(name, external_traffic_policy="Local")).policies for name in ("one", "two"))
    assert one is two


# -- affinity ------------------------------------------------------------------------------------------------------


def affinity(seconds):
    return SessionAffinityConfig(ClientIPConfig(seconds))


@pytest.mark.parametrize(
    ("kind", "config", "seconds", "fields"),
    [
        (None, None, 0, []),
        ("", None, 0, []),
        ("None", affinity(30), 0, []),
        ("ClientIP", None, 10800, []),
        ("ClientIP", SessionAffinityConfig(), 10800, []),
        ("ClientIP", affinity(None), 10800, []),
        ("ClientIP", affinity(1), 1, []),
        ("ClientIP", affinity(86400), 86400, []),
        ("ClientIP", affinity(0), 10800, ["spec.sessionAffinityConfig.clientIP.timeoutSeconds"]),
        ("ClientIP", affinity(-1), 10800, ["spec.sessionAffinityConfig.clientIP.timeoutSeconds"]),
        ("ClientIP", affinity(86401), 10800, ["spec.sessionAffinityConfig.clientIP.timeoutSeconds"]),
        ("Cookie", affinity(30), 0, ["spec.sessionAffinity"]),
    ],
)
def test_session_affinity(kind, config, seconds, fields):
    found = compiled(service(session_affinity=kind, session_affinity_config=config))
    assert found.plans[0].affinity == seconds
    assert [p.field for p in found.problems] == fields


# -- health checks -------------------------------------------------------------------------------------------------

LOCAL_BALANCER = {"type": "LoadBalancer", "external_traffic_policy": "Local", "health_check_node_port": 32000}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"type": "NodePort"}, False),
        ({"type": None}, False),
        ({"external_traffic_policy": "Cluster"}, False),
        ({"external_traffic_policy": None}, False),
        ({"health_check_node_port": None}, False),
        ({"health_check_node_port": 0}, False),
    ],
)
def test_services_with_a_health_check(change, expected):
    health = compiled(service(**(LOCAL_BALANCER | change)), parsed(endpoint("10.244.0.1", HERE))).health
    assert health == (HealthCheck(32000, ((V4, 1),)) if expected else None)


def test_the_health_check_counts_ready_addresses_of_this_node_once():
    slices = [
        parsed(
            endpoint("10.244.0.1", HERE),
            endpoint("10.244.0.2", HERE, ready=False),
            draining("10.244.0.3", HERE),
            endpoint("10.244.1.1"),
        ),
        parsed(endpoint("10.244.0.1", HERE), endpoint("10.244.0.4", HERE), name="web-2"),
        parsed(endpoint("fd00:10:244::1", HERE), name="web-6", family="IPv6"),
    ]
    subject = service("web", "10.96.0.1", "fd00:10:96::1", **LOCAL_BALANCER)
    assert compiled(subject, *slices).health == HealthCheck(32000, ((V4, 2), (V6, 1)))


@pytest.mark.parametrize(
    ("cluster_ips", "node_families", "counts"),
    [
        (("10.96.0.1", "fd00::1"), (V4, V6), ((V4, 2), (V6, 1))),
        (("fd00::1", "10.96.0.1"), (V4, V6), ((V4, 2), (V6, 1))),
        (("fd00::1",), (V4, V6), ((V6, 1),)),
        (("fd00::1", "10.96.0.1"), (V4,), ((V4, 2),)),
        (("10.96.0.1",), (V4, V6), ((V4, 2),)),
    ],
)
def test_the_health_check_counts_in_each_family_of_the_service(cluster_ips, node_families, counts):
    slices = [
        parsed(endpoint("10.244.0.1", HERE), endpoint("10.244.0.2", HERE)),
        parsed(endpoint("fd00:10:244::1", HERE), name="web-6", family="IPv6"),
    ]
    subject = service("web", *cluster_ips, **LOCAL_BALANCER)
    check = compiled(subject, *slices, families=node_families).health
    assert check == HealthCheck(32000, counts)
    assert [check.local_endpoints(family) for family in (V4, V6)] == [dict(counts).get(family) for family in (V4, V6)]


def test_endpoints_without_a_port_are_not_counted():
    slices = [parsed(endpoint("10.244.0.1", HERE), ports=[])]
    assert compiled(service(**LOCAL_BALANCER), *slices).health == HealthCheck(32000, ((V4, 0),))


@pytest.mark.parametrize("change", [{"ports": []}, {"cluster_ips": ["fd00::1"], "cluster_ip": "fd00::1"}])
def test_no_health_check_without_a_plan(change):
    subject = service(**LOCAL_BALANCER)
    subject = replace(subject, spec=replace(subject.spec, **change))
    assert compiled(subject, families=[V4]).health is None


# -- bad input -----------------------------------------------------------------------------------------------------

GOOD_PORT = ServicePort(port=443, name="good")
LONG = "x" * 100_000

BAD_FIELDS = {
    "port zero": ({"ports": [ServicePort(port=0), GOOD_PORT]}, ["spec.ports[0].port"]),
    "port negative": ({"ports": [ServicePort(port=-80), GOOD_PORT]}, ["spec.ports[0].port"]),
    "port too big": ({"ports": [ServicePort(port=70000), GOOD_PORT]}, ["spec.ports[0].port"]),
    "port enormous": ({"ports": [ServicePort(port=10**30), GOOD_PORT]}, ["spec.ports[0].port"]),
    "protocol unknown": ({"ports": [ServicePort(port=80, protocol="ICMP"), GOOD_PORT]}, ["spec.ports[0].protocol"]),
    "protocol in lower case": (
        {"ports": [ServicePort(port=80, protocol="tcp"), GOOD_PORT]},
        ["spec.ports[0].protocol"],
    ),
    "protocol endless": ({"ports": [ServicePort(port=80, protocol=LONG), GOOD_PORT]}, ["spec.ports[0].protocol"]),
    "node port too big": (
        {"ports": [ServicePort(port=443, name="good", node_port=65536)]},
        ["spec.ports[0].nodePort"],
    ),
    "node port negative": ({"ports": [ServicePort(port=443, name="good", node_port=-1)]}, ["spec.ports[0].nodePort"]),
    "port number twice": ({"ports": [GOOD_PORT, ServicePort(port=443, name="other")]}, ["spec.ports[1]"]),
    "port name twice": ({"ports": [GOOD_PORT, ServicePort(port=444, name="good")]}, ["spec.ports[1]"]),
    "external IP": ({"external_ips": ["nonsense", "203.0.113.1"]}, ["spec.externalIPs"]),
    "external IP empty": ({"external_ips": [""]}, ["spec.externalIPs"]),
    "external IP unspecified": ({"external_ips": ["0.0.0.0", "::"]}, ["spec.externalIPs", "spec.externalIPs"]),
    "external IP with zone": ({"external_ips": ["fe80::1%eth0"]}, ["spec.externalIPs"]),
    "external IP mapped and unspecified": ({"external_ips": ["::ffff:0.0.0.0"]}, ["spec.externalIPs"]),
    "external IP endless": ({"external_ips": [LONG]}, ["spec.externalIPs"]),
    "external IP not ASCII": ({"external_ips": ["\uff11.2.3.4"]}, ["spec.externalIPs"]),
    "ingress": ({"ingress": ["nonsense"]}, ["status.loadBalancer.ingress"]),
    "source range": ({"load_balancer_source_ranges": ["a", "10.0.0.0/8"]}, ["spec.loadBalancerSourceRanges[0]"]),
    "source range endless": ({"load_balancer_source_ranges": [LONG]}, ["spec.loadBalancerSourceRanges[0]"]),
    "internal policy": ({"internal_traffic_policy": "local"}, ["spec.internalTrafficPolicy"]),
    "internal policy endless": ({"internal_traffic_policy": LONG}, ["spec.internalTrafficPolicy"]),
    "external policy": ({"external_traffic_policy": "Global"}, ["spec.externalTrafficPolicy"]),
    "affinity endless": ({"session_affinity": LONG}, ["spec.sessionAffinity"]),
    "health check": ({**LOCAL_BALANCER, "health_check_node_port": 70000}, ["spec.healthCheckNodePort"]),
    "health check negative": ({**LOCAL_BALANCER, "health_check_node_port": -1}, ["spec.healthCheckNodePort"]),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_bad_field_is_named_and_the_rest_of_the_service_works(case):
    change, fields = BAD_FIELDS[case]
    subject = service(**({"ports": [GOOD_PORT]} | change))
    found = compiled(subject, families=[V4])
    assert [p.field for p in found.problems] == fields
    assert all(p.reason and len(p.reason) < 250 for p in found.problems)
    (plan,) = found.plans
    assert frontend_keys(plan, CLUSTER) == {key("10.96.0.1:443")}
    assert frontend_keys(plan, NODEPORT) == set()
    assert plan.internal == only_plan(service(), families=[V4]).internal


@pytest.mark.parametrize(
    ("cluster_ips", "fields", "served"),
    [
        (["nonsense"], ["spec.clusterIPs"], set()),
        (["nonsense", "10.96.0.1"], ["spec.clusterIPs"], {key("10.96.0.1:80")}),
        (["10.96.0.1", "None"], ["spec.clusterIPs"], {key("10.96.0.1:80")}),
        (["0.0.0.0"], ["spec.clusterIPs"], set()),
        (["10.96.0.1", "10.96.0.2"], [], {key("10.96.0.1:80")}),
    ],
)
def test_bad_cluster_ips(cluster_ips, fields, served):
    found = compiled(service("web", *cluster_ips))
    assert [p.field for p in found.problems] == fields
    assert {f.key for plan in found.plans for f in plan.frontends} == served


@pytest.mark.parametrize("ports", [None, []])
def test_a_service_without_ports_has_no_plans(ports):
    assert compiled(service(ports=ports)) == NOTHING


def test_the_same_number_in_two_protocols_is_no_repetition():
    ports = [
        ServicePort(port=53, name="a", protocol="UDP", node_port=30053),
        ServicePort(port=53, name="b", protocol="TCP", node_port=30053),
    ]
    found = compiled(service(ports=ports))
    assert found.problems == ()
    assert [frontend_keys(plan, NODEPORT) for plan in found.plans] == [{key(":30053", "UDP")}, {key(":30053")}]


def test_the_same_node_port_twice_in_a_service_belongs_to_the_first_port():
    ports = [ServicePort(port=80, name="a", node_port=30080), ServicePort(port=81, name="b", node_port=30080)]
    found = compiled(service(ports=ports), families=[V4])
    assert [p.field for p in found.problems] == ["spec.ports[1].nodePort"]
    assert [frontend_keys(plan, NODEPORT) for plan in found.plans] == [{key(":30080")}, set()]
    assert [frontend_keys(plan, CLUSTER) for plan in found.plans] == [{key("10.96.0.1:80")}, {key("10.96.0.1:81")}]


def test_null_everywhere_is_harmless():
    spec = ServiceSpec(cluster_ip="10.96.0.1", cluster_ips=None, ports=None, external_ips=None)
    for status in (None, ServiceStatus(), ServiceStatus(LoadBalancerStatus())):
        assert compiled(Service(ObjectMeta(name="web"), spec, status)) == NOTHING


def test_endpoints_of_the_plan_are_sorted_and_unique():
    entries = [endpoint(f"10.244.0.{n}", HERE) for n in (9, 3, 7, 3)]
    plan = compiled(service(), parsed(*entries), families=[V4]).plans[0]
    assert plan.cluster == plan.serving == dests("10.244.0.3:8080", "10.244.0.7:8080", "10.244.0.9:8080")


# -- for some backends only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "texts"),
    [
        ([], None),
        (["203.0.113.0/24", "0.0.0.0/0"], None),
        (["203.0.113.7/24", "10.0.0.0/8", "10.1.0.0/16"], ("203.0.113.0/24", "10.0.0.0/8", "10.1.0.0/16")),
        (["203.0.113.0/24", "192.0.2.0/24"], ("203.0.113.0/24", "192.0.2.0/24", "198.51.100.1/32")),
        (["nonsense"], ()),
    ],
    ids=["none", "all", "as written, in order", "the node, so the address itself", "unreadable"],
)
def test_source_ranges_as_written(ranges, texts):
    ranges = only_plan(service(ingress=["198.51.100.1"], load_balancer_source_ranges=ranges)).source_ranges
    assert (None if ranges is None else tuple(map(network_text, ranges))) == texts


def test_source_ranges_without_a_balancer_are_none():
    assert only_plan(service(load_balancer_source_ranges=["203.0.113.0/24"])).source_ranges is None


@pytest.mark.parametrize(
    ("change", "port"), [({}, 32000), ({"health_check_node_port": 70000}, 0), ({"type": "NodePort"}, 0)]
)
def test_every_port_has_the_health_check_port(change, port):
    assert only_plan(service(**LOCAL_BALANCER | change)).health_port == port
