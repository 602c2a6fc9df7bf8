"""List and watch: the requests, the deliveries, and how the proxy resumes a watch that ended."""

import asyncio
import json
import time

import pytest

from kubeproxy.api.source import targets
from support.scripted import bookmark, event, eventually, gone, listed, service
from support.watch_scripts import SLICES, fails, kinds, lists, scripted, watch, watches


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


def test_a_proxy_with_a_name_watches_the_services_with_its_label():
    assert targets("n", "mine")[0].labels == "service.kubernetes.io/service-proxy-name=mine"
    assert [target.labels for target in targets("n", "mine")[1:]] == [target.labels for target in targets("n")[1:]]


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
def test_gone_lists_again_and_finds_missed_changes(how):
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


def test_a_server_restored_from_a_backup_is_listed_again():
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
        assert server.requests[2].query["resourceVersion"] in {"1", "2"}  # a reset may arrive before data
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


def test_a_list_of_another_kind_is_garbage_that_takes_nothing_away():
    async def other(request, reply):
        await reply.answer(200, {"kind": "ConfigMapList", "metadata": {"resourceVersion": "7"}, "items": None})

    script = scripted(lists(service("a")), fails(410), other, other, lists(service("b")), watches())

    async def use(seen, server, reflector):
        await seen.until(2)
        return seen

    assert watch(script, use) == ["= a", "= b"]


def test_a_watch_that_ends_at_once_does_not_spin():
    script = scripted(lists(version="1"), watches(then="end at once"))

    async def use(seen, server, reflector):
        await asyncio.sleep(1.0)
        return len(server.requests)

    assert watch(script, use) < 25  # 0.02 s, doubling to 0.1 s; without pauses there would be thousands


def test_a_short_watch_with_an_event_is_no_failure():
    """As when a load balancer closes all connections: received events count, and the next watch begins at once."""
    several = [watches(event("ADDED", service(f"s{n}", n)), then="end at once") for n in range(2, 8)]
    script = scripted(lists(version="1"), *several, watches())

    async def use(seen, server, reflector):
        await seen.until(7)
        return reflector._recovery._watching.failures

    assert watch(script, use) == 0


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
    null = {
        "kind": "EndpointSlice",
        "metadata": {"resourceVersion": "265"},
        "addressType": "",
        "endpoints": None,
        "ports": None,
    }

    async def use(seen, server, reflector):
        await seen.until(1)
        await eventually(lambda: reflector.status.resource_version == "265")
        return seen

    assert watch(scripted(lists(), watches(event("BOOKMARK", null))), use, target=SLICES) == ["="]
