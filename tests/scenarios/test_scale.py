"""Many endpoints and many Services: all are reachable, and the numbers of chains and rules do not change."""

from __future__ import annotations

import re

import pytest

from lab.probes import Answer
from support.live import PODS, SLICE_PORTS, Front, Live, slice_of

MANY = range(4000, 4060)


async def chains_and_rules(live: Live, family: str) -> tuple[int, int]:
    """Return the numbers of chains and rules in the table, as nft lists them."""
    text = await live.nft("-a", "list", "table", family, "kube-proxy")
    chains = len(re.findall(r"^\tchain ", text, re.M))
    return chains, len(re.findall(r"^\t\t.* # handle \d+$", text, re.M))


async def reached(live: Live, place: str, front: Front, count: int) -> set[int]:
    """Return the ports of the endpoints that answer; stop when `count` have answered, or at a limit."""
    ports: set[int] = set()
    for _ in range(30):
        for answer in await live.cluster.probes(place, "tcp", *front, 50, 3.0):
            assert isinstance(answer, Answer), answer
            ports.add(answer.port)
        if len(ports) >= count:
            break
    return ports


@pytest.mark.slow("hundreds of endpoints")
async def test_more_endpoints_than_there_are_chains_prepared(live: Live) -> None:
    ports = [{"containerPort": n, "protocol": "TCP"} for n in MANY]
    spec = {"nodeName": "node-a", "containers": [{"name": "whoami", "image": "whoami", "ports": ports}]}
    metadata = {"name": "many", "labels": {"app": "many"}}
    live.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    (pod,) = await live.cluster.pods_ready("app=many", 1)
    endpoint = {"addresses": [pod["status"]["podIP"]], "conditions": {"ready": True}, "nodeName": "node-a"}
    live.service("many", type="NodePort", externalTrafficPolicy="Local")
    fronts = {"outside": live.front("many", "nodeport"), "pod": live.front("many"), "node": live.front("many")}

    def scale(count: int) -> None:
        """One endpoint is one port of the pod, in a separate slice."""
        for index, number in enumerate(MANY):
            name = f"many-{number}"
            if index < count:
                piece = slice_of("many", "IPv4", [endpoint], [SLICE_PORTS[0] | {"port": number}])
                piece["metadata"] |= {"name": name, "uid": name}
                live.cluster.store.put("endpointslices", piece)
            elif live.cluster.store.get("endpointslices", ("default", name)):
                live.cluster.delete("endpointslices", name)

    for count in (17, 45, 60, 16, 1):
        scale(count)
        wanted = set(list(MANY)[:count])
        for place, front in fronts.items():

            async def all_answer(place: str = place, front: Front = front, wanted: set[int] = wanted) -> str:
                if await live.cluster.probe(place, "tcp", *front) in {"refused", "timeout"}:
                    return f"{place} gets no answer"
                found = await reached(live, place, front, len(wanted))
                return "" if found == wanted else f"{place} reaches {sorted(found)}"

            await live.eventually(all_answer)
    scale(0)
    await live.expect(fronts["pod"], {"pod": "refused", "outside": "refused"}, "tcp")


async def test_chains_and_rules_do_not_grow_with_services(live: Live) -> None:
    policies: tuple[dict[str, str], ...] = ({}, {"externalTrafficPolicy": "Local"}, {"sessionAffinity": "ClientIP"})
    pairs = [" ".join(PODS[: 1 + i]) for i in range(3)]

    def add(first: int, last: int) -> None:
        for n in range(first, last):
            spec = {"type": "NodePort", "ipFamilyPolicy": "RequireDualStack", **policies[n % 3]}
            live.service(f"crowd-{n}", pairs[n // 3 % 3], externalIPs=[f"198.51.100.{n % 250}"], **_port(n), **spec)

    add(0, 9)  # one of each kind
    for family in ("IPv4", "IPv6"):
        await live.programmed(live.front("crowd-8", family=family), pairs[8 // 3 % 3])
    before = [await chains_and_rules(live, family) for family in ("ip", "ip6")]
    add(9, 300)
    for family in ("IPv4", "IPv6"):
        await live.programmed(live.front("crowd-299", family=family), pairs[299 // 3 % 3])
    assert [await chains_and_rules(live, family) for family in ("ip", "ip6")] == before
    for n in (9, 12, 99, 297):  # the policies under which all clients reach all endpoints
        for kind in ("cluster", "nodeport", "external"):
            await live.expect(live.front(f"crowd-{n}", kind), {"outside": pairs[n // 3 % 3]})
    for n in range(300):
        live.delete(f"crowd-{n}")
    await live.eventually(lambda: _no_elements(live))
    assert [await chains_and_rules(live, family) for family in ("ip", "ip6")] == before


def _port(number: int) -> dict[str, object]:
    """External IPs repeat, so each Service has another port."""
    ports = [{"name": p.lower(), "port": 1000 + number, "protocol": p, "targetPort": 3000} for p in ("TCP", "UDP")]
    return {"ports": ports}


async def _no_elements(live: Live) -> str:
    texts = [await live.nft("list", "map", family, "kube-proxy", "nodeport-endpoints") for family in ("ip", "ip6")]
    return "".join(text for text in texts if "tcp" in text)
