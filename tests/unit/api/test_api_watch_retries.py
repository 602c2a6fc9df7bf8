"""An API server that is down, a sink that fails, and the pause before the next attempt."""

import asyncio
import contextlib
import errno
import logging
import time

import msgspec
import pytest

from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.connection import ApiConnection, Exchange
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.recovery import WatchListSupport
from kubeproxy.api.source import ListPace
from kubeproxy.api.watch import ApiSource, Reflector
from support.scripted import Server, eventually, service
from support.watch_scripts import PACE, SERVICES, Seen, lists, watches


def test_an_absent_server_is_waited_for_with_one_line(caplog):
    caplog.set_level(logging.INFO, "kubeproxy")

    async def script(request, reply):
        await (lists(service("a")) if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as first:
            port = first.port
        client = HttpClient(Cluster(parse_server(f"http://127.0.0.1:{port}", "test"), Trust(), Credentials()))
        seen = Seen()
        # Only the pause after a failed connection has its default here: that of a booting node.
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
    assert together < 0.5  # the answer to one wakes the others
    assert 1 <= caplog.text.count("connection refused") <= 2  # before the outage, and after its end
    assert caplog.text.count("answers") == 1


@pytest.mark.parametrize(
    ("code", "silent", "age"),
    [
        pytest.param(errno.ETIMEDOUT, 100.0, 30.0, id="keepalive was answered until 30 s ago"),
        pytest.param(errno.ETIMEDOUT, 20.0, 20.0, id="the server sent bytes after that"),
        pytest.param(errno.ECONNRESET, 50.0, 0.0, id="the server was silent because nothing changed"),
        pytest.param(errno.ECONNRESET, 100.0, 100.0, id="a bookmark was due"),
    ],
)
def test_the_last_contact_before_a_connection_is_lost(code, silent, age, monkeypatch):
    lost = []

    async def script(request, reply):
        await lists(service("a"))(request, reply)

    async def stream(client, *_, on_open, **__):
        if lost:
            await asyncio.sleep(60)
        on_open()
        reflector.status.last_contact -= silent
        connection = ApiConnection("h:6443", lambda _: None)
        connection._exchange = exchange = Exchange(idle_timeout=1.0, on_headers=lambda _: None)
        connection.connection_lost(OSError(code, "lost"))
        lost.append(connection)
        await exchange.done

    async def main():
        nonlocal reflector
        async with Server(script) as server:
            client = HttpClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))
            support = WatchListSupport()
            support.supported = False
            reflector = Reflector(client, SERVICES, lambda _: None, support=support, pace=PACE)
            task = asyncio.create_task(reflector.run())
            await eventually(lambda: lost and not reflector.status.connected)
            found = reflector.status.staleness(time.monotonic())
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.close()
            return found

    reflector = None
    monkeypatch.setattr(HttpClient, "stream", stream)
    assert age <= asyncio.run(main()) < age + 20.0


def test_a_bug_in_the_sink_does_not_end_the_watch(caplog):
    calls = []

    async def script(request, reply):
        await (lists(service("a")) if request.kind == "list" else watches())(request, reply)

    async def main():
        async with Server(script) as server:
            client = HttpClient(Cluster(parse_server(server.url, "test"), Trust(), Credentials()))

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


def test_delays_are_those_of_client_go():
    backoff = ListPace().backoff(0.8)
    for n, middle in enumerate([0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]):
        assert 0.5 * middle <= backoff.failed() <= 1.5 * middle, n
