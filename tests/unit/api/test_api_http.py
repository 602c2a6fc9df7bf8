import asyncio
import contextlib
import gc
import json
import weakref

import pytest

from kubeproxy.api import http
from kubeproxy.api.connection import LEAST_PROGRESS, LIST, MAX_OVERHEAD, OBJECT, Exchange
from kubeproxy.api.http import HttpClient
from kubeproxy.api.source import Route
from kubeproxy.api.status import (
    ConnectionFailed,
    MalformedAnswer,
    StatusError,
)
from kubeproxy.errors import SourceError
from support.http_client import cluster_at, run
from support.scripted import Recording, Server


def test_requests_share_a_connection():
    async def script(request, reply):
        await reply.recorded("version")

    async def use(client, server):
        for _ in range(3):
            assert json.loads((await client.request("GET", "/version")).body)["minor"] == "36"
        return server.connections, server.requests[0].headers

    connections, headers = run(script, use)
    assert connections == 1
    assert headers["user-agent"].startswith("kube-proxy/v")
    assert headers["accept"] == "application/json;drop=metadata.managedFields"


ERRORS = [
    ("get-missing", 404),
    ("list-continue-garbage", 400),
    ("list-forbidden", 403),
    ("list-unauthorized", 401),
    ("list-rv-future", 504),
    ("watch-bad-rv", 500),
    ("put-conflict", 409),
    ("create-service-nodeport-taken", 422),
]


@pytest.mark.parametrize(("name", "code"), ERRORS)
@pytest.mark.parametrize("streaming", [False, True])
def test_failures_are_typed_and_carry_the_message(name, code, streaming):
    async def script(request, reply):
        await reply.recorded(name)

    async def use(client, server):
        await (client.stream("/x", print, on_open=print, idle_timeout=5) if streaming else client.request("GET", "/x"))

    with pytest.raises(StatusError) as caught:
        run(script, use)
    assert caught.value.code == code
    assert caught.value.too_large == (name == "list-rv-future")
    assert json.loads(Recording(name).body)["message"] in str(caught.value)
    assert caught.value.retry_after == (1.0 if name == "list-rv-future" else None)


def test_a_failure_without_a_status_quotes_the_answer():
    async def script(request, reply):
        await reply.answer(410, b"<html>proxy says no", {"Retry-After": "7"})

    with pytest.raises(StatusError, match="proxy says no") as caught:
        run(script, lambda client, _: client.request("GET", "/x"))
    assert caught.value.retry_after == 7.0
    assert caught.value.expired


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [ANSWER, CHUNKED])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_connection_may_die_at_any_byte(answer, how, streaming):
    async def script(request, reply):
        await reply.raw(answer[: int(request.path[1:])])
        if how == "reset":
            reply.reset()
        reply.writer.close()
        await reply.forever()

    def ask(client, path):
        if streaming:
            return client.stream(path, bytes, on_open=list, idle_timeout=5)
        return client.request("GET", path)

    async def use(client, server):
        for cut in range(len(answer)):
            with pytest.raises(ConnectionFailed):
                await ask(client, f"/{cut}")

    run(script, use)


