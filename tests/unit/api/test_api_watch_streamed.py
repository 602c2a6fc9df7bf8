"""WatchList: lists that are streamed as a watch, and servers without this feature."""

import asyncio
import contextlib

import pytest
from msgspec.structs import replace

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import WatchListSupport
from kubeproxy.api.watch import ApiSource
from support.scripted import Server, bookmark, event, eventually, listed, service
from support.watch_scripts import PACE, SERVICES, Seen, fails, kinds, lists, scripted, watch, watches


def test_a_streamed_list():
    async def script(request, reply):
        await reply.begin()
        for kind, name, version in (("ADDED", "a", 3), ("ADDED", "b", 4), ("MODIFIED", "a", 6), ("DELETED", "b", 7)):
            await reply.chunk(event(kind, service(name, version)))
        await reply.chunk(bookmark("9", initial_end=True))
        await asyncio.sleep(0.05)
        await reply.chunk(event("ADDED", service("c", 10)))
        await reply.forever()

    async def use(seen, server, reflector):
        await seen.until(2)
        query = server.requests[0].query
        assert query["sendInitialEvents"] == query["allowWatchBookmarks"] == "true"
        assert query["resourceVersionMatch"] == "NotOlderThan"
        assert "resourceVersion" not in query
        await asyncio.sleep(2 * PACE.quiet)
        assert len(server.requests) == 1
        assert reflector.status.connected
        return list(seen)

    assert watch(script, use, plain=False) == ["= a", "+c"]


def test_a_streamed_list_without_an_end_is_given_up():
    streamed = []

    async def script(request, reply):
        if request.kind == "watchlist":
            streamed.append(request)
        await reply.begin()
        for number in range(100):
            await reply.chunk(event("ADDED", service(f"s{number}", number + 1)))
        await reply.forever()

    async def use(seen, server, reflector):
        await eventually(lambda: len(streamed) > 1)
        return list(seen), reflector.status.trouble

    seen, trouble = watch(script, use, plain=False, target=replace(SERVICES, most=2000))
    assert seen == []
    assert "longer than 2000 bytes" in trouble


def test_the_recorded_streamed_list():
    async def script(request, reply):
        await reply.recorded("watch-list-services" if request.kind == "watchlist" else "watch-services")

    async def use(seen, server, reflector):
        await seen.until(3)
        assert server.requests[1].query["resourceVersion"] == "245"
        return seen[:3]

    first, *rest = watch(script, use, plain=False)
    assert first == "= ds en hl kubernetes lb web"
    assert rest == ["+web", "-np"]


REFUSALS = {
    "bad request": fails(400, "resourceVersionMatch is forbidden for watch"),
    "invalid": fails(422, "sendInitialEvents is forbidden here"),
    "not found": fails(404),
    "by storage": None,
    "ignored": watches(event("ADDED", service("a", 3))),
    "ignored and ended": watches(event("ADDED", service("a", 3)), then="end"),
    "server error": fails(500),
    "garbage": watches(b"garbage\n"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_server_without_streamed_lists_is_listed(how):
    async def script(request, reply):
        if request.kind == "watchlist":
            if how == "by storage":
                return await reply.recorded("watch-list-not-supported-by-storage")
            return await REFUSALS[how](request, reply)
        if request.kind == "list":
            return await reply.answer(200, listed(service("a"), version="9"))
        return await reply.forever()

    async def use(seen, server, reflector):
        await seen.until(1)
        return kinds(server)

    tried = watch(script, use, plain=False)
    assert tried[-1] == "list" or tried[-2:] == ["list", "watch"]
    if how in {"bad request", "invalid", "not found", "by storage", "ignored"}:
        assert tried[:2] == ["watchlist", "list"]


def streamed_lists(support=None):
    """Run all reflectors against a server without streamed lists; return the number of requests for them."""

    async def script(request, reply):
        if request.kind == "watchlist":
            return await reply.status(422)
        return await (lists() if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as server:
            client = HttpClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))
            seen = Seen()
            source = ApiSource(client, "node-a", seen, pace=PACE, support=support)
            task = asyncio.create_task(source.run())
            await seen.until(4)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.close()
            assert all(status.synced for status in source.statuses.values())
            assert {found.resource for found in seen.raw} == set(source.statuses)
            return kinds(server).count("watchlist")

    return asyncio.run(main())


def test_the_refusal_is_remembered_for_all_resources():
    assert streamed_lists() <= 4


def test_streamed_lists_can_be_turned_off():
    support = WatchListSupport()
    support.refused("a feature gate")
    assert streamed_lists(support) == 0


def test_a_streamed_list_that_dies_delivers_nothing():
    script = scripted(
        watches(event("ADDED", service("a", 3)), then="reset"),
        watches(event("ADDED", service("b", 3)), bookmark("9", initial_end=True)),
    )

    async def use(seen, server, reflector):
        await seen.until(1)
        return seen

    assert watch(script, use, plain=False) == ["= b"]
