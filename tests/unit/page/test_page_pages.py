"""The server of /ui/: the page and its policy, answers, refusals, and events over a real connection."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
from contextlib import suppress
from types import SimpleNamespace

import pytest

from kubeproxy.ask.facts import Objects
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.why import Why
from kubeproxy.config.options import PageAccess, page_access
from kubeproxy.errors import QuestionError
from kubeproxy.features import Features
from kubeproxy.model.addresses import Family
from kubeproxy.model.endpoints import parse_slice
from kubeproxy.model.objects import EndpointPort, EndpointSlice, Labels, ObjectMeta, SliceEndpoint
from kubeproxy.model.plan import FamilyGlobals
from kubeproxy.page import PATHS
from kubeproxy.page import feed as feed_module
from kubeproxy.page.beside import UnansweredError
from kubeproxy.page.feed import MOST_PAGES, Feed
from kubeproxy.page.pages import page, page_pages
from kubeproxy.server.admission import Admission
from kubeproxy.server.http import Request, routes
from kubeproxy.server.server import HttpServer

ACCESS = page_access(["127.0.0.0/8", "::1/128"], [])
HTML = b"<!doctype html><style>a{}</style><script type=module>let a\r\n</script><style>a{}</style><SCRIPT>1</SCRIPT >"


NAMES = [("default", f"s{number}") for number in range(250)]


class FakeDesk:
    listed = True
    snapshot = SimpleNamespace(names=NAMES)

    async def placed(self, made):
        return made

    def facts(self):
        families = {Family.IPV4: FamilyGlobals(nodeport_ips=(bytes([192, 0, 2, 1]),)), Family.IPV6: None}
        world = SimpleNamespace(node_name="node-a", features=Features(), families=[*families], of=families.get)
        state = {"unready": {}, "awaits": "", "listed": self.listed, "reach": None}
        return SimpleNamespace(
            world=world, version="1", mode="nftables", pid=1, started=2.0, services=250, endpoint_slices=3, **state
        )

    def service(self, name):
        if name not in NAMES:
            raise QuestionError(unwatched(name))
        return {"namespace": name[0], "name": name[1], "state": "programmed"}

    def objects(self, names):
        meta = ObjectMeta(name="s1-x", namespace="default", labels=Labels("s1"))
        ports = [] if names == [("default", "s5")] else [EndpointPort(80)]
        piece = parse_slice(EndpointSlice(meta, "IPv4", [SliceEndpoint(["10.0.0.1"], None, "b", zone="eu-1")], ports))
        return [Objects(name, None, {"s1-x": piece}) for name in names]

    def has_address(self, name, address):
        return (name[1], address) == ("s3", bytes([10, 0, 0, 1]))

    def why(self, source, target, interface):
        if source == "node":
            why = Why(source="this node", destination=target, outcome="forwarded", client_sees="", fixes=("none",))
            return SimpleNamespace(why=why)
        raise QuestionError(f"{source!r} is no \x1b IP address")


class FakeNews:
    revision = 7
    troubles = 0

    def begin(self): ...

    def take(self):
        return {"revision": 7}

    def row(self, name):
        return None if name[1] == "s7" else ("/".join(name), "programmed", 1, 1, "ClusterIP", "", [], 0.0, [])


class FakeLooks:
    async def run(self):
        await asyncio.Event().wait()


async def asked(question):
    if question["target"] == "10.96.0.1:81":
        raise UnansweredError("it takes too long")
    return json.dumps({"asked": question}).encode()


def served(access: PageAccess = ACCESS):
    feed = Feed(FakeNews(), lambda: {"node": "node-a"}, lambda _: None, lambda _: (FakeLooks(), FakeLooks()))
    return routes(page_pages(access, FakeDesk(), feed, asked)), feed


def ask(path, method="GET", access=ACCESS, **more):
    path, _, query = path.partition("?")
    handler, _ = served(access)
    given = {"peer": "127.0.0.1", "local": "127.0.0.1", "host": "localhost:10249"} | more
    return handler(Request(method, path, query, **given))


async def text(response):
    return response.body if isinstance(response.body, bytes) else await whole(response)


def body_of(response):
    return asyncio.run(text(response))


async def whole(response):
    return b"".join([piece async for piece in response.body])


def test_the_policy_allows_only_the_pages_own_script():
    headers = dict(page(HTML).headers)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"

    assert policy == {
        "default-src": "'none'",
        "script-src": f"{digest(b'let a' + bytes([10]))} {digest(b'1')}",
        "style-src": digest(b"a{}"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert "script-src 'none'; style-src 'none'" in dict(page(b"<p>").headers)["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "more", "status", "text"),
    [
        ("/ui", {}, 301, "see ui/"),
        ("/ui/api/facts", {}, 200, '"node":"node-a"'),
        ("/ui/api/facts", {}, 200, '"nodePortAddresses":{"IPv4":["192.0.2.1"],"IPv6":[]}'),
        ("/ui/api/facts", {"peer": "10.0.0.1"}, 403, "not available to clients at 10.0.0.1"),
        ("/ui/api/look", {}, 409, "no page is open"),
        ("/ui/api/find?address=10.0.0.1", {}, 200, '{"services":["default/s3"]}'),
        ("/ui/api/find?address=10.0.0", {}, 400, "expected an IPv4 or IPv6 address, got '10.0.0'"),
        ("/ui/api/find", {"site": "cross-site"}, 403, "another site"),
        ("/ui/api/look", {"site": "cross-site"}, 403, "another site"),
        ("/ui/api/look", {"peer": "10.0.0.1"}, 403, "not available to clients at 10.0.0.1"),
        ("/ui/", {"peer": "10.0.0.1"}, 403, "kubectl port-forward"),
        ("/ui/", {"host": "evil.example"}, 403, "--page-hosts"),
        ("/ui/api/facts", {"site": "cross-site"}, 403, "another site"),
        ("/ui/api/facts", {"origin": "http://evil.example\x1b"}, 403, "not pages of http://evil.example\\x1b"),
        ("/ui/api/facts", {"method": "POST"}, 405, "not allowed"),
        ("/ui/api/service?name=default/s1", {}, 200, '"state":"programmed"'),
        ("/ui/api/service?name=s1", {}, 200, '"address":"10.0.0.1:80","port":"","protocol":"TCP","slice":"s1-x"'),
        ("/ui/api/service?name=s5", {}, 200, '"address":"10.0.0.1","port":null,"protocol":null,"slice":"s1-x"'),
        ("/ui/api/service?name=default/none", {}, 404, "no Service default/none that is watched"),
        ("/ui/api/service", {}, 404, "no Service"),
        ("/ui/api/why?from=node&to=10.96.0.1:80", {}, 200, '"asked": {"source": "node", "target": "10.96.0.1:80", '),
        ("/ui/api/why?from=node&to=10.96.0.1:81", {}, 200, 'programs, routes and endpoints: it takes too long","why"'),
        (
            "/ui/api/why?from=node&to=10.96.0.1:81",
            {},
            200,
            'nothing else on this node could be checked (?)","answer":"unknown"',
        ),
        ("/ui/api/why?from=x&to=y", {}, 400, "'x' is no \\x1b IP address"),
        ("/ui/api/nothing", {}, 404, "not found"),
    ],
)
def test_answers(path, more, status, text):
    response = ask(path, **more)
    body = body_of(response)
    assert (response.status, text in body.decode()) == (status, True), body
    if status not in {404, 405} or "Service" in text:
        headers = dict(response.headers)
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_a_proxy_that_never_had_a_list_answers_no_question(monkeypatch):
    monkeypatch.setattr(FakeDesk, "listed", False)
    response = ask("/ui/api/why?from=x&to=y")
    assert (response.status, b"never had a list of all Services" in body_of(response)) == (503, True)


def test_the_paths_are_those_that_load_it():
    _, feed = served()
    assert page_pages(ACCESS, FakeDesk(), feed, asked).keys() == set(PATHS)


def test_the_redirect_is_relative():
    assert dict(ask("/ui").headers)["Location"] == "ui/"


def test_a_service_before_the_first_list_is_not_unknown(monkeypatch):
    monkeypatch.setattr(FakeDesk, "listed", False)
    response = ask("/ui/api/service?name=default/none")
    assert response.status == 503
    assert body_of(response).startswith(b"nothing is listed yet: the proxy never had a list of all Services")


S1 = "/ui/api/service?name=default/s1"


def test_a_service_has_the_zones_of_its_endpoints():
    assert [one["zone"] for one in json.loads(ask(S1).body)["endpoints"]] == ["eu-1"]


def test_an_empty_page_from_turns_it_off():
    assert ask("/ui/", access=PageAccess()).status == 404


@pytest.mark.parametrize("accepted", ["", "gzip, deflate, br"])
def test_services_come_in_steps(accepted):
    response = ask("/ui/api/services", accept_encoding=accepted)
    data = asyncio.run(whole(response))
    made = json.loads(gzip.decompress(data) if accepted else data)
    assert made["revision"] == 7
    assert [one[0] for one in made["services"]] == [f"default/s{number}" for number in range(250) if number != 7]
    assert ("Content-Encoding", "gzip") in response.headers if accepted else True


async def opened(port: int, path: str = "/ui/api/events", more: str = "") -> tuple:
    """Request events like a browser behind kubectl port-forward: from loopback, for localhost."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nAccept: text/event-stream\r\n{more}\r\n"
    writer.write(request.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, head.decode()


def test_events_over_a_connection_end_with_it_and_take_no_place(monkeypatch):
    monkeypatch.setattr(feed_module, "LINGER", 0.01)

    async def main():
        handler, feed = served()
        admission = Admission(lambda: (2, 1))
        server = HttpServer("test", handler, admission=admission)
        server.start(("127.0.0.1", 0))
        port = server.port
        writers = []
        try:
            pages = [await opened(port) for _ in range(MOST_PAGES)]
            writers += [writer for _, writer, _ in pages]
            assert all(head.startswith("HTTP/1.1 200") and "text/event-stream" in head for _, _, head in pages)
            for reader, _, _ in pages:
                assert b"event: hello" in await reader.readuntil(b"\n\n\r\n")
            assert admission.connected == 0  # one of the two permitted connections, with eight pages open
            _, writer, head = await opened(port)
            assert head.startswith("HTTP/1.1 503")
            writers.append(writer)
            reader, writer, head = await opened(port, "/ui/api/facts", "Sec-Fetch-Site: same-origin\r\n")
            assert head.startswith("HTTP/1.1 200")
            writers.append(writer)
            for _, writer, _ in pages[1:]:
                writer.close()
            while len(feed._pages) > 1:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
            await server.stop()  # with one page open
            with suppress(ConnectionError):
                await pages[0][0].read()  # until its end
            while feed.is_open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        finally:
            await server.stop()
            await feed.close()
            for writer in writers:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    async def timed():
        async with asyncio.timeout(20):
            await main()

    asyncio.run(timed())
