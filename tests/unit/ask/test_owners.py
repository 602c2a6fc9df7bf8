"""New connections by Service: added, changed and deleted frontends, and NodePorts on the node's addresses."""

from __future__ import annotations

from kubeproxy.ask.flows.owners import Owners, PortOwner, keys_by_port
from kubeproxy.ask.flows.sampling import MOST_ENDPOINTS, MOST_SERVICES, Beginnings
from kubeproxy.kernel.conntrack.tracked import Tracked
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import Annotations, ServicePort
from kubeproxy.model.planner import Planner
from support.cluster_objects import address, dest, key, service, world

HTTP = "http/TCP/IPv4"
NODE = address("192.0.2.1")
NODEPORT = bytes([Family.IPV4]) + key(":30080")


def entry(target: str, server: str = "10.244.0.1:80") -> Tracked:
    return Tracked(key(target), dest("10.9.9.9:1000"), dest(server), 0, 0, b"")


def owners() -> Owners:
    return Owners({Family.IPV4: frozenset({NODE})})


def test_frontends_come_change_and_go():
    known = owners()
    known.put("default/web", {HTTP: (key("10.96.0.1:80"), NODEPORT)})
    assert known.of(key("10.96.0.1:80")) == PortOwner("default/web", HTTP)
    assert known.of(key("192.0.2.1:30080")) == PortOwner("default/web", HTTP)
    assert known.of(key("192.0.2.2:30080")) is None  # not an address of NodePorts
    assert known.of(key("10.96.0.1:80", "UDP")) is None
    assert known.of(key("[2001:db8::1]:30080")) is None
    known.put("default/web", {HTTP: (key("10.96.0.2:80"),)})
    assert [known.of(key(text)) for text in ("10.96.0.1:80", "192.0.2.1:30080")] == [None, None]
    known.put("default/other", {HTTP: (key("10.96.0.2:80"),)})  # announced before the previous owner's loss
    known.put("default/web", {})
    assert known.of(key("10.96.0.2:80")) == PortOwner("default/other", HTTP)


def test_a_port_of_a_family_is_named_with_its_addresses():
    both = service(
        "dns", "10.96.0.10", "fd00::10", ports=[ServicePort(port=53, name="d", protocol="UDP", node_port=30053)]
    )
    planner = Planner(world())
    planner.apply([Replaced("services", [both])])
    planner.take()
    (compiled,) = planner.compiled.values()
    front = key("10.96.0.10:53", "UDP"), bytes([Family.IPV4]) + key(":30053", "UDP")
    assert keys_by_port(compiled.plans)["d/UDP/IPv4"] == front
    assert [*keys_by_port(compiled.plans)] == ["d/UDP/IPv4", "d/UDP/IPv6"]


RANGE = "10000-20000/UDP/IPv4"


def ranged(text="10000-20000/udp, 443/tcp"):
    """Return the keys of a Service with ranges at two addresses."""
    annotations = Annotations(port_ranges=text)
    ports = [ServicePort(port=80, name="http", node_port=30080)]
    spec = {"external_ips": ["203.0.113.1"], "annotations": annotations, "ports": ports}
    planner = Planner(world())
    planner.apply([Replaced("services", [service("web", "10.96.0.1", **spec)])])
    planner.take()
    (compiled,) = planner.compiled.values()
    return keys_by_port(compiled.plans)


def test_a_port_of_a_range_belongs_to_the_service():
    known = owners()
    known.put("default/web", ranged())
    ours = known.of(key("10.96.0.1:10000", "UDP"))
    assert (ours.service, ours.port) == ("default/web", RANGE)
    for text in ("10.96.0.1:20000", "203.0.113.1:12345"):
        assert known.of(key(text, "UDP")) == ours
    for text in ("10.96.0.1:9999", "10.96.0.1:20001", "10.96.0.2:12345", "192.0.2.1:12345"):
        assert known.of(key(text, "UDP")) is None
    assert known.of(key("10.96.0.1:12345")) is None
    assert known.of(key("203.0.113.1:443")).port == "443/TCP/IPv4"
    assert known.of(key("10.96.0.1:80")).port == HTTP
    known.put("default/other", {HTTP: (NODEPORT,)})  # a NodePort takes precedence over a range
    known.put("default/web", ranged("15000-25000/udp"))
    assert known.of(key("10.96.0.1:12345", "UDP")) is None
    assert known.of(key("10.96.0.1:25000", "UDP")).port == "15000-25000/UDP/IPv4"
    known.put("default/web", {})
    assert known.of(key("10.96.0.1:15000", "UDP")) is None


def test_an_endpoint_of_a_range_is_counted_by_its_address():
    known = owners()
    known.put("default/web", ranged())
    counts = Beginnings(known, endpoints=True)
    for port in range(10000, 10003):
        counts.add(
            Tracked(key(f"10.96.0.1:{port}", "UDP"), dest("10.9.9.9:1"), dest(f"10.244.0.1:{port}"), 0, 0, b""), 1
        )
    counts.add(entry("10.96.0.1:80"), 1)
    shares = {RANGE: {"10.244.0.1": 0.75}, HTTP: {"10.244.0.1:80": 0.25}}
    assert counts.take(1.0) == {"default/web": {"new": 4.0, "endpoints": shares}}


def test_connections_are_counted_with_their_shares():
    known = owners()
    known.put("default/web", {HTTP: (key("10.96.0.1:80"),), "m/TCP/IPv4": (key("10.96.0.1:81"),)})
    counts = Beginnings(known, endpoints=True)
    for server, weight in (("10.244.0.1:80", 1), ("10.244.0.2:80", 2), ("10.244.0.1:80", 1)):
        counts.add(entry("10.96.0.1:80", server), weight)
    counts.add(entry("10.96.0.1:81", "10.244.0.1:80"), 4)
    counts.add(entry("10.96.0.9:80"), 1)
    shares = {"m/TCP/IPv4": {"10.244.0.1:80": 0.5}, HTTP: {"10.244.0.1:80": 0.25, "10.244.0.2:80": 0.25}}
    assert counts.take(2.0) == {"default/web": {"new": 4.0, "endpoints": shares}}
    assert counts.take(2.0) == {}


def test_the_busiest_service_ports_are_reported():
    known = owners()
    counts = Beginnings(known, endpoints=True)
    for number in range(MOST_SERVICES + 1):
        target = f"10.96.{number // 256}.{number % 256}:80"
        known.put(f"default/s{number}", {HTTP: (key(target),)})
        counts.add(entry(target), number + 1)
    for number in range(MOST_ENDPOINTS + 5):
        counts.add(entry("10.96.0.200:80", f"10.244.1.{number}:80"), 1000)
    found = counts.take(1.0)
    assert len(found) == MOST_SERVICES
    assert "default/s0" not in found
    assert len(found["default/s200"]["endpoints"][HTTP]) == MOST_ENDPOINTS


def test_endpoints_are_unknown_in_modes_that_end_connections_at_the_proxy():
    known = owners()
    known.put("default/web", {HTTP: (key("10.96.0.1:80"),)})
    counts = Beginnings(known, endpoints=False)
    counts.add(entry("10.96.0.1:80"), 4)
    assert counts.take(1.0) == {"default/web": {"new": 4.0, "endpoints": {}}}
