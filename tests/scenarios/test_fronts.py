"""Every address of a Service: each kind of address, family and protocol, from a pod, the node, outside and itself."""

from __future__ import annotations

import pytest

from support.live import PORTS, Live

BOTH = ("IPv4", "IPv6")
FAMILIES = {
    "v4": {"ipFamilies": ["IPv4"]},
    "v6": {"ipFamilies": ["IPv6"]},
    "dual": {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]},
}
# The client's address at the endpoint, by externalTrafficPolicy: only pods keep their address, and only to cluster IPs.
SOURCES = {
    "cluster": {"pod": "kept", "node": "masqueraded", "outside": "masqueraded", "a1": "kept"},
    "nodeport": {"pod": "masqueraded", "node": "masqueraded", "outside": "masqueraded"},
    "loadbalancer": {"pod": "masqueraded", "node": "masqueraded", "outside": "masqueraded"},
    "external": {"pod": "masqueraded", "node": "masqueraded", "outside": "masqueraded"},
}
EXTERNAL = {"v4": ["198.51.100.4"], "v6": ["2001:db8:1::6"], "dual": ["198.51.100.46", "2001:db8:1::46"]}


@pytest.mark.parametrize("families", FAMILIES)
async def test_all_addresses_lead_to_all_endpoints(live: Live, families: str) -> None:
    name, stacks = f"fronts-{families}", FAMILIES[families]
    live.service(name, "a2 b1", type="LoadBalancer", externalIPs=EXTERNAL[families], **stacks)
    await live.until(lambda: live.cluster.get("services", name)["status"]["loadBalancer"].get("ingress"), "a VIP")
    for family in stacks["ipFamilies"]:
        for kind, sources in SOURCES.items():
            wanted = {place: f"a2 b1 {source}" for place, source in sources.items()}
            await live.expect(live.front(name, kind, family), wanted)


@pytest.mark.parametrize("family", BOTH)
async def test_a_pod_reaches_itself_through_its_service(live: Live, family: str) -> None:
    name = f"hairpin-{family.lower()}"
    live.service(name, "a1", type="NodePort", ipFamilies=[family])
    for kind in ("cluster", "nodeport"):
        await live.expect(live.front(name, kind, family), {"a1": "a1 masqueraded"})


@pytest.mark.parametrize("family", BOTH)
async def test_single_stack_leaves_the_other_family_alone(live: Live, family: str) -> None:
    other = BOTH[family == "IPv4"]
    service = live.service(f"single-{family.lower()}", "a1 b1", type="NodePort", ipFamilies=[family])
    await live.expect(live.front(f"single-{family.lower()}", "nodeport", family), {"outside": "a1 b1"})
    address = live.ips["node"][other]
    assert await live.cluster.probe("outside", "tcp", address, service["spec"]["ports"][0]["nodePort"]) == "refused"


async def test_ports_of_one_number_differ_by_protocol(live: Live) -> None:
    live.service("twins", type="NodePort")
    ports = [{"name": "tcp", "port": 3000, "protocol": "TCP"}, {"name": "udp", "port": 3001, "protocol": "UDP"}]
    live.endpoints("twins", "a1 b1", ports)
    for kind in ("cluster", "nodeport"):
        for proto, number, index in (("tcp", 3000, 0), ("udp", 3001, 1)):
            front = live.front("twins", kind, port=index)
            await live.expect(front, {"outside": "a1 b1", "node": "a1 b1"}, proto)
            answers = await live.cluster.probes("pod", proto, *front, 5)
            assert {answer.port for answer in answers} == {number}


async def test_named_target_ports_may_differ_from_pod_to_pod(live: Live) -> None:
    for number in (3100, 3200):
        port = {"name": "web", "containerPort": number, "protocol": "TCP"}
        labels = {"app": "named"}
        spec = {"nodeName": "node-a", "containers": [{"name": "whoami", "image": "whoami", "ports": [port]}]}
        metadata = {"name": f"named-{number}", "labels": labels}
        live.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    await live.cluster.pods_ready("app=named", 2)
    live.service("named", selector={"app": "named"}, ports=[{"port": 80, "targetPort": "web"}])
    front = live.front("named")

    async def both_answer() -> str:
        answers = await live.cluster.probes("outside", "tcp", *front, 20)
        ports = {getattr(answer, "port", answer) for answer in answers}
        return "" if ports == {3100, 3200} else f"answers of {ports}"

    await live.eventually(both_answer)


async def test_several_ports_of_a_service(live: Live) -> None:
    numbers = range(8000, 8010)
    ports = [{"name": f"p{n}", "port": n, "protocol": "TCP", "targetPort": 3000 + n % 2} for n in numbers]
    live.service("ports", ports=ports)
    live.endpoints("ports", "a1 b2", [{"name": f"p{n}", "port": 3000 + n % 2, "protocol": "TCP"} for n in numbers])
    for index, number in enumerate(numbers):
        front = live.front("ports", port=index)
        assert front.port == number
        await live.expect(front, {"pod": "a1 b2 kept"}, "tcp")
        answers = await live.cluster.probes("pod", "tcp", *front, 3)
        assert {answer.port for answer in answers} == {3000 + number % 2}


async def test_sctp_is_programmed(live: Live) -> None:
    ports = [{**PORTS[0], "protocol": "SCTP", "name": "sctp", "port": 8132, "nodePort": 30132}]
    live.service("sctp", ports=ports, type="NodePort", ipFamilyPolicy="RequireDualStack")
    live.endpoints("sctp", "a1 b1", [{"name": "sctp", "port": 3000, "protocol": "SCTP"}])
    for family, table in (("IPv4", "ip"), ("IPv6", "ip6")):
        address = live.front("sctp", "cluster", family).address
        one, two = (f"{live.ips[pod][family]} . 3000" for pod in ("a1", "b1"))
        wanted = {
            "cluster-services": {f"{address} . sctp . 8132 : 2"},
            "external-nodeports": {"sctp . 30132 : 2"},
            "endpoints": {f"{address} . sctp . 8132 . 0 : {one}", f"{address} . sctp . 8132 . 1 : {two}"},
            "nodeport-endpoints": {f"sctp . 30132 . 0 : {one}", f"sctp . 30132 . 1 : {two}"},
        }

        async def listed(table: str = table, wanted: dict[str, set[str]] = wanted) -> str:
            found = {name: await _elements(live, table, name) for name in wanted}
            return "" if all(wanted[name] <= found[name] for name in wanted) else f"{wanted} expected, found {found}"

        await live.eventually(listed)


async def _elements(live: Live, table: str, name: str) -> set[str]:
    """Return the elements of a map, as nft writes them."""
    text = " ".join((await live.nft("list", "map", table, "kube-proxy", name)).split())
    return {element.strip() for element in text.partition("elements = {")[2].partition("}")[0].split(",")}
