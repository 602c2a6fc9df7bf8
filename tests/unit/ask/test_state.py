"""/debug/state: its text for a Service in each state, its queries, and that it never blocks the event loop."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.ask import state as module
from kubeproxy.ask.state import state_page
from kubeproxy.backends import iptables
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.objects import (
    Annotations,
    EndpointConditions,
    EndpointPort,
    EndpointSlice,
    Labels,
    LoadBalancerIngress,
    LoadBalancerStatus,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    ServiceStatus,
    SliceEndpoint,
)
from kubeproxy.model.plan import NOTHING, Detector, FamilyGlobals, Globals
from kubeproxy.model.planner import Change, Planner
from kubeproxy.release import build
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.http import Request
from support.answers import valid
from support.cluster_objects import key
from support.snapshots import snapshot

WORLD = Globals(
    "node-a",
    "zone-a",
    ipv4=FamilyGlobals(Detector("network", "10.244.0.0/16"), (b"\xc0\0\2\1",), (b"\xc0\0\2\1",)),
    ipv6=FamilyGlobals(nodeport_ips=None),
)


def service(name, number=1, version="1", labels=None, **spec):
    spec = {"cluster_ip": f"10.96.0.{number}", "ports": [ServicePort(port=80, name="http")]} | spec
    balanced = spec.get("type") == "LoadBalancer"
    status = ServiceStatus(LoadBalancerStatus([LoadBalancerIngress("192.0.2.9")])) if balanced else None
    meta = ObjectMeta(name=name, namespace="default", resource_version=version, labels=labels)
    return Service(meta, ServiceSpec(**spec), status)


def endpoints(name, *addresses, version="1", draining=(), proxy_name=None, piece="x", weight=None):
    found = [SliceEndpoint([address], None, "node-a" if address.endswith(".1") else "node-b") for address in addresses]
    found += [SliceEndpoint([address], EndpointConditions(False, True, True), "node-b") for address in draining]
    labels = Labels(service_name=name, service_proxy_name=proxy_name)
    meta = ObjectMeta(
        name=f"{name}-{piece}",
        namespace="default",
        resource_version=version,
        labels=labels,
        annotations=Annotations(weight=weight),
    )
    return EndpointSlice(meta, "IPv4", found, [EndpointPort(8080, "http")])


def resource_of(obj):
    return "services" if isinstance(obj, Service) else "endpointslices"


class Kit:
    """A planner with Services, and the page that shows its state."""

    def __init__(self, *objects):
        self.planner = Planner(WORLD)
        self.queued = {}
        self.local_addresses = {}
        self.families = {family: FamilyStanding(family, 950.0, 900.0) for family in Family}
        self.health = ProxyHealth(ProxyMetrics(), 30.0, wall_clock=lambda: 1795238047.5)
        self.state = state_page(snapshot(self.planner, engine=self, health=self.health))
        self.planner.apply([Replaced("services", [], frozenset()), Replaced("endpointslices", [], frozenset())])
        self.apply(*objects)

    @property
    def standings(self):
        return tuple(self.families.values())

    def apply(self, *objects):
        self.planner.apply([Upserted(resource_of(one), one) for one in objects])
        self.planner.take()

    def committed(self, name):
        change = self.queued.get(name)
        return (self.planner.compiled.get(name, NOTHING) if change is None else change.before).plans

    def ask(self, query="", accept=""):
        async def read(pieces):
            return b"".join([piece async for piece in pieces])

        response = self.state(Request("GET", "/debug/state", query, accept))
        body = response.body if isinstance(response.body, bytes) else asyncio.run(read(response.body))
        return response.status, body.decode()

    def page(self, query=""):
        status, body = self.ask(query)
        assert status == 200, body
        return valid("state", body)

    def one(self, name="web"):
        (found,) = self.page(f"namespace=default&name={name}")["services"]
        return found


WEB = service(
    "web",
    version="7",
    type="LoadBalancer",
    ports=[ServicePort(port=80, name="http", node_port=30080)],
    external_traffic_policy="Local",
    health_check_node_port=30081,
    load_balancer_source_ranges=["10.0.0.0/8", "198.51.100.1/32"],
    session_affinity="ClientIP",
)
WEB_ENDPOINTS = endpoints("web", "10.244.0.1", "10.244.1.2", version="8", draining=("10.244.1.3",))
OPEN = {"fromPods": "endpoints", "fromNode": "endpoints, masqueraded", "fromOutside": "local endpoints"}


def unready(name, count, terminating=0):
    ends = [SliceEndpoint([f"10.244.0.{n + 1}"], EndpointConditions(ready=False)) for n in range(count)]
    gone = EndpointConditions(ready=False, serving=False, terminating=True)
    ends += [SliceEndpoint([f"10.244.1.{n + 1}"], gone) for n in range(terminating)]
    return replace(endpoints(name), endpoints=ends)


@pytest.mark.parametrize(
    ("ports", "reason"),
    [
        ([], "no endpoint has a port named web (TCP)"),
        ([EndpointPort(8080, "http")], "no endpoint has a port named web (TCP)"),
        ([EndpointPort(8080, "web", "UDP")], "no endpoint has a port named web (TCP)"),
        ([EndpointPort(8080, "web")], None),
    ],
)
def test_a_named_target_port_that_no_container_has_is_the_reason_for_no_endpoints(ports, reason):
    slices = replace(endpoints("web", "10.244.0.1"), ports=ports)
    kit = Kit(service("web", ports=[ServicePort(port=80, name="web")]), slices)
    (port,) = kit.one()["ports"]
    assert port.get("reason") == reason
    assert bool(port["endpoints"]) == (reason is None)
    assert ("    endpoints    none (x): no endpoint has a port named web (TCP)\n" in kit.ask("format=text")[1]) == bool(
        reason
    )


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        ([], "no EndpointSlice has an IPv4 endpoint: spec.selector matches no pod, or is missing"),
        ([endpoints("web")], "no EndpointSlice has an IPv4 endpoint: spec.selector matches no pod, or is missing"),
        ([unready("web", 2)], "2 are not ready"),
        ([unready("web", 1, terminating=1)], "1 is not ready, 1 is terminating"),
    ],
)
def test_slices_show_why_a_service_has_no_endpoints(slices, reason):
    kit = Kit(service("web"), *slices)
    assert kit.one()["ports"][0]["reason"] == reason
    assert f"    endpoints    none (x): {reason}\n" in kit.ask("format=text")[1]


def test_a_programmed_service():
    kit = Kit(WEB, WEB_ENDPOINTS)
    assert kit.one() == {
        "namespace": "default",
        "name": "web",
        "state": "programmed",
        "resourceVersion": "7",
        "slices": {"web-x": "8"},
        "ports": [
            {
                "name": "http",
                "protocol": "TCP",
                "family": "IPv4",
                "frontends": [
                    {
                        "kind": "cluster",
                        "address": "10.96.0.1:80",
                        "fromPods": "endpoints",
                        "fromNode": "endpoints, masqueraded",
                        "fromOutside": "endpoints, masqueraded",
                    },
                    {
                        "kind": "loadbalancer",
                        "address": "192.0.2.9:80",
                        **OPEN,
                        "sources": ["10.0.0.0/8", "198.51.100.1/32"],
                    },
                    {"kind": "nodeport", "address": "*:30080", **OPEN},
                ],
                "endpoints": ["10.244.0.1:8080", "10.244.1.2:8080"],
                "localEndpoints": ["10.244.0.1:8080"],
                "otherEndpoints": ["10.244.1.3:8080"],
                "affinitySeconds": 10800,
            }
        ],
        "healthCheck": {"port": 30081, "localEndpoints": {"IPv4": 1}},
    }


def test_the_nodes_own_connections_to_a_closed_external_ip_are_not_refused_in_every_mode():
    kit = Kit(service("web", external_ips=["198.51.100.9", "192.0.2.1"]))
    kit.local_addresses = {Family.IPV4: [b"\xc0\0\2\1"]}
    mode = SimpleNamespace(name="iptables", habits=iptables.MODE.habits)
    (port,) = module.service(snapshot(kit.planner, kit.local_addresses, mode, engine=kit), ("default", "web"))["ports"]
    assert {one["address"]: one["fromNode"] for one in port["frontends"]} == {
        "10.96.0.1:80": "reject",
        "198.51.100.9:80": "not handled",
        "192.0.2.1:80": "reject",
    }
    (port,) = kit.one()["ports"]
    assert {one["fromNode"] for one in port["frontends"]} == {"reject"}


def test_weights_and_drained_endpoints():
    slices = [
        endpoints("web", "10.244.0.1", "10.244.1.2"),
        endpoints("web", "10.244.1.3", piece="y", weight="5"),
        endpoints("web", "10.244.1.4", piece="z", weight="0"),
    ]
    kit = Kit(service("web"), *slices)
    (port,) = kit.one()["ports"]
    assert port["weights"] == {"10.244.0.1:8080": 100, "10.244.1.2:8080": 100, "10.244.1.3:8080": 5}
    assert port["drainedEndpoints"] == ["10.244.1.4:8080"]
    _, text = kit.ask("format=text")
    assert "endpoints    10.244.0.1:8080 (100) 10.244.1.2:8080 (100) 10.244.1.3:8080 (5)" in text
    assert "drained      10.244.1.4:8080" in text


def test_ejected_endpoints_with_their_reasons():
    web = service("web")
    web = replace(web, metadata=replace(web.metadata, annotations=Annotations(eject="on")))
    kit = Kit(web, endpoints("web", "10.244.0.1", "10.244.1.2"))
    assert "ejectedEndpoints" not in kit.one()["ports"][0]
    kit.planner.mark(kit.planner.ejections.failed(key("10.244.1.2:8080"), "connection refused", 0.0, 1e9))
    kit.planner.take()
    (port,) = kit.one()["ports"]
    assert port["ejectedEndpoints"] == {"10.244.1.2:8080": "connection refused, since 2001-09-09T01:46:40Z"}
    assert port["endpoints"] == ["10.244.0.1:8080"]
    assert "otherEndpoints" not in port
    _, text = kit.ask("format=text")
    assert "ejected      10.244.1.2:8080 (connection refused, since 2001-09-09T01:46:40Z)" in text


def test_the_node():
    kit = Kit(WEB)
    kit.health.updated("IPv4")
    kit.families[Family.IPV6] = FamilyStanding(Family.IPV6, refusal="no memory")
    page = kit.page("limit=0")
    assert page["version"] == build().name
    del page["services"], page["version"], page["unready"]
    assert page == {
        "schemaVersion": 1,
        "mode": "nftables",
        "node": "node-a",
        "zone": "zone-a",
        "ready": True,
        "families": {
            "IPv4": {
                "state": "whole",
                "wholeSince": "1970-01-01T00:15:00.000000Z",
                "lastSeenWhole": "1970-01-01T00:15:50.000000Z",
                "refused": None,
                "differs": None,
                "lastSynced": "2026-11-21T05:14:07.500000Z",
                "nodeAddresses": ["192.0.2.1"],
                "nodePortAddresses": ["192.0.2.1"],
                "podTraffic": "from 10.244.0.0/16",
            },
            "IPv6": {
                "state": "refused",
                "wholeSince": None,
                "lastSeenWhole": None,
                "refused": "no memory",
                "differs": None,
                "lastSynced": None,
                "nodeAddresses": [],
                "nodePortAddresses": "all but loopback",
                "podTraffic": "unknown",
            },
        },
        "serviceCount": 1,
        "pendingCount": 0,
        "continue": None,
    }


def test_states():
    kit = Kit(service("web", version="1"), endpoints("web", "10.244.0.1"))
    kit.apply(service("name", type="ExternalName"), service("bad", 2, ports=[ServicePort(port=0)]))
    assert kit.one("name")["state"] == "ignored"
    assert kit.one("bad")["problems"] == ["spec.ports[0].port: 0 is not between 1 and 65535; port skipped"]
    before = kit.planner.compiled["default", "web"]
    # Received, and not yet compiled: the kernel has older versions.
    kit.planner.apply([Upserted("endpointslices", endpoints("web", "10.244.0.9", version="5"))])
    found = kit.one()
    assert (found["state"], found["slices"]) == ("pending", {"web-x": "5"})
    assert "ports" not in found
    assert found["committed"][0]["endpoints"] == ["10.244.0.1:8080"]
    # Compiled, and pending or refused.
    (change,) = kit.planner.take()
    kit.queued = {change.name: change}
    found = kit.one()
    assert found["state"] == "pending"
    assert found["ports"][0]["endpoints"] == ["10.244.0.9:8080"]
    assert found["committed"][0]["endpoints"] == ["10.244.0.1:8080"]
    assert kit.page()["pendingCount"] == 1
    # Deleted, but still in the kernel.
    kit.planner.apply([Deleted("services", "default", "web")])
    (change,) = kit.planner.take()
    kit.queued = {change.name: Change(change.name, before, change.after)}
    found = kit.one()
    assert found["state"] == "deleting"
    assert "resourceVersion" not in found
    assert found["committed"][0]["frontends"][0]["address"] == "10.96.0.1:80"
    kit.queued = {}
    assert kit.ask("namespace=default&name=web") == (
        404,
        module.unwatched(("default", "web")) + "\n",
    )


REFUSED = FamilyStanding(Family.IPV4, 950.0, refusal="owned by firewalld")
DIFFERS = FamilyStanding(Family.IPV4, 950.0, difference="elements were deleted")
BOTH = FamilyStanding(Family.IPV4, 950.0, refusal="owned by firewalld", difference="the table is another one")


@pytest.mark.parametrize(
    ("standing", "state", "reason"),
    [
        (REFUSED, "refused", "IPv4: owned by firewalld"),
        (DIFFERS, "differs", "IPv4: elements were deleted"),
        (BOTH, "refused", "IPv4: owned by firewalld"),
        (FamilyStanding(Family.IPV4, 950.0), "pending", "IPv4: not yet compared with the kernel"),
    ],
)
def test_nothing_is_programmed_that_the_kernel_is_not_known_to_have(standing, state, reason):
    kit = Kit(WEB, WEB_ENDPOINTS, service("name", type="ExternalName"))
    ports = kit.one()["ports"]
    kit.families[Family.IPV4] = standing
    found = kit.one()
    assert (found["state"], found["reason"], found["ports"], found["committed"]) == (state, reason, ports, ports)
    assert kit.one("name")["state"] == "ignored"  # a Service without any element there lacks nothing
    family = kit.page()["families"]["IPv4"]
    assert (family["state"], family["wholeSince"]) == (state, None)
    text = kit.ask("format=text&name=web")[1]
    assert f"\ndefault/web: {state}, version 7\n  {reason}\n" in text
    assert text.count("http TCP IPv4") == 1  # the desired and the committed state are the same


def test_another_familys_trouble_is_none_of_a_services():
    kit = Kit(WEB, WEB_ENDPOINTS)
    kit.families[Family.IPV6] = FamilyStanding(Family.IPV6, refusal="no memory")
    assert kit.one()["state"] == "programmed"


def test_the_last_accepted_state_is_shown_in_addition_to_the_desired_one():
    kit = Kit(service("web"), endpoints("web", "10.244.0.1"))
    kit.planner.apply([Upserted("endpointslices", endpoints("web", "10.244.0.9", version="5"))])
    (change,) = kit.planner.take()
    kit.queued = {change.name: change}
    kit.families[Family.IPV4] = REFUSED
    text = kit.ask("format=text")[1]
    assert "  wanted: http TCP IPv4\n" in text
    assert "  last committed: http TCP IPv4\n" in text
    assert "  differs: " not in text
    assert "\nIPv4: refused, last seen whole 1970-01-01T00:15:50.000000Z, last synced never\n" in text
    assert "\n  refused: owned by firewalld\n" in text


IGNORED = {
    "ExternalName": ({"type": "ExternalName"}, "its type is ExternalName, which needs DNS and no rules"),
    "headless": (
        {"cluster_ip": "None"},
        "headless (spec.clusterIP is None): DNS returns the endpoints, and no rules are needed",
    ),
    "no address": ({"cluster_ip": ""}, "spec.clusterIP is empty: the Service has no address yet"),
    "another proxy's": (
        {"labels": Labels(service_proxy_name="cilium")},
        "another proxy serves this Service, by the label service.kubernetes.io/service-proxy-name: 'cilium'",
    ),
    "no port": (
        {"ports": [ServicePort(port=0)]},
        "it has no port and address that can be used on this node (IPv4 and IPv6)",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), IGNORED.values(), ids=IGNORED)
def test_an_ignored_value_is_reported_with_the_reason(fields, reason):
    kit = Kit(service("web", **fields))
    assert (kit.one()["state"], kit.one()["reason"]) == ("ignored", reason)
    assert f"default/web: ignored, version 1\n  {reason}\n" in kit.ask("format=text")[1]


def test_another_proxys_service_is_known_by_its_slices():
    """The proxy requests no such Service from the API server; but its slices also have the label, and are included."""
    kit = Kit(endpoints("web", "10.244.0.1", proxy_name="cilium"), endpoints("deleted", "10.244.0.2"))
    assert names(kit.page()) == ["web"]
    assert kit.one() == {
        "namespace": "default",
        "name": "web",
        "state": "ignored",
        "slices": {"web-x": "1"},
        "reason": "another proxy serves this Service, by the label service.kubernetes.io/service-proxy-name: 'cilium'",
    }
    assert kit.ask("namespace=default&name=deleted")[0] == 404


def names(page):
    return [found["name"] for found in page["services"]]


def test_valid_queries(monkeypatch):
    monkeypatch.setattr(module, "_RUN", 7)
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    kit = Kit(*(service(f"s{n:02}", n + 1) for n in range(30)))
    wanted = [f"s{n:02}" for n in range(30)]
    assert names(kit.page()) == wanted
    assert names(kit.page("namespace=default")) == wanted
    assert names(kit.page("namespace=other")) == []
    assert names(kit.page("name=s07")) == ["s07"]
    assert names(kit.page("address=10.96.0.9")) == ["s08"]
    assert names(kit.page("address=010.096.0.9")) == ["s08"]
    assert names(kit.page("address=10.96.1.9")) == []
    seen, token = [], ""
    while token is not None:
        page = kit.page(f"limit=8&continue={token}")
        assert len(page["services"]) <= 8
        seen += names(page)
        token = page["continue"]
    assert seen == wanted
    assert kit.page("limit=30")["continue"] is None


FINDS = {
    "port=80": ["other", "web"],
    "port=443": [],
    "port=30080": ["web"],  # NodePort
    "port=30081": ["web"],  # health check
    "port=8080": [],  # clients use no endpoint's port
    "address=192.0.2.9": ["web"],  # load balancer
    "address=192.0.2.9&port=80": ["web"],
    "address=192.0.2.9&port=30080": [],
    "address=192.0.2.1": [],  # an address of the node: the port is missing
    "address=192.0.2.1&port=30080": ["web"],
    "address=192.0.2.1&port=30081": ["web"],
    "address=10.96.0.2&port=30080": [],
    "address=10.244.0.1": ["web"],
    "address=10.244.1.3": ["web"],  # draining
    "address=10.244.5.5": ["other"],  # a slice of ready endpoints
    "address=10.244.5.5&port=8080": ["other"],
    "address=10.244.5.5&port=80": [],
    "address=10.244.5.5&name=web": [],
    "address=10.244.7.7": ["foreign"],
    "address=fd00::1": [],
}


@pytest.mark.parametrize("query", FINDS)
def test_found_by_address_and_port(query):
    others = service("other", 2), endpoints("other", "10.244.5.4", "10.244.5.5")
    kit = Kit(WEB, WEB_ENDPOINTS, *others, endpoints("foreign", "10.244.7.7", proxy_name="x"))
    assert names(kit.page(query)) == FINDS[query]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=x", "limit: expected a number, got 'x'\n"),
        (f"limit={'9' * 5000}", f"limit: expected a number, got '{'9' * 40}'\n"),
        ("address=web", "address: expected an IPv4 or IPv6 address, got 'web'\n"),
        ("address=10.96.0.0/16", "address: expected an IPv4 or IPv6 address, got '10.96.0.0/16'\n"),
        ("port=http", "port: expected a number from 1 to 65535, got 'http'\n"),
        ("port=0", "port: expected a number from 1 to 65535, got '0'\n"),
        ("port=65536", "port: expected a number from 1 to 65535, got '65536'\n"),
        ("format=yaml", "format: expected json or text, got 'yaml'\n"),
        ("continue=web", "continue: expected namespace/name, got 'web'\n"),
        ("n=1", "unknown parameter n; there are address, continue, format, limit, name, namespace, port\n"),
    ],
)
def test_invalid_queries(query, message):
    assert Kit().ask(query) == (400, message)


TEXT = """\
IPv4: whole since 1970-01-01T00:15:00.000000Z, last seen whole 1970-01-01T00:15:50.000000Z, last synced never
  traffic of pods: from 10.244.0.0/16; NodePorts on: 192.0.2.1
