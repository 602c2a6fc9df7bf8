"""Services and slices that are listed again, both or one of them: no sync may happen between the two lists."""

import asyncio

import pytest

from kubeproxy.api import relists
from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import WatchListSupport
from kubeproxy.api.source import ResourceStatus
from kubeproxy.api.watch import ApiSource
from kubeproxy.model.events import Deleted, Replaced
from support.scripted import Server, eventually, gone, kind_at, listed
from support.watch_scripts import PACE, running

SERVICES = "/api/v1/services"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
SLOW = 0.3


class Api:
    """An API server: its watches send the lines in `lines`; a list waits until its `open` is set."""

    def __init__(self):
        self.lines = {path: asyncio.Queue() for path in (SERVICES, SLICES)}
        self.open = {path: asyncio.Event() for path in (SERVICES, SLICES)}
        self.asked = []

    async def __call__(self, request, reply):
        if request.kind == "watch":
            await reply.begin()
            while request.path in self.lines:
                await reply.chunk(await self.lines[request.path].get())
            return await reply.forever()
        self.asked.append(request.path)
        if request.path in self.open:
            await self.open[request.path].wait()
        return await reply.answer(200, listed(version="9", kind=kind_at(request.path)))


def run(use):
    """Make a source follow a server; run `use(api, calls)` after all lists; `calls` are the calls of the sink."""

    async def main():
        api, calls = Api(), []
        for path in api.open:
            api.open[path].set()
        async with Server(api) as server:
            client = HttpClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))
            support = WatchListSupport()
            support.supported = False
            source = ApiSource(client, "node-a", calls.append, pace=PACE, support=support)
            async with running(source, client):
                watched = (source.statuses["services"], source.statuses["endpointslices"])
                await eventually(lambda: len(calls) >= 4 and all(status.connected for status in watched))
                calls.clear()
                await use(api, calls)

    asyncio.run(main())


def resources(call):
    return [one.resource for one in call if isinstance(one, Replaced)]


@pytest.mark.parametrize(("first", "second"), [(SERVICES, SLICES), (SLICES, SERVICES)])
def test_two_resources_that_are_listed_again_arrive_together(first, second):
    async def use(api, calls):
        api.open[second].clear()
        for path in (SERVICES, SLICES):
            await api.lines[path].put(gone())
        await eventually(lambda: api.asked.count(second) == 2)
        await asyncio.sleep(SLOW)
        assert calls == []
        api.open[second].set()
        await eventually(lambda: calls)
        assert set(resources(calls[0])) == {"services", "endpointslices"}
        assert resources(calls[0])[0] == first.rpartition("/")[2]

    run(use)


def test_a_list_waits_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(relists, "LONGEST", SLOW)

    async def use(api, calls):
        api.open[SLICES].clear()
        for path in (SERVICES, SLICES):
            await api.lines[path].put(gone())
        await eventually(lambda: calls)
        assert resources(calls[0]) == ["services"]
        api.open[SLICES].set()
        await eventually(lambda: len(calls) == 2)
        assert resources(calls[1]) == ["endpointslices"]

    run(use)


def test_a_list_does_not_wait_for_a_watch_that_goes_on(monkeypatch):
    monkeypatch.setattr(relists, "LONGEST", 1000.0)

    async def use(api, calls):
        await api.lines[SERVICES].put(gone())
        await eventually(lambda: calls)
        assert resources(calls[0]) == ["services"]

    run(use)


def test_a_list_does_not_wait_for_a_watch_that_begins_again_without_a_list(monkeypatch):
    """All watches ended, but only one of them is too old. Queued changes are applied after the list."""
    monkeypatch.setattr(relists, "LONGEST", 1000.0)

    async def main():
        statuses = {name: ResourceStatus(name, synced=True) for name in ("services", "endpointslices")}
        calls = []
        between = relists.Relists(calls.append, statuses.__getitem__)
        events = [Replaced("services", []), Deleted("services", "ns", "a")]
        for one in events:
            between.take([one])
        await asyncio.sleep(3 * relists.STEP)
        assert calls == []
        statuses["endpointslices"].connected = True
        await eventually(lambda: calls)
        assert calls == [events]

    asyncio.run(main())
