"""Access to endpoints: traffic policies, source ranges, termination, ports and addresses without a Service.

Each row is a Service, its endpoints in steps, and the expected answers by client after each step.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

import pytest

from lab.netns import open_socket_in, run_in_async
from lab.probes import http_get
from lab.topology import NODE_A, SECOND_OUTSIDE_IP
from support.live import Front, Live
from support.modes import ScenarioMode, modes

Wanted = dict[str, dict[str, str]]
"""Expected answers by kind of address and place."""

REFUSED = {"pod": "refused", "node": "refused", "outside": "refused"}
DROPPED = {"pod": "timeout", "node": "timeout", "outside": "timeout"}
LOCAL = {"externalTrafficPolicy": "Local"}
INTERNAL = {"internalTrafficPolicy": "Local"}
SOURCES = ("kept", "masqueraded")
OUTER = ("nodeport", "loadbalancer", "external")


def outer(**places: str) -> Wanted:
    """The same answers for every kind of address that is reached from outside."""
    return dict.fromkeys(OUTER, places)


class Case(NamedTuple):
    """A Service of type LoadBalancer with an external IP, and steps of (endpoints, expected answers)."""

    spec: dict[str, Any]
    steps: list[tuple[str, Wanted]]


CASES = {
    "external-local": Case(
        LOCAL,
        [
            ("a1 b1", outer(outside="a1 kept", pod="a1 b1 kept", node="a1 b1 masqueraded")),
            ("a1 b1", {"cluster": {"outside": "a1 b1 masqueraded", "pod": "a1 b1 kept"}}),
            ("b1 b2", outer(outside="timeout", pod="b1 b2 kept", node="b1 b2 masqueraded")),
            ("a2 a3", outer(outside="a2 a3 kept", b2="a2 a3 kept")),
            ("", outer(**REFUSED)),
            ("a1", outer(outside="a1 kept", a1="a1 masqueraded")),
        ],
    ),
    "internal-local": Case(
        INTERNAL,
        [
            ("a1 b1", {"cluster": {"pod": "a1 kept", "node": "a1 masqueraded", "outside": "a1 masqueraded"}}),
            ("a1 b1", outer(outside="a1 b1 masqueraded")),
            ("b1", {"cluster": DROPPED, "nodeport": {"outside": "b1 masqueraded", "pod": "b1 masqueraded"}}),
            ("", {"cluster": REFUSED, "nodeport": REFUSED}),
            ("a1 a2", {"cluster": {"pod": "a1 a2 kept"}}),
        ],
    ),
    "both-local": Case(
        LOCAL | INTERNAL,
        [
            ("a1 b1", {"cluster": {"pod": "a1 kept"}, "nodeport": {"outside": "a1 kept", "pod": "a1 b1 kept"}}),
            ("b1", {"cluster": DROPPED, "nodeport": {"outside": "timeout", "pod": "b1 kept"}}),
        ],
    ),
    "terminating": Case(
        {},
        [
            ("a1 b1/draining", {"cluster": {"pod": "a1 kept"}, "nodeport": {"outside": "a1 masqueraded"}}),
            ("a1/draining b1/draining", {"cluster": {"pod": "a1 b1 kept"}, "nodeport": {"outside": "a1 b1"}}),
            ("a1/draining b1/failed a2/unready", {"cluster": {"pod": "a1 kept"}}),
            ("a1/failed b1/unready", {"cluster": REFUSED, "nodeport": REFUSED}),
        ],
    ),
    "terminating-local": Case(
        LOCAL,
        [
            ("a1/draining b1", outer(outside="a1 kept", pod="b1 kept")),
            ("a1/draining a2 b1", outer(outside="a2 kept", pod="a2 b1 kept")),
            ("a1/failed b1", outer(outside="timeout", pod="b1 kept")),
            ("a1/failed b1/draining", outer(outside="timeout", pod="b1 kept")),
        ],
    ),
    "source-ranges": Case(
        {"loadBalancerSourceRanges": [f" {SECOND_OUTSIDE_IP}/32", "10.244.1.0/24 ", "fd00:244:1::/64"]},
        [
            ("a1", {"loadbalancer": {"outside": "timeout", "pod": "timeout", "node": "timeout", "b1": "a1"}}),
            ("a1", {"loadbalancer": {f"outside@{SECOND_OUTSIDE_IP}": "a1 masqueraded"}}),
            ("a1", {kind: {"outside": "a1", "pod": "a1"} for kind in ("nodeport", "external", "cluster")}),
            ("", {"loadbalancer": {"outside": "timeout", f"outside@{SECOND_OUTSIDE_IP}": "refused"}}),
        ],
    ),
    "source-ranges-local": Case(
        LOCAL | {"loadBalancerSourceRanges": [f"{SECOND_OUTSIDE_IP}/32"]},
        [
            ("a1 b1", {"loadbalancer": {"outside": "timeout", f"outside@{SECOND_OUTSIDE_IP}": "a1 kept"}}),
            ("a1 b1", {"nodeport": {"outside": "a1 kept"}, "external": {"outside": "a1 kept"}}),
        ],
    ),
    "source-ranges-open": Case(
        {"loadBalancerSourceRanges": [f"{SECOND_OUTSIDE_IP}/32", "0.0.0.0/0"]},
        [("a1", {"loadbalancer": {"outside": "a1", "pod": "a1", "node": "a1"}})],
    ),
    "source-ranges-of-the-node": Case(
        {"loadBalancerSourceRanges": ["192.168.100.2/32"]},
        [("a1", {"loadbalancer": {"node": "a1", "outside": "timeout", "pod": "timeout"}})],
    ),
    "never-any-endpoint": Case({}, [("", {"cluster": REFUSED} | outer(**REFUSED))]),
}
SIX = {
    "external-local": CASES["external-local"],
    "internal-local": CASES["internal-local"],
    "terminating-local": CASES["terminating-local"],
    "never-any-endpoint": CASES["never-any-endpoint"],
    "source-ranges": Case(
        {"loadBalancerSourceRanges": ["fd00:244:1::/64"]},
        [("a1", {"loadbalancer": {"outside": "timeout", "pod": "timeout", "b1": "a1"}, "nodeport": {"outside": "a1"}})],
    ),
}
ROWS = [(name, "IPv4", case) for name, case in CASES.items()] + [(name, "IPv6", case) for name, case in SIX.items()]


def in_mode(mode: ScenarioMode, kind: str, endpoints: str, places: dict[str, str]) -> dict[str, str]:
    """Return the expected answers at an address in a mode; the table above is for nftables mode (docs/modes.md)."""
    if mode.config["mode"] == "iptables" and kind in {"loadbalancer", "external"} and not endpoints:
        # Incoming packets are refused, with or without source ranges; packets from the node itself are not checked.
        return {place: "refused" for place in places if place != "node"}
    if mode.name == "ipvs" and not endpoints:
        return dict.fromkeys(places, "refused")
    if mode.name == "ipvs" and kind != "cluster":
        return from_one_pool(places)
    return {place: mode.seen(answer) for place, answer in places.items()}


def from_one_pool(places: dict[str, str]) -> dict[str, str]:
    """Return the expected answers of a virtual server: pods and the node get the same as outside clients, if served."""
    outside = places.get("outside", "timeout")
    if outside in {"refused", "timeout"}:
        return places
    pods = " ".join(word for word in outside.split() if word not in SOURCES)
    sources = {place: answer.split()[-1] for place, answer in places.items() if answer.endswith(SOURCES)}
    return {place: f"{pods} {sources.get(place, '')}" for place in places}


@modes("nftables", "iptables-nft", "userspace", "ipvs")
@pytest.mark.parametrize(("name", "family", "case"), ROWS, ids=[f"{name}-{family}" for name, family, _ in ROWS])
async def test_policy(live: Live, name: str, family: str, case: Case) -> None:
    number = 16 + [row[:2] for row in ROWS].index((name, family))
    external = f"198.51.100.{number}" if family == "IPv4" else f"2001:db8:1::{number:x}"
    service = f"{name}-{family.lower()}"
    live.service(service, type="LoadBalancer", externalIPs=[external], ipFamilies=[family], **case.spec)
    await live.until(lambda: live.cluster.get("services", service)["status"]["loadBalancer"].get("ingress"), "a VIP")
    for endpoints, wanted in case.steps:
        live.endpoints(service, endpoints)
        fronts = {kind: live.front(service, kind, family) for kind in wanted}
        places = {kind: in_mode(live.mode, kind, endpoints, wanted[kind]) for kind in wanted}
        await asyncio.gather(*(live.expect(fronts[kind], places[kind]) for kind in wanted))


@modes("nftables")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_cluster_ips_belong_to_services_alone(live: Live, family: str) -> None:
    name = f"owner-{family.lower()}"
    live.service(name, "a1 b1", ipFamilies=[family])
    front = live.front(name, family=family)
    await live.expect(front, {"pod": "a1 b1", "node": "a1 b1", "outside": "a1 b1"})
    unallocated = {"IPv4": "10.96.250.9", "IPv6": "fd00:10:96::fa09"}[family]
    await asyncio.gather(live.expect(Front(front.address, 81), REFUSED), live.expect(Front(unallocated, 80), DROPPED))
    live.delete(name)
    await live.expect(front, DROPPED)


@modes("nftables")
async def test_a_service_cidr_of_later_counts(live: Live) -> None:
    address = "10.98.0.7"
    await live.cluster.exec("outside", ["ip", "route", "add", "10.98.0.0/24", "via", "192.168.100.2"])
    cidr = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "more"},
        "spec": {"cidrs": ["10.98.0.0/24"]},
    }
    assert await live.cluster.probe("pod", "tcp", address, 80, 0.25) != "refused"
    live.cluster.create(cidr)

    async def listed() -> str:
        text = await live.nft("list", "set", "ip", "kube-proxy", "service-cidrs")
        return "" if "10.98.0.0/24" in text else text

    await live.eventually(listed)
    await live.expect(Front(address, 80), DROPPED, "udp")
    live.cluster.delete("servicecidrs", "more")

    async def gone() -> str:
        return "" if await listed() else "the range is still dropped"

    await live.eventually(gone)


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_each_family_counts_its_own_endpoints(live: Live) -> None:
    service = live.service("counted", "", type="LoadBalancer", ipFamilyPolicy="RequireDualStack", **LOCAL)
    place, port = live.cluster.namespace_of("outside"), service["spec"]["healthCheckNodePort"]
    record = live.cluster.store.get("endpointslices", ("default", "counted-ipv6"))
    live.endpoints("counted", "a1 a2")
    assert record is not None
    live.cluster.store.put("endpointslices", record.decode())

    async def check() -> str:
        try:
            answers = [
                await run_in_async(place, lambda ip=ip: http_get(ip, port, "/")) for ip in live.ips["node"].values()
            ]
        except OSError as error:
            return str(error)
        right = [status for status, _ in answers] == [200, 503] and b'"localEndpoints": 2,' in answers[0][1]
        return "" if right else f"{answers}"

    await live.eventually(check)


@modes("nftables", "iptables-nft", "userspace", "ipvs")
async def test_a_health_check_port_that_is_taken_is_an_event_as_the_go_kube_proxys(live: Live) -> None:
    port = 32123
    taken = open_socket_in(live.cluster.namespace_of("node"), lambda: socket.create_server((NODE_A.ip, port)))
    with taken:
        live.service("taken", "a1", type="LoadBalancer", healthCheckNodePort=port, **LOCAL)
        wanted = (
            f'FailedToStartServiceHealthcheck: node node-a failed to start healthcheck "default/taken" on port {port}'
        )
        await live.until(lambda: any(event.startswith(wanted) for event in live.events("taken")), "an event")
    live.delete("taken")


@modes("nftables", "iptables-nft", "userspace", "ipvs")
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
async def test_health_check_node_port(live: Live, family: str) -> None:
    name = f"checked-{family.lower()}"
    service = live.service(name, "a1 a2 b1", type="LoadBalancer", ipFamilies=[family], **LOCAL)
    place, port = live.cluster.namespace_of("outside"), service["spec"]["healthCheckNodePort"]
    address = live.ips["node"][family]

    def steps_to(status: int, count: int) -> Any:
        async def check() -> str:
            try:
                found, body = await run_in_async(place, lambda: http_get(address, port, "/anything"))
            except OSError as error:
                return str(error)
            right = found == status and f'"localEndpoints": {count},'.encode() in body and name.encode() in body
            return "" if right else f"{found} {body!r}"

        return check

    for endpoints, status, count in (("a1 a2 b1", 200, 2), ("b1", 503, 0), ("a1/draining b1", 503, 0), ("a3", 200, 1)):
        live.endpoints(name, endpoints)
        await live.eventually(steps_to(status, count))
    live.cluster.patch("services", name, {"spec": {"externalTrafficPolicy": "Cluster"}})

    async def closed() -> str:
        answer = await live.cluster.probe("outside", "tcp", address, port)
        return "" if answer == "refused" else f"{answer}"

    await live.eventually(closed)


@modes("nftables", "iptables-nft", "userspace")
async def test_annotations_of_cilium_select_addresses_and_deny_clients(bare: Live) -> None:
    deny = {"service.cilium.io/type": "LoadBalancer", "service.cilium.io/src-ranges-policy": "deny"}
    bare.service("web", "a1 b1", type="LoadBalancer", loadBalancerSourceRanges=[f"{SECOND_OUTSIDE_IP}/32"])
    await bare.until(lambda: bare.cluster.get("services", "web")["status"]["loadBalancer"].get("ingress"), "a VIP")
    await bare.start(args=["--cilium-annotations"])
    fronts = {kind: bare.front("web", kind) for kind in ("cluster", "nodeport", "loadbalancer")}
    await bare.expect(fronts["loadbalancer"], {"outside": "timeout", f"outside@{SECOND_OUTSIDE_IP}": "a1 b1"})
    await bare.expect(fronts["cluster"], {"pod": "a1 b1"})
    bare.cluster.patch("services", "web", {"metadata": {"annotations": deny}})
    await bare.expect(
        fronts["loadbalancer"], {"outside": "a1 b1", "pod": "a1 b1", f"outside@{SECOND_OUTSIDE_IP}": "timeout"}
    )
    await bare.expect(fronts["nodeport"], {"outside": "refused"})
    if bare.mode.name == "nftables":  # in other modes packets to a missing Service follow the node's routes
        await bare.expect(fronts["cluster"], {"pod": "timeout"})
    front = fronts["loadbalancer"]
    status, text = await bare.ask("why", SECOND_OUTSIDE_IP, f"{front.address}:{front.port}")
    assert status == 1, text
    assert f"{SECOND_OUTSIDE_IP} is among the source ranges to deny ({SECOND_OUTSIDE_IP}/32)" in text
    status, text = await bare.ask("verify")
    assert status == 0, text