IPv6: refused, last seen whole never, last synced never
  traffic of pods: unknown; NodePorts on: all but loopback
  refused: no memory

default/web: programmed, version 7
  slice web-x, version 8
  health check port 30081, local endpoints: 1 IPv4
  http TCP IPv4, affinity 10800 s
    cluster      10.96.0.1:80          pods -> endpoints; node, outside -> endpoints, masqueraded
    loadbalancer 192.0.2.9:80          pods -> endpoints; node -> endpoints, masqueraded; outside -> local endpoints
                 only from 10.0.0.0/8, 198.51.100.1/32
    nodeport     192.0.2.1:30080       pods -> endpoints; node -> endpoints, masqueraded; outside -> local endpoints
    endpoints    10.244.0.1:8080 10.244.1.2:8080
    local        10.244.0.1:8080
    others       10.244.1.3:8080
"""


def test_text_is_for_people():
    kit = Kit(WEB, WEB_ENDPOINTS)
    kit.families[Family.IPV6] = FamilyStanding(Family.IPV6, refusal="no memory")
    status, text = kit.ask("format=text")
    head, _, rest = text.partition("\n")
    assert status == 200
    assert (
        re_version(head) == "kube-proxy V, mode nftables, node node-a in zone zone-a: not ready, 1 Service, 0 pending"
    )
    assert rest.partition("\n")[0].startswith("  sync: not yet synced")
    assert rest.partition("\n")[2] == TEXT
    assert kit.ask(accept="text/plain")[1] == text
    assert kit.ask(accept="application/json, text/plain")[1].startswith("{")
    kit.apply(service("x", 2))
    assert kit.ask("format=text&limit=1")[1].endswith("\nmore: add continue=default/web\n")


def test_names_and_messages_forge_no_lines():
    """A message of an API server, or an unchecked name, stays at its place and in one line."""
    forged = "x\nIPv4: last synced now\x1b[1A\u202e"
    kit = Kit(service("web", version=forged))
    kit.families[Family.IPV4] = FamilyStanding(Family.IPV4, refusal=forged)
    kit.health.ready_when("api", lambda: forged)
    _, text = kit.ask("format=text")
    lines = text.split("\n")
    assert [line for line in lines if line.startswith("IPv4: last synced now")] == []
    assert text.count(r"x\nIPv4: last synced now\x1b[1A\u202e") == 4
    _, page = kit.ask()
    assert page.replace("\n", "").isprintable()
    assert json.loads(page)["services"][0]["resourceVersion"] == forged
    for query in ("x%0Ay=1", "namespace=a%0A&name=b%1B"):
        status, answer = kit.ask(query)
        assert status in {400, 404}
        assert answer[:-1].isprintable()


def test_manifests_have_no_versions():
    kit = Kit(service("web", version=None), endpoints("web", "10.244.0.1", version=None))
    assert kit.one()["slices"] == {"web-x": None}
    assert "\ndefault/web: programmed\n  slice web-x\n  http TCP IPv4\n" in kit.ask("format=text")[1]


def re_version(text):
    words = text.split(",")
    return ",".join(["kube-proxy V", *words[1:]])


def test_a_service_that_goes_while_it_is_written_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    kit = Kit(*(service(f"s{n}", n + 1) for n in range(5)))

    async def read():
        found = b""
        async for piece in kit.state(Request("GET", "/debug/state", "")).body:
            found += piece
            kit.planner.apply([Deleted("services", "default", "s3")])
            kit.planner.take()
        return json.loads(found)

    assert names(asyncio.run(read())) == ["s0", "s1", "s2", "s4"]
