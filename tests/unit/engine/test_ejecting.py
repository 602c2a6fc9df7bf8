"""The ejector: suspects of the kernel, attempts to connect, and the connections that it removes afterwards."""

import asyncio
import socket
import time
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest

from kubeproxy.engine import ejecting
from kubeproxy.engine.ejecting import AT_ONCE, CONFIRMING, RATE, RETURNING, Ejector, attempt
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import PORT_BYTES, pack
from kubeproxy.model.objects import Annotations
from support.staged_engine import endpoints, play, service, started

ON = Annotations(eject="on")


def key(number, port=8080):
    return pack(f"10.244.0.{number}") + b"\6" + PORT_BYTES[port]


class Kernel:
    """Suspects, and the results of connection attempts."""

    def __init__(self):
        self.suspects = set()
        self.failing = {}
        self.tried = []
        self.pauses = []
        self.removed = []
        self.error = None

    def read(self):
        if self.error is not None:
            raise self.error
        return set(self.suspects)

    async def attempt(self, one, pauses):
        self.tried.append(one)
        self.pauses.append(pauses)
        await asyncio.sleep(0)
        return self.failing.get(one, "")

    def remove(self, stuck):
        self.removed.append(set(stuck))


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(ejecting, "PERIOD", 0.002)
    monkeypatch.setattr(ejecting, "IDLE", 0.002)
    monkeypatch.setattr(ejecting, "attempt", made.attempt)
    monkeypatch.setattr(ejecting.Unanswered, "remove", lambda _, stuck: made.remove(stuck))
    return made


def ejecting_scene(scene, kernel, annotations=ON):
    async def whole(stage):
        work = asyncio.create_task(Ejector(stage.engine, [kernel.read]).run())
        await started(stage, service("a", annotations=annotations), endpoints("a", 1, 2, 3))
        try:
            await scene(stage)
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    play(whole)


def pool(stage):
    return [one[3] for one in stage.programmed()["a"][0].cluster]


def test_a_confirmed_suspect_is_ejected_and_its_connections_are_removed(kernel):
    async def scene(stage):
        assert stage.backend.worlds[-1].ejects
        kernel.failing[key(2)] = "connection refused"
        kernel.suspects.add(key(2))
        await stage.until(lambda: pool(stage) == [1, 3])
        await stage.until(lambda: kernel.removed)
        assert kernel.removed[0] == {key(2)}

    ejecting_scene(scene, kernel)


def test_a_suspect_that_accepts_connections_stays(kernel):
    async def scene(stage):
        kernel.suspects |= {key(1), key(2), key(9)}
        await stage.until(lambda: len(kernel.tried) >= 2)
        await asyncio.sleep(0.02)
        assert sorted(kernel.tried) == [key(1), key(2)], "each once, and no endpoint of another Service"
        assert pool(stage) == [1, 2, 3]
        assert not kernel.removed

    ejecting_scene(scene, kernel)


def test_a_suspect_that_answered_a_client_in_the_meantime_stays(kernel):
    async def scene(stage):
        answered = asyncio.Event()

        async def attempted(one, _):
            await asyncio.sleep(0.02)
            kernel.suspects.discard(one)  # after the last reading before the decision
            answered.set()
            return "no answer"

        ejecting.attempt = attempted
        kernel.suspects.add(key(2))
        async with asyncio.timeout(5):
            await answered.wait()
        await asyncio.sleep(0.02)
        assert pool(stage) == [1, 2, 3]

    ejecting_scene(scene, kernel)


def test_a_flood_of_suspects_costs_few_attempts_a_second(kernel):
    async def scene(stage):
        stage.tell(endpoints("a", *range(1, 255)))
        await stage.until(lambda: len(pool(stage)) == 254)
        began = time.monotonic()
        kernel.suspects |= {key(number) for number in range(1, 255)}
        await stage.until(lambda: len(kernel.tried) >= AT_ONCE)
        await asyncio.sleep(0.1)
        assert len(kernel.tried) <= AT_ONCE + RATE * (time.monotonic() - began) + 1

    ejecting_scene(scene, kernel)


