"""Any JSON in any object, as if an API server had accepted it: only this object is affected, and gets an event."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest

from lab.apiserver.watching import Watch
from support.junk import ENDPOINTS, GOOD_PORT, OTHERS, SERVICES, SLICES, SPECS, VALUES, Bad
from support.live import Front, Live, slice_of

Json = dict[str, Any]
PROXY = {"clientConnection": {"qps": -1}}  # these objects need more than the default of 5 events per second
SLICE_PORT = {"name": "web", "port": 3000, "protocol": "TCP"}


@pytest.fixture(scope="module", autouse=True)
def neighbour(live: Live, loop) -> None:
    """A Service that must continue to work; only the proxy receives the invalid objects."""

    async def prepare() -> None:
        live.service("neighbour", "a1 b1")
        await live.expect(live.front("neighbour"), {"pod": "a1 b1"})
        only_watches(live)

    loop.run(prepare())


def only_watches(live: Live) -> None:
    """Make the store notify only watches of its changes: the lab's own controllers expect valid objects."""
    for listeners in live.cluster.store._listeners.values():
        listeners[:] = [listener for listener in listeners if isinstance(getattr(listener, "__self__", None), Watch)]


_addresses = iter(f"10.96.77.{n}" for n in range(1, 255))


def good_service(name: str, address: str) -> Json:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    spec = {"type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ports": [copy.deepcopy(GOOD_PORT)]}
    return {
        "metadata": metadata | {"creationTimestamp": "2024-01-01T00:00:00Z"},
        "spec": spec | {"ipFamilies": ["IPv4"]},
        "status": {"loadBalancer": {}},
    }


def good_slice(live: Live, name: str) -> Json:
    endpoint = {"addresses": [live.ips["a1"]["IPv4"]], "conditions": {"ready": True}, "nodeName": "node-a"}
    return slice_of(name, "IPv4", [endpoint], [SLICE_PORT])


async def check(live: Live, front: Front, about: str, bad: Bad) -> None:
    """The object's other parts work or not, its event names the field, and another Service works."""
    if bad.works:
        await live.expect(front, {"pod": "a1", "outside": "a1"}, "tcp")
    if bad.named:
        # Hundreds of other events may be pending before it.
        named = f"an event naming {bad.named}"
        await live.cluster.until(lambda: any(bad.named in event for event in live.events(about)), named, 60)
        assert live.logged(f"{about}.*{bad.named.partition('[')[0]}")
    await healthy(live)
    if not bad.works:
        assert await live.cluster.probe("pod", "tcp", *front, timeout=0.1) in {"timeout", "refused"}


async def healthy(live: Live) -> None:
    """Changes of other objects still take effect."""
    for endpoints in ("b1", "a1 b1"):
        live.endpoints("neighbour", endpoints)
        await live.expect(live.front("neighbour"), {"pod": endpoints}, "tcp")
    assert live.proxy.returncode is None
    assert not live.logged("Traceback|internal error")


@pytest.mark.quick
@pytest.mark.parametrize("case", SPECS)
async def test_spec(live: Live, case: str) -> None:
    name, bad, address = f"spec-{case}", SPECS[case], next(_addresses)
    service = good_service(name, address)
    service["spec"] |= bad.part
    live.cluster.store.put("endpointslices", good_slice(live, name))
    live.cluster.store.put("services", service)
    await check(live, Front(address, 80), name, bad)


@pytest.mark.quick
@pytest.mark.parametrize("case", SERVICES)
async def test_service(live: Live, case: str) -> None:
    name, bad, address = f"service-{case}", SERVICES[case], next(_addresses)
    live.cluster.store.put("endpointslices", good_slice(live, name))
    live.cluster.store.put("services", good_service(name, address) | bad.part)
    await check(live, Front(address, 80), name, bad)


@pytest.mark.quick
@pytest.mark.parametrize("case", SLICES)
async def test_slice(live: Live, case: str) -> None:
    name, bad, address = f"slice-{case}", SLICES[case], next(_addresses)
    live.cluster.store.put("services", good_service(name, address))
    live.cluster.store.put("endpointslices", good_slice(live, name) | bad.part)
    await check(live, Front(address, 80), f"{name}-ipv4", bad)


@pytest.mark.quick
@pytest.mark.parametrize("case", [*ENDPOINTS, "null", "text", "number"])
async def test_endpoint(live: Live, case: str) -> None:
    scalars = {"null": None, "text": "a1", "number": 7}
    bad = ENDPOINTS.get(case) or Bad(scalars[case], "endpoints[1]", True)
    name, address = f"endpoint-{case}", next(_addresses)
    live.cluster.store.put("services", good_service(name, address))
    slice_ = good_slice(live, name)
    # The last one is valid: invalid ones must not end the reading.
    slice_["endpoints"] += [bad.part, *slice_["endpoints"]]
    live.cluster.store.put("endpointslices", slice_)
    if bad.named:
        await live.until(lambda: any(bad.named in e for e in live.events(f"{name}-ipv4")), f"an event: {bad}")
    await healthy(live)
    found = await live.destinations(Front(address, 80))
    assert "a1:3000" in found


@pytest.mark.parametrize("case", OTHERS)
async def test_other_objects(live: Live, case: str) -> None:
    storage, part = OTHERS[case]
    records = live.cluster.store.records(storage)
    record = next(r for r in records if r.key[1] in {"node-a", "kubernetes"})
    live.cluster.store.put(storage, record.decode() | part)
    await healthy(live)
    live.cluster.store.put(storage, record.decode())
    await healthy(live)


