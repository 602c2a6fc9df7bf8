"""The API server over HTTP: watches, pages, faults, authentication, deletion, and requirements of kubectl."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import aiohttp
import pytest

from lab.apiserver.protobuf import CONTENT_TYPE, MAGIC
from lab.apiserver.server import Listener, ServerConfig, loopback
from support.lab_client import Client, with_server

SERVICES = "/api/v1/namespaces/default/services"
ALL = "/api/v1/services"
PODS = "/api/v1/namespaces/default/pods"
RCS = "/api/v1/namespaces/default/replicationcontrollers"


def service(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"ports": [{"port": 80}]}}


async def create(client: Client, name: str, **labels: str) -> dict[str, Any]:
    status, body = await client.call("POST", SERVICES, service(name, **labels))
    assert status == 201, body
    return body


# watches


def test_watch_tells_of_every_change_in_order() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        async with client.watch(f"{ALL}?watch=1&resourceVersion={rv}") as following:
            await create(client, "a")
            await client.patch(f"{SERVICES}/a", {"metadata": {"labels": {"x": "y"}}})
            await client.call("DELETE", f"{SERVICES}/a")
            events = [await following() for _ in range(3)]
        assert [e and e["type"] for e in events] == ["ADDED", "MODIFIED", "DELETED"]
        versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in events if e]
        assert versions == sorted(versions)

    with_server(test)


def test_watch_from_an_old_version_begins_with_missed_events() -> None:
    async def test(client: Client) -> None:
        first = await create(client, "a")
        await create(client, "b")
        async with client.watch(f"{ALL}?watch=1&resourceVersion={first['metadata']['resourceVersion']}") as following:
            event = await following()
            assert event
            assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "b")

    with_server(test)


def test_objects_enter_and_leave_a_selection() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        query = f"watch=1&resourceVersion={rv}&labelSelector=app%3Dweb,!skip"
        async with client.watch(f"{ALL}?{query}") as following:
            await create(client, "other", app="db")
            await create(client, "a", app="web")
            for labels in ({"x": "1"}, {"skip": "1"}, {"x": "2"}, {"skip": None}):
                await client.patch(f"{SERVICES}/a", {"metadata": {"labels": labels}})
            await client.call("DELETE", f"{SERVICES}/a")
            events = [await following() for _ in range(5)]
        assert [e and e["type"] for e in events] == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
        assert {e["object"]["metadata"]["name"] for e in events if e} == {"a"}

    with_server(test)


def test_watch_of_one_namespace_and_by_field() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        query = f"watch=1&resourceVersion={rv}&fieldSelector=metadata.name%3Db"
        async with client.watch(f"{SERVICES}?{query}") as following:
            await client.call("POST", "/api/v1/namespaces/kube-system/services", service("b"))
            await create(client, "a")
            await create(client, "b")
            event = await following()
            assert event
            assert (event["object"]["metadata"]["namespace"], event["object"]["metadata"]["name"]) == ("default", "b")

    with_server(test)


def test_watch_ends_with_its_timeout_after_a_bookmark() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        path = f"{ALL}?watch=1&resourceVersion={rv}&timeoutSeconds=1&allowWatchBookmarks=true"
        async with client.watch(path) as following:
            bookmark = await following()
            assert bookmark
            assert bookmark["type"] == "BOOKMARK"
            assert await following() is None

    with_server(test)


def test_bookmarks_come_by_period() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        async with client.watch(f"{ALL}?watch=1&resourceVersion={rv}&allowWatchBookmarks=true") as following:
            await client.call("POST", "/api/v1/nodes", {"metadata": {"name": "n"}})
            event = await following()
            assert event
            assert event["type"] == "BOOKMARK"
            assert int(event["object"]["metadata"]["resourceVersion"]) == client.server.store.revision

    with_server(test, ServerConfig(bookmark_period=0.05))


def test_compaction_ends_old_watches_and_pages() -> None:
    async def test(client: Client) -> None:
        for name in "abc":
            await create(client, name)
        old = client.server.store.revision
        _, page = await client.call("GET", f"{ALL}?limit=2")
        await create(client, "d")
        client.server.store.compact()
        async with client.watch(f"{ALL}?watch=1&resourceVersion={old}") as following:
            event = await following()
            assert event
            assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
            assert await following() is None
        status, body = await client.call("GET", f"{ALL}?limit=2&continue={page['metadata']['continue']}")
        assert (status, body["reason"]) == (410, "Expired")
        status, body = await client.call("GET", f"{ALL}?limit=9&continue={body['metadata']['continue']}")
        assert (status, [i["metadata"]["name"] for i in body["items"]]) == (200, ["b", "c", "d", "kubernetes"][-3:])
        status, _ = await client.call("GET", f"{ALL}?resourceVersion={old}&resourceVersionMatch=Exact")
        assert status == 410

    with_server(test)


def test_pages_are_a_snapshot() -> None:
    async def test(client: Client) -> None:
        for name in "abcd":
            await create(client, name)
        _, first = await client.call("GET", f"{SERVICES}?limit=2")
        await client.call("DELETE", f"{SERVICES}/c")
        await create(client, "ca")
        _, second = await client.call("GET", f"{SERVICES}?limit=9&continue={first['metadata']['continue']}")
        assert [i["metadata"]["name"] for i in second["items"]] == ["c", "d", "kubernetes"]
        assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]

    with_server(test)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("resourceVersion=5&resourceVersionMatch=Other", 422),
        ("resourceVersionMatch=Exact", 422),
        ("resourceVersion=0&resourceVersionMatch=Exact", 422),
        ("sendInitialEvents=true", 422),
        ("limit=many", 400),
        ("labelSelector=%3D", 400),
        ("fieldSelector=spec.ports%3D80", 400),
        ("fieldSelector=spec.type%3DNodePort", 200),
        ("watch=1&resourceVersionMatch=Exact", 422),
        ("watch=1&sendInitialEvents=true", 422),
        ("continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEifQ", 400),
    ],
)
def test_list_options(query: str, status: int) -> None:
    async def test(client: Client) -> None:
        assert (await client.call("GET", f"{ALL}?{query}"))[0] == status

    with_server(test)


# faults


def test_cut_garbage_and_gone_lines() -> None:
    async def test(client: Client) -> None:
        for fault in ("cut_watch", "garbage_watch", "gone"):
            rv = client.server.store.revision
            async with client.session.get(f"{client.url}{ALL}?watch=1&resourceVersion={rv}") as r:
                client.server.faults.update({fault: 1})
                await create(client, fault.replace("_", "-"))
                if fault == "cut_watch":
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await r.content.read()
                elif fault == "garbage_watch":
                    assert b"\xff" in await r.content.readline()
                else:
                    assert b'"code":410' in await r.content.readline()
                    assert await r.content.readline() == b""

    with_server(test)


def test_a_stalled_watch_delivers_all_events_when_it_continues() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        async with client.watch(f"{ALL}?watch=1&resourceVersion={rv}") as following:
            client.server.faults.stall_watch = True
            await create(client, "a")
            waiting = asyncio.create_task(following())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            client.server.faults.stall_watch = False
            event = await waiting
            assert event
            assert event["object"]["metadata"]["name"] == "a"

    with_server(test)


def test_failing_resetting_and_slow_answers() -> None:
    async def test(client: Client) -> None:
        client.server.faults.update({"fail": 1, "fail_code": 503, "resources": ["services"]})
        assert (await client.call("GET", "/api/v1/nodes"))[0] == 200
        assert (await client.call("GET", ALL))[0] == 503
        assert (await client.call("GET", ALL))[0] == 200
        client.server.faults.update({"reset": 1, "resources": []})
        with pytest.raises(aiohttp.ClientError):
            # Not a GET, which the client would repeat by itself.
            await client.call("POST", SERVICES, service("a"))
        client.server.faults.delay = 0.05
        start = asyncio.get_running_loop().time()
        await client.call("GET", ALL)
        assert asyncio.get_running_loop().time() - start >= 0.05
        with pytest.raises(KeyError):
            client.server.faults.update({"explode": 1})
        with pytest.raises(TypeError, match="fail: expected int"):
            client.server.faults.update({"fail": "x"})

    with_server(test)


def test_refused_connections_and_a_return() -> None:
    async def test(client: Client) -> None:
        port = client.server.addresses[0][1]
        rv = client.server.store.revision
        async with client.session.get(f"{client.url}{ALL}?watch=1&resourceVersion={rv}") as r:
            await client.server.refuse()
            with pytest.raises(aiohttp.ClientError):
                await r.content.readline()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.call("GET", ALL)
        client.server.set_listeners(Listener(lambda: loopback(port)))
        await client.server.listen()
        assert (await client.call("GET", ALL))[0] == 200

    with_server(test)


def _heard(link: socket.socket) -> bytes:
    with link:
        link.settimeout(5)
        try:
            return link.recv(1)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("turns", range(6))
def test_connections_that_were_just_accepted_are_dropped_too(turns: int) -> None:
    async def test(client: Client) -> None:
        links = [socket.create_connection(client.server.addresses[0][:2]) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        gc.disable()  # which would close them in the end
        try:
            await client.server.refuse()
            assert await asyncio.to_thread(lambda: [_heard(link) for link in links]) == [b""] * len(links)
        finally:
            gc.enable()

    with_server(test)


def test_end_of_all_watches_is_orderly() -> None:
    async def test(client: Client) -> None:
        rv = client.server.store.revision
        async with client.watch(f"{ALL}?watch=1&resourceVersion={rv}") as following:
            client.server.end_watches()
            assert await following() is None

    with_server(test)


# authentication


def test_tokens() -> None:
    async def test(client: Client) -> None:
        for token, status in (("good", 200), ("bad", 401), ("denied", 403)):
            headers = {"Authorization": f"Bearer {token}"}
            assert (await client.call("GET", ALL, headers=headers))[0] == status
        assert (await client.call("GET", ALL))[0] == 401
        _, body = await client.call("PUT", f"{SERVICES}/a", {}, {"Authorization": "Bearer denied"})
        assert 'cannot update resource "services" in API group "" in the namespace "default"' in body["message"]

    config = ServerConfig(tokens={"good": "admin", "denied": "nobody"}, denied_users=frozenset({"nobody"}))
    with_server(test, config)


# writes


def test_update_conflicts_and_unknown_fields() -> None:
    async def test(client: Client) -> None:
        made = await create(client, "a")
        path = f"{SERVICES}/a"
        assert (await client.patch(path, {"metadata": {"resourceVersion": "1", "labels": {"x": "y"}}}))[0] == 409
        assert (await client.call("PUT", path, made | {"metadata": made["metadata"] | {"uid": "other"}}))[0] == 409
        assert (await client.call("PUT", path, service("b")))[0] == 400
        assert (await client.call("PUT", f"{SERVICES}/none", service("none")))[0] == 404
        wrong = {"spec": {"prots": []}}
        assert (await client.patch(f"{path}?fieldValidation=Strict", wrong))[0] == 400
        status, body = await client.patch(path, wrong)
        assert (status, "prots" in body["spec"]) == (200, False)
        status, _ = await client.patch(path, wrong, "apply-patch")
        assert status == 415
        assert (await client.call("POST", f"{SERVICES}?dryRun=All", service("dry")))[0] == 201
        assert (await client.call("GET", f"{SERVICES}/dry"))[0] == 404

    with_server(test)


def test_scale() -> None:
    async def test(client: Client) -> None:
        template = {"metadata": {"labels": {"app": "w"}}, "spec": {"containers": [{"name": "c", "image": "w"}]}}
        status, made = await client.call("POST", RCS, {"metadata": {"name": "w"}, "spec": {"template": template}})
        assert (status, made["spec"]["replicas"], made["spec"]["selector"]) == (201, 1, {"app": "w"})
        status, scale = await client.call("GET", f"{RCS}/w/scale")
        assert (scale["kind"], scale["spec"], scale["status"]["selector"]) == ("Scale", {"replicas": 1}, "app=w")
        status, scale = await client.patch(f"{RCS}/w/scale", {"spec": {"replicas": 3}}, "merge-patch")
        assert (status, scale["spec"]["replicas"]) == (200, 3)
        scale["spec"]["replicas"] = 2
        assert (await client.call("PUT", f"{RCS}/w/scale", scale))[1]["spec"]["replicas"] == 2
        scale["metadata"]["resourceVersion"] = "1"
        assert (await client.call("PUT", f"{RCS}/w/scale", scale))[0] == 409
        _, rc = await client.call("GET", f"{RCS}/w")
        assert (rc["spec"]["replicas"], rc["metadata"]["generation"]) == (2, 3)

    with_server(test)


def test_delete_waits_for_grace_and_finalizers() -> None:
    async def test(client: Client) -> None:
        pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "c"}]}}
        await client.call("POST", PODS, pod)
        _, ending = await client.call("DELETE", f"{PODS}/p", {"gracePeriodSeconds": 5})
        assert ending["metadata"]["deletionGracePeriodSeconds"] == 5
        assert (await client.call("GET", f"{PODS}/p"))[0] == 200
        assert (await client.call("DELETE", f"{PODS}/p?gracePeriodSeconds=0"))[0] == 200
        assert (await client.call("GET", f"{PODS}/p"))[0] == 404

        held = service("held")
        held["metadata"]["finalizers"] = ["example.com/hold"]
        await client.call("POST", SERVICES, held)
        _, ending = await client.call("DELETE", f"{SERVICES}/held")
        assert ending["metadata"]["deletionTimestamp"]
        await client.patch(f"{SERVICES}/held", {"metadata": {"finalizers": None}}, "merge-patch")
        assert (await client.call("GET", f"{SERVICES}/held"))[0] == 404

    with_server(test)


def test_delete_of_many_and_preconditions() -> None:
    async def test(client: Client) -> None:
        for name in "abc":
            await create(client, name, kind="x" if name < "c" else "y")
        assert (await client.call("DELETE", f"{SERVICES}/a", {"preconditions": {"uid": "other"}}))[0] == 409
        status, body = await client.call("DELETE", f"{SERVICES}?labelSelector=kind%3Dx")
        assert (status, len(body["items"])) == (200, 2)
        _, left = await client.call("GET", SERVICES)
        assert [i["metadata"]["name"] for i in left["items"]] == ["c", "kubernetes"]
        assert (await client.call("DELETE", "/api/v1/namespaces"))[0] == 405

    with_server(test)


def test_one_event_in_both_versions() -> None:
    async def test(client: Client) -> None:
        event = {
            "metadata": {"name": "e"},
            "regarding": {"kind": "Node", "name": "n"},
            "reportingController": "kube-proxy",
            "note": "hello",
            "type": "Normal",
        }
        new, core = ("/apis/events.k8s.io/v1/namespaces/default/events", "/api/v1/namespaces/default/events")
        assert (await client.call("POST", new, event))[0] == 201
        _, old = await client.call("GET", f"{core}/e")
        assert (old["involvedObject"]["name"], old["message"]) == ("n", "hello")
        _, listed = await client.call("GET", f"{core}?fieldSelector=involvedObject.kind%3DNode,involvedObject.name%3Dn")
        assert [i["reportingComponent"] for i in listed["items"]] == ["kube-proxy"]
        _, listed = await client.call("GET", new)
        assert [i["note"] for i in listed["items"]] == ["hello"]
        assert "kind" not in listed["items"][0]

    with_server(test)


def test_protobuf_body_of_kubectl_create() -> None:
    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return bytes((number << 3, value))
        return bytes((number << 3 | 2, len(value))) + value

    port = field(1, b"http") + field(3, 80) + field(4, field(1, 1) + field(2, 0) + field(3, b"web"))
    spec = field(1, port) + field(2, field(1, b"app") + field(2, b"w")) + field(4, b"NodePort") + field(13, 0)
    meta = field(1, b"pb") + field(8, b"") + field(11, field(1, b"l") + field(2, b"v"))
    body = MAGIC + field(1, field(1, b"v1") + field(2, b"Service")) + field(2, field(1, meta) + field(2, spec))

    async def test(client: Client) -> None:
        status, made = await client.call("POST", SERVICES, body, {"Content-Type": CONTENT_TYPE})
        assert status == 201, made
        assert made["metadata"]["labels"] == {"l": "v"}
        assert (made["spec"]["type"], made["spec"]["selector"]) == ("NodePort", {"app": "w"})
        assert made["spec"]["ports"][0] | {"nodePort": 0} == {
            "name": "http",
            "port": 80,
            "protocol": "TCP",
            "targetPort": "web",
            "nodePort": 0,
        }
        for bad in (b"k8s\x00\xff", b"none", MAGIC + field(2, b"\x0a\x7f")):
            assert (await client.call("POST", SERVICES, bad, {"Content-Type": CONTENT_TYPE}))[0] == 400
        assert (await client.call("POST", PODS, body, {"Content-Type": CONTENT_TYPE}))[0] == 415

    with_server(test)


# kubectl's first requests


def test_health_and_one_group() -> None:
    async def test(client: Client) -> None:
        assert (await client.call("GET", "/apis/discovery.k8s.io"))[1]["kind"] == "APIGroup"
        for path in ("/healthz", "/livez", "/readyz"):
            assert (await client.call("GET", path)) == (200, "ok")
        assert (await client.call("GET", "/api/v1/things"))[0] == 404
        assert (await client.call("GET", f"{SERVICES}/a/nothing"))[0] == 404
        assert (await client.call("POST", f"{SERVICES}/kubernetes", {}))[0] == 405

    with_server(test)


AGGREGATED = "application/json;g=apidiscovery.k8s.io;v={};as=APIGroupDiscoveryList"


@pytest.mark.parametrize(
    ("versions", "kinds"),
    [(["v2", "v2beta1"], ["APIGroupDiscoveryList"] * 2), (["v2beta1"], ["APIVersions", "APIGroupList"])],
    ids=["kubectl from 1.30", "kubectl to 1.29"],
)
def test_discovery_in_a_version_that_the_client_supports(versions: list[str], kinds: list[str]) -> None:
    async def test(client: Client) -> None:
        accept = {"Accept": ",".join([*(AGGREGATED.format(v) for v in versions), "application/json"])}
        seen = [(await client.call("GET", path, headers=accept))[1]["kind"] for path in ("/api", "/apis")]
        assert seen == kinds

    with_server(test)


@pytest.mark.parametrize("plural", ["nodes", "pods", "services", "namespaces", "events", "serviceaccounts"])
def test_tables_have_a_cell_for_each_column(plural: str) -> None:
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}

    async def test(client: Client) -> None:
        await client.call("POST", "/api/v1/nodes", {"metadata": {"name": "n"}})
        await client.call("POST", PODS, {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}})
        await client.call("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "s"}})
        event = {"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}}
        await client.call("POST", "/api/v1/namespaces/default/events", event)
        _, table = await client.call("GET", f"/api/v1/{plural}", headers=accept)
        assert table["kind"] == "Table"
        assert table["rows"]
        assert {len(r["cells"]) for r in table["rows"]} == {len(table["columnDefinitions"])}
        path = f"/api/v1/{plural}?watch=1&timeoutSeconds=1&includeObject=Object"
        async with client.session.get(client.url + path, headers=accept) as r:
            line = await r.content.readline()
            assert b'"kind":"Table"' in line

    with_server(test)