def test_a_body_may_end_with_the_connection():
    async def script(request, reply):
        await reply.raw(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        reply.writer.close()
        await reply.forever()

    async def use(client, server):
        first = await client.request("GET", "/x")
        await client.request("GET", "/x")
        return bytes(first.body), server.connections

    assert run(script, use) == (b"all of it", 2)


def test_interim_answers_are_passed_over():
    async def script(request, reply):
        await reply.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n")
        await reply.answer(200, b"{}")

    async def use(client, server):
        return await client.request("GET", "/x"), await client.request("GET", "/y")

    first, second = run(script, use)
    assert first.body == second.body == b"{}"
    assert "x" not in first.headers


WRONG = [
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_OVERHEAD,
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 4 * MAX_OVERHEAD,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * 8 * MAX_OVERHEAD,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"T: t\r\n" * 2 * MAX_OVERHEAD,
]


@pytest.mark.parametrize("answer", WRONG, ids=range(len(WRONG)))
def test_an_answer_that_is_no_http_is_an_error(answer):
    async def script(request, reply):
        await reply.raw(answer)
        await reply.forever()

    with pytest.raises(SourceError):
        run(script, lambda client, _: client.request("GET", "/x", timeout=1.0))


@pytest.mark.parametrize(
    ("status", "most", "length", "good"),
    [
        (200, {}, OBJECT, True),
        (200, {}, OBJECT + 1, False),
        (200, {"most": 10}, 10, True),
        (200, {"most": 10}, 11, False),
        (403, {"most": LIST}, OBJECT + 1, False),
    ],
)
def test_the_length_of_a_body_is_limited_by_the_kind_of_request(status, most, length, good):
    async def script(request, reply):
        await reply.raw(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, length) + b"x" * length)
        await reply.forever()

    def asked():
        return run(script, lambda client, _: client.request("GET", "/x", **most))

    if good:
        assert len(asked().body) == length
        return
    with pytest.raises(MalformedAnswer, match="longer than"):
        asked()


def test_silence_is_an_error_after_the_timeout():
    async def script(request, reply):
        await reply.forever()

    with pytest.raises(ConnectionFailed, match="sent nothing"):
        run(script, lambda client, _: client.request("GET", "/x", timeout=0.05))


