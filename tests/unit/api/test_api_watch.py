import asyncio
import contextlib
import json
import logging
import time

import msgspec
import pytest
from scripted import Server, bookmark, event, eventually, gone, listed, service

from kubeproxy.api.client import ApiClient
from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.credentials import Credentials, TokenFile
from kubeproxy.api.source import Backoff, Pace
from kubeproxy.api.watch import ApiSource, Reflector, WatchListSupport, targets
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted

PACE = Pace(first=0.02, first_connect=0.01, cap=0.1, quiet=0.15, relist=0.01, short_watch=0.02, absent=0.05)
SERVICES, SLICES, NODES, CIDRS = targets("node-a")


class Seen(list):
    """A sink that keeps what it got, in words."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.raw = []

    def __call__(self, events):
        self.batches.append(len(events))
        for found in events:
            self.raw.append(found)
            match found:
                case Replaced(_, objects, kept):
                    words = ["=", *sorted(item.metadata.name for item in objects)]
                    words += [f"kept:{name}" for _, name in sorted(kept)]
                    self.append(" ".join(words))
                case Upserted(_, item):
                    self.append(f"+{item.metadata.name}")
                case Deleted(_, _, name):
                    self.append(f"-{name}")
                case Rejected(_, _, name, _, field):
                    self.append(f"!{name} {field}")

    async def until(self, count):
        await eventually(lambda: len(self) >= count)


def watch(script, use, *, target=SERVICES, plain=True, pace=PACE, credentials=None):
    """Run a reflector against `script`, `use(seen, server, reflector)` beside it; return what `use` returns."""

    async def main():
        async with Server(script) as server:
            cluster = Cluster(parse_server(server.url, "test"), Trust(), credentials or Credentials())
            client = ApiClient(cluster)
            seen = Seen()
            support = WatchListSupport()
            support.supported = not plain
            reflector = Reflector(client, target, seen, support=support, pace=pace)
            task = asyncio.create_task(reflector.run())
            try:
                return await use(seen, server, reflector)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await client.close()

    return asyncio.run(main())


def kinds(server):
    return [request.kind for request in server.requests]


def scripted(*steps):
    """A script of coroutine functions, one a request; the last one is repeated."""
    left = list(steps)

    async def script(request, reply):
        step = left.pop(0) if len(left) > 1 else left[0]
        await step(request, reply)

    return script


def lists(*items, version="1"):
    async def step(request, reply):
        await reply.answer(200, listed(*items, version=version))

    return step


def watches(*lines, then="forever"):
    async def step(request, reply):
        await reply.begin()
        for line in lines:
            await reply.chunk(line)
        if then == "forever":
            await reply.forever()
        elif then == "end":
            await asyncio.sleep(2 * PACE.short_watch)
            await reply.end()
        elif then == "end at once":
            await reply.end()
        else:
            reply.reset()
            await reply.forever()

    return step


def fails(code, message="no", **headers):
    async def step(request, reply):
        await reply.status(code, message, headers)

    return step


def test_list_then_watch():
    script = scripted(
        lists(service("a"), version="10"),
        watches(
            event("ADDED", service("b", 11)), event("MODIFIED", service("a", 12)), event("DELETED", service("b", 13))
        ),
    )

    async def use(seen, server, reflector):
        await seen.until(4)
        status = reflector.status
        assert (status.synced, status.connected, status.resource_version) == (True, True, "13")
        assert status.staleness(time.monotonic()) == 0.0
        first, second = server.requests
        assert first.query == {
            "limit": "500",
            "resourceVersion": "0",
            "labelSelector": "!service.kubernetes.io/service-proxy-name",
            "fieldSelector": "spec.clusterIP!=None",
        }
        assert second.query["resourceVersion"] == "10"
        assert second.query["allowWatchBookmarks"] == "true"
        assert 300 <= int(second.query["timeoutSeconds"]) <= 600
        return seen

    assert watch(script, use) == ["= a", "+b", "+a", "-b"]


def test_selectors_are_those_of_kube_proxy():
    seen = {target.resource: (target.path, target.labels, target.fields) for target in targets("n")}
    assert seen == {
        "services": ("/api/v1/services", "!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
        "endpointslices": ("/apis/discovery.k8s.io/v1/endpointslices", "!service.kubernetes.io/headless", ""),
        "nodes": ("/api/v1/nodes", "", "metadata.name=n"),
        "servicecidrs": ("/apis/networking.k8s.io/v1/servicecidrs", "", ""),
    }


def test_events_of_one_read_come_together():
    async def burst(request, reply):
        await reply.begin()
        lines = [json.dumps(event("ADDED", service(f"s{n}", 20 + n))).encode() + b"\n" for n in range(50)]
        await reply.raw(b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines))
        await reply.forever()

    async def use(seen, server, reflector):
        await seen.until(51)
        return seen.batches

    assert watch(scripted(lists(), burst), use) == [1, 50]


def test_pages_are_joined():
    async def page(request, reply):
        if request.kind == "watch":
            return await reply.forever()
        token = request.query.get("continue", "")
        assert ("resourceVersion" in request.query) != bool(token)
        following = {"": "t1", "t1": "t2", "t2": ""}[token]
        return await reply.answer(200, listed(service("s" + token), version="7", token=following))

    async def use(seen, server, reflector):
        await seen.until(1)
        return list(seen), reflector.status.resource_version

    assert watch(page, use) == (["= s st1 st2"], "7")


def test_an_expired_continue_token_makes_one_whole_list():
    async def page(request, reply):
        if request.kind == "watch":
            return await reply.forever()
        if "continue" in request.query:
            return await reply.status(410, "continue expired")
        if "limit" in request.query:
            return await reply.answer(200, listed(service("old"), version="7", token="t1"))
        assert "resourceVersion" not in request.query
        return await reply.answer(200, listed(service("a"), service("b"), version="9"))

    async def use(seen, server, reflector):
        await seen.until(1)
        return seen

    assert watch(page, use) == ["= a b"]


def test_a_list_that_dies_in_the_middle_delivers_nothing():
    async def dies(request, reply):
        if "continue" not in request.query:
            return await reply.answer(200, listed(service("a"), version="7", token="t1"))
        await reply.raw(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"metadata":{"res')
        return reply.reset()

    async def use(seen, server, reflector):
        await seen.until(1)
        return seen

    assert watch(scripted(dies, dies, lists(service("b")), watches()), use) == ["= b"]


@pytest.mark.parametrize("how", ["event", "status"])
def test_gone_lists_again_and_finds_what_was_missed(how):
    script = scripted(
        lists(service("a"), service("b"), version="5"),
        watches(event("ADDED", service("c", 6)), gone(), then="end") if how == "event" else fails(410),
        lists(service("b"), version="50"),
        watches(event("ADDED", service("d", 51))),
    )

    async def use(seen, server, reflector):
        await seen.until(4 if how == "event" else 3)
        assert kinds(server) == ["list", "watch", "list", "watch"]
        again = server.requests[2].query
        assert again["resourceVersionMatch"] == "NotOlderThan"
        assert again["resourceVersion"] == "5"
        assert server.requests[3].query["resourceVersion"] == "50"
        return [words for words in seen if words != "+c"]

    assert watch(script, use) == ["= a b", "= b", "+d"]


def test_a_server_restored_from_a_backup_is_listed_from_anew():
    too_large = {"code": 504, "details": {"causes": [{"reason": "ResourceVersionTooLarge"}]}, "message": "too large"}

    async def behind(request, reply):
        await reply.answer(504, too_large)

    script = scripted(lists(version="900"), behind, lists(service("a"), version="3"), watches())

    async def use(seen, server, reflector):
        await seen.until(2)
        assert "resourceVersion" not in server.requests[2].query
        return seen

    assert watch(script, use) == ["=", "= a"]


def test_the_normal_end_of_a_watch_resumes_without_a_list():
    script = scripted(
        lists(version="1"),
        watches(event("ADDED", service("a", 2)), then="end"),
        watches(bookmark("9"), then="end"),
        watches(event("ADDED", service("b", 10))),
    )

    async def use(seen, server, reflector):
        await seen.until(3)
        assert [request.query["resourceVersion"] for request in server.requests] == ["0", "1", "2", "9"]
        return seen

    assert watch(script, use) == ["=", "+a", "+b"]


def test_a_watch_that_dies_resumes_where_it_was_and_cut_lines_are_dropped():
    half = json.dumps(event("ADDED", service("half", 3))).encode()[:40]
    script = scripted(
        lists(version="1"),
        watches(event("ADDED", service("a", 2)), half, then="reset"),
        watches(event("ADDED", service("half", 3))),
    )

    async def use(seen, server, reflector):
        await seen.until(3)
        assert server.requests[2].query["resourceVersion"] in {"1", "2"}  # a reset may overtake data
        return [words for words in seen if words != "+a"]

    assert watch(script, use) == ["=", "+half"]


def test_garbage_resumes_then_lists():
    garbage = watches(b"{]garbage\n")
    script = scripted(lists(version="1"), garbage, garbage, lists(service("a"), version="5"), watches())

    async def use(seen, server, reflector):
        await seen.until(2)
        assert kinds(server)[:4] == ["list", "watch", "watch", "list"]
        return seen

    assert watch(script, use) == ["=", "= a"]


def test_a_watch_that_ends_at_once_does_not_spin():
    script = scripted(lists(version="1"), watches(then="end at once"))

    async def use(seen, server, reflector):
        await asyncio.sleep(1.0)
        return len(server.requests)

    assert watch(script, use) < 25  # 0.02 s doubling to 0.1 s; unpaced it would be thousands


def test_a_wrong_object_keeps_its_last_good_state():
    wrong = service("bad", 3)
    wrong["spec"]["ports"] = "x"
    script = scripted(
        lists(service("a"), wrong, version="2"), watches(event("MODIFIED", wrong), event("ADDED", service("b", 4)))
    )

    async def use(seen, server, reflector):
        await seen.until(4)
        return seen

    assert watch(script, use) == ["= a kept:bad", "!bad spec.ports", "!bad spec.ports", "+b"]


def test_bookmarks_with_null_lists_only_move_the_version():
    null = {"metadata": {"resourceVersion": "265"}, "addressType": "", "endpoints": None, "ports": None}

    async def use(seen, server, reflector):
        await seen.until(1)
        await eventually(lambda: reflector.status.resource_version == "265")
        return seen

    assert watch(scripted(lists(), watches(event("BOOKMARK", null))), use, target=SLICES) == ["="]


# Credentials and permissions.


def test_a_refused_token_is_read_again(tmp_path):
    token = tmp_path / "token"
    token.write_text("old\n")

    async def script(request, reply):
        if request.headers["authorization"] != "Bearer new":
            token.write_text("new\n")
            return await reply.recorded("list-unauthorized")
        return await lists(service("a"))(request, reply) if request.kind == "list" else await watches()(request, reply)

    async def use(seen, server, reflector):
        await seen.until(1)
        return kinds(server)[:2]

    assert watch(script, use, credentials=TokenFile(str(token))) == ["list", "list"]


def test_unknown_credentials_are_tried_slowly(caplog):
    async def use(seen, server, reflector):
        await asyncio.sleep(0.5)
        return len(server.requests)

    assert watch(scripted(fails(401)), use) < 25
    assert caplog.text.count("does not accept our credentials") == 1


def test_a_missing_permission_is_named_once(caplog):
    async def forbidden(request, reply):
        await reply.recorded("list-forbidden")

    async def use(seen, server, reflector):
        await asyncio.sleep(0.5)
        return len(server.requests), list(seen)

    requests, seen = watch(scripted(forbidden), use)
    assert 3 < requests < 25
    assert seen == []
    assert caplog.text.count("allow the verbs list and watch of services") == 1


@pytest.mark.parametrize("code", [403, 404])
def test_servicecidrs_may_be_missing(code, caplog):
    there = False

    async def script(request, reply):
        if not there:
            await reply.status(code)
        elif request.kind == "list":
            await reply.answer(200, listed({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.0.0.0/16"]}}))
        else:
            await watches()(request, reply)

    async def use(seen, server, reflector):
        nonlocal there
        await seen.until(1)
        assert reflector.status.synced
        assert reflector.status.staleness(time.monotonic() + 500) == 0.0
        await asyncio.sleep(0.15)
        assert len(seen) == 1
        there = True
        await seen.until(2)
        return seen

    assert watch(script, use, target=CIDRS) == ["=", "= kubernetes"]
    assert caplog.text.count("Cannot watch") == 1


def test_retry_after_is_honoured():
    script = scripted(fails(429, **{"Retry-After": "1"}), lists(), watches())

    async def use(seen, server, reflector):
        await seen.until(1)
        return server.requests[1].at - server.requests[0].at

    assert watch(script, use) >= 1.0


def test_a_server_that_knows_no_field_selector_is_asked_without():
    async def script(request, reply):
        if "fieldSelector" in request.query:
            return await reply.status(400, 'field label not supported: "spec.clusterIP"')
        return await (lists() if request.kind == "list" else watches())(request, reply)

    async def use(seen, server, reflector):
        await seen.until(1)
        return kinds(server)[:2]

    assert watch(script, use) == ["list", "list"]


# WatchList.


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


def test_the_refusal_is_remembered_for_all_resources():
    async def script(request, reply):
        if request.kind == "watchlist":
            return await reply.status(422)
        return await (lists() if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as server:
            client = ApiClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))
            seen = Seen()
            source = ApiSource(client, "node-a", seen, pace=PACE)
            task = asyncio.create_task(source.run())
            await seen.until(4)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.close()
            assert all(status.synced for status in source.statuses.values())
            assert {found.resource for found in seen.raw} == set(source.statuses)
            return kinds(server).count("watchlist")

    assert asyncio.run(main()) <= 4


def test_a_streamed_list_that_dies_delivers_nothing():
    script = scripted(
        watches(event("ADDED", service("a", 3)), then="reset"),
        watches(event("ADDED", service("b", 3)), bookmark("9", initial_end=True)),
    )

    async def use(seen, server, reflector):
        await seen.until(1)
        return seen

    assert watch(script, use, plain=False) == ["= b"]


# An API server that is not there.


def test_an_absent_server_is_waited_for_with_one_line(caplog):
    caplog.set_level(logging.INFO, "kubeproxy")

    async def script(request, reply):
        await (lists(service("a")) if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as first:
            port = first.port
        client = ApiClient(Cluster(parse_server(f"http://127.0.0.1:{port}", "test"), Trust(), Credentials()))
        seen = Seen()
        # Only the connection's own pace is the default here: that of a node that boots.
        source = ApiSource(client, "node-a", seen, pace=msgspec.structs.replace(PACE, first_connect=0.05, cap=30.0))
        task = asyncio.create_task(source.run())
        await asyncio.sleep(0.5)
        assert not seen
        started = time.monotonic()
        async with Server(script, port=port):
            await seen.until(1)
            waited = time.monotonic() - started
            await seen.until(4)
            together = time.monotonic() - started - waited
        await eventually(lambda: not any(status.connected for status in source.statuses.values()))
        assert source.statuses["services"].staleness(time.monotonic() + 5.0) >= 5.0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()
        return waited, together

    waited, together = asyncio.run(main())
    assert waited < 1.5
    assert together < 0.5  # an answer to one wakes the others
    assert 1 <= caplog.text.count("connection refused") <= 2  # before, and after the end
    assert caplog.text.count("answers") == 1


def test_a_bug_in_the_sink_does_not_end_the_watch(caplog):
    calls = []

    async def script(request, reply):
        await (lists(service("a")) if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as server:
            client = ApiClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))

            def sink(events):
                calls.append(events)
                if len(calls) == 1:
                    raise KeyError("bug")

            support = WatchListSupport()
            support.supported = False
            task = asyncio.create_task(Reflector(client, SERVICES, sink, support=support, pace=PACE).run())
            await eventually(lambda: len(calls) >= 2)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.close()

    asyncio.run(main())
    assert "internal error" in caplog.text


def test_backoff_doubles_to_its_cap_and_starts_anew_when_healthy():
    now = 0.0
    backoff = Backoff(Pace(), lambda: now, jitter=lambda: 0.5)
    assert [backoff.next(0.8) for _ in range(8)] == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    now = 95.0
    assert backoff.next(0.05) == 0.05
    assert Backoff(Pace(), lambda: 0.0, jitter=lambda: 0.0).next(0.8) == 0.4
