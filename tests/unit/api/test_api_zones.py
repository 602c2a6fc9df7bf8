"""Zones of endpoints: decoded for Services with weights by zone, and requested once more if they were not decoded."""

import asyncio

import pytest

from kubeproxy.api import watch
from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import WatchListSupport
from kubeproxy.api.watch import ApiSource
from kubeproxy.model.events import Replaced, ZonedSlice
from kubeproxy.model.objects import PlacedSlice
from support.scripted import Server, event, eventually, kind_at, listed, service
from support.watch_scripts import PACE, Seen, running

BY_ZONE = {"kube-proxy-py/weights": "zone:eu-1=0"}
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
OF_NS = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


def weighing(name, version="1", annotations=BY_ZONE):
    found = service(name, version)
    found["metadata"]["annotations"] = annotations
    return found


def slice_of(name, version="1", zone="eu-1"):
    labels = {"kubernetes.io/service-name": name}
    return {
        "metadata": {"name": f"{name}-1", "namespace": "ns", "resourceVersion": version, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.244.0.1"], "nodeName": "node-a", "zone": zone}],
        "ports": [{"port": 80}],
    }


class Api:
    """An API server: the contents of its lists, and the events of its watches, which a test releases."""

    def __init__(self, services, slices):
        self.lists = {"/api/v1/services": services, SLICES: slices}
        self.open = dict.fromkeys(self.lists, True)
        self.lines = {path: asyncio.Queue() for path in self.lists}
        self.refused = 0
        self.refusal, self.refusal_headers = 500, {}
        self.asked = []
        self.answers = True

    async def __call__(self, request, reply):
        if request.kind == "watch":
            await reply.begin()
            while request.path in self.lines:
                await reply.chunk(await self.lines[request.path].get())
            return await reply.forever()
        if "limit" in request.query and request.path in self.lists and "resourceVersionMatch" not in request.query:
            await eventually(lambda: self.open[request.path])
            return await reply.answer(200, listed(*self.lists[request.path], version="9", kind=kind_at(request.path)))
        if request.path not in (SLICES, OF_NS):
            return await reply.answer(200, listed(version="9", kind=kind_at(request.path)))
        self.asked.append(request)
        if self.refused:
            self.refused -= 1
            return await reply.status(self.refusal, headers=self.refusal_headers)
        names = request.query["labelSelector"].partition("(")[2].partition(")")[0].split(",")
        wanted = [one for one in self.lists[SLICES] if one["metadata"]["name"][:-2] in names]
        await eventually(lambda: self.answers)
        return await reply.answer(200, listed(*wanted, version="9", kind="EndpointSlice"))


def run(use, services=(), slices=(), prepare=lambda api: None):
    """Make a source follow a server, run `use(api, seen)` with it, and return the result of `use`."""

    async def main():
        api, seen = Api(list(services), list(slices)), Seen()
        prepare(api)
        async with Server(api) as server:
            client = HttpClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))
            support = WatchListSupport()
            support.supported = False
            source = ApiSource(client, "node-a", seen, pace=PACE, support=support)
            async with running(source, client):
                return await use(api, seen)

    return asyncio.run(main())


def replaced(seen, resource):
    return [found for found in seen.raw if isinstance(found, Replaced) and found.resource == resource]


def placed(seen):
    return [found.object.metadata.name for found in seen.raw if isinstance(found, ZonedSlice)]


def test_services_without_zone_weights_cause_no_requests():
    async def use(api, seen):
        await eventually(lambda: len(seen.raw) == 4)
        await api.lines[SLICES].put(event("MODIFIED", slice_of("web", "10")))
        await seen.until(5)
        return api.asked, type(seen.raw[-1].object).__name__

    assert run(use, [service("web")], [slice_of("web")]) == ([], "EndpointSlice")


def test_services_wait_for_the_zones_of_slices_that_came_before_them():
    def later(api):
        api.open["/api/v1/services"] = False

    async def use(api, seen):
        await eventually(lambda: replaced(seen, "endpointslices"))
        api.refused = 1
        api.open["/api/v1/services"] = True
        await eventually(lambda: replaced(seen, "services"))
        await eventually(lambda: len(api.asked) == 2)
        assert [one.path for one in api.asked] == [OF_NS] * 2
        query = api.asked[0].query
        assert query["labelSelector"] == "kubernetes.io/service-name in (web),!service.kubernetes.io/headless"
        assert (query["resourceVersion"], query["resourceVersionMatch"]) == ("9", "NotOlderThan")
        assert placed(seen) == ["web-1"]
        assert isinstance(seen.raw[-1], Replaced), "the zones come before the Services"
        assert seen.raw[-2].object.endpoints[0].zone == "eu-1"

    run(use, [weighing("web"), service("other")], [slice_of("web"), slice_of("other")], later)


def test_slices_that_come_after_their_service_are_decoded_with_zones():
    def later(api):
        api.open[SLICES] = False

    async def use(api, seen):
        await asyncio.sleep(0.05)
        assert replaced(seen, "services") == []
        api.open[SLICES] = True
        await eventually(lambda: replaced(seen, "services"))
        (listing,) = replaced(seen, "endpointslices")
        assert [found.piece.zones is not None for found in listing.objects] == [True, False]
        await api.lines[SLICES].put(event("MODIFIED", slice_of("web", "10", "eu-2")))
        await api.lines[SLICES].put(event("MODIFIED", slice_of("other", "11")))
        await eventually(lambda: seen[-2:] == ["+web-1", "+other-1"])
        assert seen.raw[-2].object.endpoints[0].zone == "eu-2"
        assert not isinstance(seen.raw[-1].object, PlacedSlice)

    run(use, [weighing("web")], [slice_of("web"), slice_of("other")], later)