async def test_five_thousand_endpoints_in_a_slice(live: Live) -> None:
    name, address = "crowded", next(_addresses)
    endpoints = [
        {"addresses": [f"10.250.{n // 250}.{n % 250 + 1}"], "conditions": {"ready": True}} for n in range(5000)
    ]
    live.cluster.store.put("services", good_service(name, address))
    live.cluster.store.put("endpointslices", slice_of(name, "IPv4", endpoints, [SLICE_PORT]))

    async def all_there() -> str:
        found = await live.destinations(Front(address, 80))
        return "" if len(found) == 5000 else f"{len(found)} endpoints"

    await live.eventually(all_there)
    await healthy(live)
    live.cluster.store.put("endpointslices", good_slice(live, name))
    await live.expect(Front(address, 80), {"pod": "a1"}, "tcp")


async def test_one_endpoint_five_thousand_times(live: Live) -> None:
    name, address = "repeated", next(_addresses)
    slice_ = good_slice(live, name)
    slice_["endpoints"] *= 5000
    live.cluster.store.put("services", good_service(name, address))
    live.cluster.store.put("endpointslices", slice_)
    await live.expect(Front(address, 80), {"pod": "a1"}, "tcp")
    assert await live.destinations(Front(address, 80)) == {"a1:3000"}


async def test_a_thousand_ports(live: Live) -> None:
    name, address = "ports", next(_addresses)
    service = good_service(name, address)
    numbers = range(1, 1001)
    service["spec"]["ports"] = [{"name": f"p{n}", "port": n, "protocol": "TCP"} for n in numbers]
    slice_ports = [SLICE_PORT | {"name": f"p{n}", "port": 3000 + n % 2} for n in numbers]
    live.cluster.store.put("services", service)
    live.cluster.store.put("endpointslices", good_slice(live, name) | {"ports": slice_ports})
    for number in (1, 500, 1000):
        await live.expect(Front(address, number), {"pod": "a1"}, "tcp")
    await live.expect(Front(address, 1001), {"pod": "refused"}, "tcp")
    await healthy(live)


async def test_two_services_with_one_cluster_ip(live: Live) -> None:
    address = next(_addresses)
    for name, year in (("claims-late", 2024), ("claims-early", 2020)):
        service = good_service(name, address)
        service["metadata"]["creationTimestamp"] = f"{year}-01-01T00:00:00Z"
        live.cluster.store.put("services", service)
    live.cluster.store.put("endpointslices", good_slice(live, "claims-early"))
    late = good_slice(live, "claims-late")
    late["endpoints"][0]["addresses"] = [live.ips["b1"]["IPv4"]]
    live.cluster.store.put("endpointslices", late)
    await live.expect(Front(address, 80), {"pod": "a1"}, "tcp")
    await live.until(lambda: live.events("claims-late"), "an event about the Service that loses")
    live.cluster.store.remove("services", ("default", "claims-early"))
    await live.expect(Front(address, 80), {"pod": "b1"}, "tcp")


def mutated(obj: Json, dice: random.Random) -> Json:
    """Return an object with several parts replaced by random values; its name and namespace remain."""
    found = copy.deepcopy(obj)
    for _ in range(dice.randint(1, 3)):
        place: Any = found
        keys = [key for key in place if key != "metadata"]
        for _ in range(dice.randint(1, 5)):
            key = dice.choice(keys)
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or dice.random() < 0.2:
                break
            place = inner
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        place[key if key in keys else dice.choice(keys)] = copy.deepcopy(dice.choice(VALUES))
    return found


async def test_any_json_in_any_field(live: Live) -> None:
    """Hundreds of random objects are created, changed and deleted; afterwards the ruleset equals the original one."""

    async def listed() -> list[str]:
        text = " ".join([await live.nft("-s", "list", "table", family, "kube-proxy") for family in ("ip", "ip6")])
        text = re.sub(r" expires \S+", "", text)  # Affinity entries of other tests expire in the meantime.
        return sorted(text.replace(",", " ").split())

    await healthy(live)
    before = await listed()
    dice = random.Random(136)
    store = live.cluster.store
    for step in range(400):
        number = step % 50
        name = f"any-{number}"
        service = good_service(name, f"10.96.78.{number + 1}")
        service["spec"] |= {"externalIPs": [f"198.51.100.{number + 1}"], "sessionAffinity": "None"}
        store.put("services", mutated(service, dice))
        store.put("endpointslices", mutated(good_slice(live, name), dice))
        if step % 100 == 99:
            await healthy(live)
    for number in range(50):
        store.remove("services", ("default", f"any-{number}"))
        store.remove("endpointslices", ("default", f"any-{number}-ipv4"))

    async def as_before() -> str:
        difference = set(await listed()) ^ set(before)
        return f"the ruleset is another one: {sorted(difference)}" if difference else ""

    await live.eventually(as_before)
    await healthy(live)


async def test_a_start_among_all_of_it(bare: Live) -> None:
    store = bare.cluster.store
    bare.service("neighbour", "a1 b1")
    only_watches(bare)
    number = 0
    for table in (SPECS, SERVICES):
        for case, bad in table.items():
            number += 1
            name = f"start-{case}"
            service = good_service(name, f"10.96.79.{number}")
            store.put("services", service | ({"spec": service["spec"] | bad.part} if table is SPECS else bad.part))
    for case, bad in SLICES.items():
        store.put("endpointslices", good_slice(bare, f"start-{case}") | bad.part)
    await bare.start()
    await bare.expect(bare.front("neighbour"), {"pod": "a1 b1", "outside": "a1 b1"})
    await healthy(bare)