def slowly(answer, pieces, seconds):
    """Return a script that sends an answer in this number of pieces, within this number of seconds."""

    async def script(request, reply):
        size = -(-len(answer) // pieces)
        for at in range(0, len(answer), size):
            await reply.raw(answer[at : at + size])
            await asyncio.sleep(seconds / pieces)
        await reply.forever()

    return script


def test_a_slow_answer_is_good_as_long_as_it_gets_on():
    body = b"x" * 6 * LEAST_PROGRESS
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    response = run(slowly(answer, 24, 1.5), lambda client, _: client.request("GET", "/x", timeout=1.0))
    assert response.body == body


@pytest.mark.parametrize("answer", [ANSWER, b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000])
def test_an_answer_that_trickles_is_given_up(answer):
    """At one byte per second a list would never end, and the proxy would never request the next one."""
    with pytest.raises(ConnectionFailed, match=r"sends too slowly, less than \d+ bytes in 0 s|sent nothing"):
        run(slowly(answer, len(answer), 600.0), lambda client, _: client.request("GET", "/x", timeout=0.3))


def test_a_kept_connection_that_died_is_replaced_for_reads_only():
    async def script(request, reply):
        if request.path == "/last":
            await reply.answer(200, b"{}")
            reply.writer.close()
            await reply.forever()
        await reply.answer(200, b"{}")

    async def use(client, server):
        await client.request("GET", "/last")
        await client.request("GET", "/x")
        return server.connections

    assert run(script, use) == 2

    async def refuses(request, reply):
        if len(server_seen) > 0:
            reply.reset()
            await reply.forever()
        server_seen.append(request)
        await reply.answer(200, b"{}")

    async def post(client, server):
        await client.request("GET", "/x")
        await client.request("POST", "/x", body=b"{}")

    server_seen = []
    with pytest.raises(ConnectionFailed):
        run(refuses, post)


def test_a_stream_is_handed_on_read_by_read():
    async def script(request, reply):
        await reply.begin()
        for part in (b"a", b"b", b"c"):
            await reply.chunk(part)
            await asyncio.sleep(0.02)
        await reply.raw(b"1\r\nd\r\n1\r\ne\r\n0\r\n\r\n")

    seen = []

    async def use(client, server):
        await client.stream("/x", seen.append, on_open=lambda: seen.append("open"), idle_timeout=5)
        await client.stream("/y", bytes, on_open=list, idle_timeout=5)
        return server.connections

    assert run(script, use) == 1
    assert seen == ["open", b"a", b"b", b"c", b"de"]


def test_an_error_of_the_sink_ends_the_stream():
    async def script(request, reply):
        await reply.begin()
        await reply.chunk(b"x")
        await reply.forever()

    def sink(data):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(script, lambda client, _: client.stream("/x", sink, on_open=list, idle_timeout=5))


def test_cancelling_closes_the_connection():
    async def script(request, reply):
        await reply.begin()
        await reply.forever()

    async def use(client, server):
        task = asyncio.create_task(client.stream("/x", bytes, on_open=list, idle_timeout=5))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return len(client._open)

    assert run(script, use) == 0


def test_refused_connections_are_known_as_such():
    async def main():
        async with Server(None) as server:
            url = server.url
        for host in (url, url.replace("127.0.0.1", "localhost")):
            client = HttpClient(cluster_at(host))
            with pytest.raises(ConnectionFailed, match="connection refused"):
                await client.request("GET", "/x")

    asyncio.run(main())


def test_an_unknown_name_and_a_slow_connect_are_errors():
    async def main():
        client = HttpClient(cluster_at("http://no-such-host.invalid:1"))
        with pytest.raises(ConnectionFailed, match="cannot be resolved"):
            await client.request("GET", "/x")

    asyncio.run(main())


def test_requests_are_reported():
    seen = []

    async def script(request, reply):
        if request.path == "/cut":
            reply.reset()
        elif request.path == "/chunks":
            await reply.raw(CHUNKED)
        else:
            await reply.answer(200 if request.path == "/x" else 404, b"{}")

    async def main():
        async with Server(script) as server:
            client = HttpClient(cluster_at(server.url), on_request=seen.append)
            await client.request("POST", "/x", body=b"12345")
            await client.request("GET", "/chunks")
            await client.stream("/x", bytes, on_open=list, idle_timeout=5)
            for path in ("/none", "/cut"):
                with pytest.raises(SourceError):
                    await client.request("GET", path)
            await client.close()
            return server.port

    host = f"127.0.0.1:{asyncio.run(main())}"
    assert [finished._replace(seconds=0) for finished in seen] == [
        ("POST", host, "200", 0, 5, 2),
        ("GET", host, "200", 0, 0, None),
        ("GET", host, "200", 0, 0, 2),
        ("GET", host, "404", 0, 0, 2),
        ("GET", host, "<error>", 0, 0, None),
    ]
    assert all(0 <= finished.seconds < 5 for finished in seen)


def test_headers_cannot_be_smuggled():
    async def script(request, reply):
        await reply.answer(200)

    for path in ("/x y", "/x\r\nX: y"):
        with pytest.raises(ValueError, match="forbids"):
            run(script, lambda client, _, path=path: client.request("GET", path))


def test_a_server_may_have_a_path():
    async def script(request, reply):
        await reply.answer(200, b"{}")

    async def main():
        async with Server(script) as server:
            client = HttpClient(cluster_at(server.url + "/k8s/c-1/"))
            await client.request("GET", "/version")
            await client.close()
            return server.requests[0].target, server.requests[0].headers["host"] == f"127.0.0.1:{server.port}"

    assert asyncio.run(main()) == ("/k8s/c-1/version", True)


@pytest.mark.parametrize("answer", [b"", ANSWER[:-1]])
def test_half_an_answer_does_not_wait_for_the_garbage_collector(answer, monkeypatch):
    made = []

    async def script(request, reply):
        await reply.raw(answer)
        reply.writer.close()

    class Noted(Exchange, weakref=True):
        def __post_init__(self):
            made.append(weakref.ref(self))

    async def use(client, _):
        for _ in range(3):
            with contextlib.suppress(ConnectionFailed):
                await client.request("PUT", "/x")
        return [exchange for exchange in made if exchange() is not None]

    monkeypatch.setattr(http, "Exchange", Noted)
    gc.collect()
    gc.disable()
    try:
        assert run(script, use) == []
    finally:
        gc.enable()
    assert len(made) == 3


def test_a_route_tells_new_addresses_before_they_are_dialled_and_keeps_a_bounded_number():
    route, told = Route(), []
    route.changed = lambda: told.append(len(route.places))
    route.take(frozenset({("192.0.2.1", 443)}))
    route.take(frozenset({("192.0.2.1", 443)}))
    assert told == [1]
    for number in range(1000):
        route.take(frozenset({(f"192.0.2.{number % 250}", number)}))
    assert len(route.places) <= 65