def test_zones_are_requested_once_when_a_service_begins_to_weigh_by_them():
    async def use(api, seen):
        services = api.lines["/api/v1/services"]
        await eventually(lambda: len(seen.raw) == 4)
        await services.put(event("MODIFIED", weighing("web", "10")))
        await eventually(lambda: placed(seen) == ["web-1"])
        for version, annotations in (("11", BY_ZONE), ("12", {}), ("13", BY_ZONE)):
            await services.put(event("MODIFIED", weighing("web", version, annotations)))
        await eventually(lambda: seen[-3:] == ["+web"] * 3)
        await api.lines[SLICES].put(event("MODIFIED", slice_of("web", "14")))
        await eventually(lambda: seen[-1] == "+web-1")
        assert isinstance(seen.raw[-1].object, PlacedSlice), "it may come back to it any time"
        await services.put(event("DELETED", weighing("web", "15")))
        await eventually(lambda: seen[-1] == "-web")
        await api.lines[SLICES].put(event("MODIFIED", slice_of("web", "16")))
        await eventually(lambda: seen[-1] == "+web-1")
        assert not isinstance(seen.raw[-1].object, PlacedSlice)
        assert len(api.asked) == 1

    run(use, [service("web")], [slice_of("web")])


def test_many_services_are_requested_together_at_a_limited_rate(monkeypatch):
    monkeypatch.setattr(watch, "BURST", 2)
    many = 2 * watch.TOGETHER
    names = [f"web{n}" for n in range(many)]

    def later(api):
        api.open["/api/v1/services"] = False

    async def use(api, seen):
        await eventually(lambda: replaced(seen, "endpointslices"))
        api.open["/api/v1/services"] = True
        await eventually(lambda: replaced(seen, "services"))
        assert len(placed(seen)) == many
        assert (len(api.asked), "other-1" in placed(seen)) == (2, False)
        await api.lines["/api/v1/services"].put(event("MODIFIED", weighing("other", "10")))
        await eventually(lambda: seen[-1] == "+other")
        await asyncio.sleep(0.1)
        assert len(api.asked) == 2, "there is one request a second at most"

    run(use, [*map(weighing, names), service("other")], [slice_of(name) for name in (*names, "other")], later)


@pytest.mark.parametrize("how", ["refused", "deleted"])
def test_services_do_not_wait_for_ever(monkeypatch, how):
    monkeypatch.setattr(watch, "TIMEOUT", 0.2)

    def prepare(api):
        api.refused = 1000
        api.open[SLICES] = how != "deleted"

    async def use(api, seen):
        if how == "deleted":
            await asyncio.sleep(0.05)
            await api.lines["/api/v1/services"].put(event("DELETED", weighing("web", "10")))
        await eventually(lambda: replaced(seen, "services"))
        return placed(seen)

    assert run(use, [weighing("web")], [slice_of("web")], prepare) == []


def test_a_recreated_service_gets_its_own_zones_during_a_request_for_the_former():
    """Its slices may have arrived before the Service, without zones; a stale answer may describe older slices."""

    async def use(api, seen):
        services, slices = api.lines["/api/v1/services"], api.lines[SLICES]
        await eventually(lambda: len(seen.raw) == 4)
        api.answers = False
        await services.put(event("MODIFIED", weighing("web", "10")))
        await eventually(lambda: len(api.asked) == 1)
        await services.put(event("DELETED", weighing("web", "11")))
        await slices.put(event("DELETED", slice_of("web", "12")))
        await eventually(lambda: seen[-2:] == ["-web", "-web-1"] or seen[-2:] == ["-web-1", "-web"])
        again = slice_of("web", "13", "eu-2")
        await slices.put(event("ADDED", again))
        await eventually(lambda: seen[-1] == "+web-1")
        assert not isinstance(seen.raw[-1].object, PlacedSlice)
        await services.put(event("ADDED", weighing("web", "14")))
        await eventually(lambda: seen[-1] == "+web")
        api.lists[SLICES] = [again]
        api.answers = True
        await eventually(lambda: len(api.asked) == 2)
        await eventually(lambda: placed(seen) == ["web-1"] * 2)
        assert seen.raw[-1].object.endpoints[0].zone == "eu-2"

    run(use, [service("web")], [slice_of("web")])


def test_retry_after_of_a_server_is_obeyed():
    def prepare(api):
        api.refused, api.refusal, api.refusal_headers = 1000, 429, {"Retry-After": "100"}

    async def use(api, seen):
        await eventually(lambda: len(api.asked) == 1)
        await asyncio.sleep(0.5)
        return len(api.asked)

    assert run(use, [weighing("web")], [slice_of("web")], prepare) == 1


def test_a_zone_that_is_none_costs_only_itself():
    wrong = slice_of("web")
    wrong["endpoints"][0]["zone"] = 7

    async def use(api, seen):
        await eventually(lambda: replaced(seen, "services"))
        other = wrong["metadata"] | {"name": "web-2", "resourceVersion": "10"}
        await api.lines[SLICES].put(event("MODIFIED", wrong | {"metadata": other}))
        await eventually(lambda: "+web-2" in seen)
        assert {"!web-1 endpoints[0].zone", "!web-2 endpoints[0].zone"} <= set(seen)
        assert isinstance(seen.raw[-2].object, PlacedSlice)

    run(use, [weighing("web")], [wrong, slice_of("other")])