def test_suspects_that_cannot_be_read_are_none(kernel):
    async def scene(stage):
        async def attempted(one, _):
            kernel.error = ApplyError("not now")
            kernel.tried.append(one)
            return "no answer"

        ejecting.attempt = attempted
        kernel.suspects.add(key(2))
        await stage.until(lambda: kernel.tried)
        await asyncio.sleep(0.02)
        assert pool(stage) == [1, 2, 3]

    ejecting_scene(scene, kernel)


def test_an_endpoint_returns_when_it_accepts_a_connection(kernel, monkeypatch):
    monkeypatch.setattr("kubeproxy.model.ejection.FIRST", 0.02)

    async def scene(stage):
        kernel.failing[key(2)] = "no answer"
        kernel.suspects.add(key(2))
        await stage.until(lambda: pool(stage) == [1, 3])
        kernel.suspects.clear()
        await stage.until(lambda: len(kernel.tried) > 2)
        assert pool(stage) == [1, 3]
        assert (kernel.pauses[0], {*kernel.pauses[1:]}) == (CONFIRMING, {RETURNING}), "a slow endpoint may return"
        kernel.failing.clear()
        await stage.until(lambda: pool(stage) == [1, 2, 3])

    ejecting_scene(scene, kernel)


def test_nothing_is_read_until_a_service_requests_it(kernel):
    async def scene(stage):
        assert not stage.backend.worlds[-1].ejects
        kernel.error = AssertionError("the kernel is read")
        await asyncio.sleep(0.02)
        kernel.error = ApplyError("not yet")
        stage.tell(service("a", annotations=ON))
        await stage.until(lambda: stage.backend.worlds[-1].ejects)
        await asyncio.sleep(0.02)
        kernel.error, kernel.failing[key(3)] = None, "no answer"
        kernel.suspects.add(key(3))
        await stage.until(lambda: pool(stage) == [1, 2])
        stage.tell(service("a"))
        await stage.until(lambda: pool(stage) == [1, 2, 3])
        assert stage.backend.worlds[-1].ejects, "the rules stay until the proxy ends: a change costs a full sync"

    ejecting_scene(scene, kernel, annotations=None)


def place(made):
    return pack("127.0.0.1") + bytes((17 if made.type == socket.SOCK_DGRAM else 6,)) + PORT_BYTES[made.getsockname()[1]]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_an_attempt_fails_without_a_listener(kind):
    with closing(socket.socket(socket.AF_INET, kind)) as made:
        made.bind(("127.0.0.1", 0))
        where = place(made)
        if kind == socket.SOCK_STREAM:
            made.listen()
        assert asyncio.run(attempt(where, CONFIRMING)) == ""
    assert asyncio.run(attempt(where, CONFIRMING)) == "connection refused"


def test_an_attempt_that_this_node_cannot_make_is_no_failure(monkeypatch):
    def lacking(*_):
        raise OSError(24, "Too many open files")

    names = {name: getattr(socket, name) for name in ("SOCK_STREAM", "SOCK_DGRAM", "IPPROTO_UDP")}
    monkeypatch.setattr(ejecting, "socket", SimpleNamespace(socket=lacking, **names))
    assert asyncio.run(attempt(key(1), CONFIRMING)) == ""


def attempted(monkeypatch, where, connect):
    """The result of an attempt with another way to connect, and the number of connections."""
    count = 0

    async def scene():
        async def connects(made, to):
            nonlocal count
            count += 1
            await connect(count, made, to)

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connects)
        return await attempt(where, (0.02, 0.02, 0.02))

    return asyncio.run(scene()), count


def test_an_attempt_fails_if_three_connections_get_no_answer(monkeypatch):
    assert attempted(monkeypatch, key(1), lambda *_: asyncio.sleep(5)) == ("no answer within 0.1 s", 3)


def test_a_lost_packet_is_no_failure(monkeypatch):
    async def second(count, *_):
        await asyncio.sleep(5 if count < 2 else 0)

    assert attempted(monkeypatch, key(1), second) == ("", 2)


def test_a_connection_that_a_busy_process_notices_too_late_is_no_failure(monkeypatch):
    async def late(count, made, to):
        if count == 1:
            made.connect_ex(to)
        await asyncio.sleep(5)

    with socket.create_server(("127.0.0.1", 0)) as made:
        assert attempted(monkeypatch, place(made), late) == ("", 3)
