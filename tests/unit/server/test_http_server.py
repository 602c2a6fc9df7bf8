"""The HTTP server over real loopback connections: well-behaved clients and misbehaving ones."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import struct
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.server import connection, server
from kubeproxy.server.admission import Admission, peer_of
from kubeproxy.server.connection import ServerConnection
from kubeproxy.server.http import TEXT, Request, Response, routes
from kubeproxy.server.server import HttpServer, bind

Talk = Callable[[int], Awaitable[None]]


def fail(_: Request) -> Response:
    raise RuntimeError("broken page")


async def counting(upto: int) -> AsyncGenerator[bytes, None]:
    for number in range(upto):
        yield b"%d " % number
        yield b""
        await asyncio.sleep(0)


async def late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(0.5)
    yield b"at last"


async def breaking() -> AsyncGenerator[bytes, None]:
    yield b"a"
    raise RuntimeError("broken page")


CLOSED: list[asyncio.Event] = []


async def endless() -> AsyncGenerator[bytes, None]:
    try:
        while True:
            yield b"x" * 100_000
    finally:
        CLOSED.pop().set()


def changed(request: Request) -> Response:
    return Response(200, TEXT, f"{request.method} {request.body.decode()} {request.accept}".encode())


HANDLER = routes(
    {
        "/counting": lambda request: Response(200, TEXT, counting(int(request.query))),
        "/breaking": lambda _: Response(200, TEXT, breaking()),
        "/late": lambda _: Response(200, TEXT, late()),
        "/endless": lambda _: Response(200, TEXT, endless()),
        "/change": changed,
        "/hello": lambda request: Response(200, TEXT, f"hello {request.method} {request.query}".encode()),
        "/teapot": lambda _: Response(418, (("X-Weight", "7"),), b""),
        "/broken": fail,
        "/large": lambda _: Response(200, TEXT, b"x" * 3_000_000),
    },
    frozenset(("/change",)),
)


def serve(talk: Talk, admission: Admission | None = None) -> None:
    """Serve HANDLER on loopback during the body; afterwards all connections are closed and counted."""
    admission = admission or Admission(lambda: (100, 10))

    async def run() -> None:
        server = HttpServer("test", HANDLER, admission=admission)
        server.start(("127.0.0.1", 0))
        try:
            async with asyncio.timeout(20):
                await talk(server.port)
        finally:
            await server.stop()
        assert not server._connections
        assert not server._accepting
        assert (admission.connected, admission.listening) == (0, 0)

    asyncio.run(run())


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes on a new connection; return all bytes until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def get(path: str, *, version: str = "1.1", method: str = "GET", headers: str = "Connection: close\r\n") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{headers}\r\n".encode()


TOO_LARGE = (b"HTTP/1.1 431 Request Header Fields Too Large", b"431 Request Header Fields Too Large\n")


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (get("/hello?a=b"), b"HTTP/1.1 200 OK", b"hello GET a=b"),
        (get("/hello", method="HEAD"), b"HTTP/1.1 200 OK", b""),
        (get("/hello", version="1.0", headers=""), b"HTTP/1.0 200 OK", b"hello GET "),
        (get("/nothing"), b"HTTP/1.1 404 Not Found", b"404 page not found\n"),
        (get("/hello", method="POST"), b"HTTP/1.1 405 Method Not Allowed", b"method not allowed\n"),
        (get("/broken"), b"HTTP/1.1 500 Internal Server Error", b"internal error\n"),
        (get("/hello", headers="Connection: Upgrade\r\nUpgrade: h2c\r\n"), b"HTTP/1.1 200 OK", b"hello GET "),
        (
            get("/hello?b", headers="Content-Length: 1\r\nConnection: close\r\n") + b"a",
            b"HTTP/1.1 200 OK",
            b"hello GET b",
        ),
        (
            get("/change", method="PUT", headers="Accept: a/b\r\nContent-Length: 3\r\nConnection: close\r\n") + b"new",
            b"HTTP/1.1 200 OK",
            b"PUT new a/b",
        ),
        (get("/counting?3"), b"HTTP/1.1 200 OK", b"2\r\n0 \r\n2\r\n1 \r\n2\r\n2 \r\n0\r\n\r\n"),
        (get("/counting?3", version="1.0", headers=""), b"HTTP/1.0 200 OK", b"0 1 2 "),
        (get("/counting?3", method="HEAD"), b"HTTP/1.1 200 OK", b""),
        (get("/counting?1", headers="") + get("/hello"), b"HTTP/1.1 200 OK", b"2\r\n0 \r\n0\r\n\r\n"),
        (get("/breaking"), b"HTTP/1.1 200 OK", b"1\r\na\r\n"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400 Bad Request", b"400 Bad Request\n"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HTTP/1.1 400 Bad Request", b"400 Bad Request\n"),
        (get("/" + "a" * 70_000), *TOO_LARGE),
        (get("/hello", headers="X: " + "a" * 70_000), *TOO_LARGE),
    ],
)
def test_requests_are_answered(
    request_bytes: bytes, status: bytes, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(port: int) -> None:
        answer = await exchange(port, request_bytes)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == status
        assert content == body
        assert b"\r\nConnection: close" in head
        assert b"\r\nDate: " in head

    with caplog.at_level(logging.CRITICAL, "kubeproxy"):
        serve(talk)


def test_a_foreign_page_cannot_read_ours_by_a_name_of_this_address() -> None:
    async def talk(port: int) -> None:
        for host, status in ((b"evil.example", b"403"), (b"127.0.0.1:1", b"200"), (b"localhost", b"200")):
            answer = await exchange(port, get("/hello").replace(b"Host: localhost", b"Host: " + host))
            assert answer.split(b" ")[1] == status
        assert b"hello" in await exchange(port, get("/hello", version="1.0").replace(b"Host: localhost\r\n", b""))

    serve(talk)


def test_incomplete_requests_of_one_client_exclude_no_other_client() -> None:
    """For all servers together: each had 256 once, and there are as many health check ports as Services."""
    admission = Admission(lambda: (10, 2))

    async def run() -> None:
        servers = [HttpServer(str(n), HANDLER, admission=admission) for n in range(2)]
        for each in servers:
            each.start(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()
        flood = [await from_address("127.0.0.9", servers[n % 2].port) for n in range(40)]
        for sock in flood:
            with suppress(ConnectionError):
                await loop.sock_sendall(sock, b"GET /hel")
        assert 8 <= admission.connected <= 10
        for each in servers:
            assert b"hello" in await exchange(each.port, get("/hello"))
        assert admission.connected <= 10
        for each in servers:
            await each.stop()
        for sock in flood:
            sock.close()

    asyncio.run(run())


async def from_address(source: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


def test_connections_of_a_flooding_client_are_closed_with_pauses_and_others_are_answered() -> None:
    """A client that connects again immediately would otherwise use half of the event loop's time."""

    async def run() -> None:
        one = HttpServer("one", HANDLER, admission=Admission(lambda: (1000, 2)))
        one.start(("127.0.0.1", 0))
        one.admission.budget.spend(peer_of("127.0.0.9"), 10.0, remote=False)
        loop, closed, end = asyncio.get_running_loop(), 0, asyncio.get_running_loop().time() + 0.5
        while loop.time() < end:
            flood = [await from_address("127.0.0.9", one.port) for _ in range(64)]
            if closed == 0:
                assert b"hello" in await exchange(one.port, get("/hello"))
            for sock in flood:
                assert await loop.sock_recv(sock, 1) == b""
                sock.close()
            closed += len(flood)
        assert closed <= server._ACCEPTED * (0.5 / server._PAUSE + 64)
        await one.stop()

    asyncio.run(run())


def test_a_refused_client_that_keeps_sending_is_dropped() -> None:
    async def talk(port: int) -> None:
        loop = asyncio.get_running_loop()
        with await from_address("127.0.0.9", port) as sock, pytest.raises(ConnectionError):
            await loop.sock_sendall(sock, get("/hello") * 1_000_000)

    with limits(LINGER_SECONDS=60):
        serve(talk)


def test_more_servers_than_descriptors_allow_are_refused_with_the_remedy() -> None:
    async def run() -> None:
        admission = Admission(lambda: (10, 1))
        first, second = HttpServer("one", HANDLER, admission=admission), HttpServer("two", HANDLER, admission=admission)
        first.start(("127.0.0.1", 0))
        with pytest.raises(
            ApplyError, match=r"cannot serve two on 127.0.0.1:0: the limit of open files .* LimitNOFILE"
        ):
            second.start(("127.0.0.1", 0))
        await first.stop()
        second.start(("127.0.0.1", 0))
        await second.stop()
        assert admission.listening == 0

    asyncio.run(run())


def test_a_connection_is_kept_for_more_requests_even_when_sent_at_once_or_byte_by_byte() -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in get("/hello?1", headers=""):
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(get("/hello?2", headers="") + get("/teapot", headers="") + get("/hello?3"))
        text = await reader.read()
        writer.close()
        assert [text.count(b"hello GET %d" % n) for n in (1, 2, 3)] == [1, 1, 1]
        assert b"418 I'm a Teapot" in text
        assert b"X-Weight: 7\r\n" in text
        assert text.count(b"Connection: close") == 1

    serve(talk)


def test_one_connection_gets_one_answer_in_a_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = 0

    def count(_: Request) -> Response:
        nonlocal answered
        answered += 1
        return Response(200, TEXT, b"")

    async def run() -> None:
        nonlocal answered
        near, far = socket.socketpair()
        near.setblocking(False)
        with near, far:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.connect_accepted_socket(lambda: ServerConnection(count, lambda _: None), near)
            for _ in range(3):
                answered = 0
                protocol.data_received(get("/hello", headers="") * 3)
                counts = [answered]
                while answered < 3:
                    await asyncio.sleep(0)
                    counts.append(answered)
                assert max(b - a for a, b in pairwise([0, *counts])) == 1
            protocol.data_received(get("/hello", headers="") * 10_000)
            assert answered <= 4
            await asyncio.sleep(0.05)
            assert answered <= 4 + connection.PIPELINED
            assert b"429 Too Many Requests" in far.recv(1 << 16)
            protocol.abort()
            await protocol.lost.wait()

    asyncio.run(run())


def test_one_turn_of_the_event_loop_reads_at_most_the_longest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ServerConnection, "data_received", lambda _, data: sizes.append(len(data)))

    async def talk(port: int) -> None:
        with await from_address("127.0.0.1", port) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, b"x" * 10_000_000)

    serve(talk)
    assert sum(sizes) > 1_000_000
    assert max(sizes) <= connection.REQUEST_BYTES


def test_http_1_0_may_ask_to_keep_the_connection() -> None:
    async def talk(port: int) -> None:
        keep = get("/hello", version="1.0", headers="Connection: keep-alive\r\n")
        answer = await exchange(port, keep + get("/hello", version="1.0", headers=""))
        assert answer.count(b"HTTP/1.0 200 OK") == 2
        assert answer.count(b"Connection: keep-alive") == 1

    serve(talk)


@contextmanager
def limits(**values: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(connection, name, value)
        yield


@pytest.mark.parametrize("sent", [b"", b"GET /hel", get("/hello", headers="")], ids=["nothing", "half", "idle"])
def test_slow_clients_are_dropped(sent: bytes) -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        writer.close()
        assert (b"200 OK" in answer) == sent.endswith(b"\r\n\r\n")

    with limits(REQUEST_SECONDS=0.1, IDLE_SECONDS=0.1):
        serve(talk)


def test_a_client_that_does_not_read_is_dropped_and_others_are_served() -> None:
    async def talk(port: int) -> None:
        deaf = socket.create_connection(("127.0.0.1", port))
        deaf.setblocking(False)
        with deaf:
            await asyncio.get_running_loop().sock_sendall(deaf, get("/large", headers="") * 3)
            for _ in range(3):
                assert b"hello" in await exchange(port, get("/hello"))
            await asyncio.sleep(1.3)
            received = 0
            with suppress(ConnectionError):
                while data := await asyncio.get_running_loop().sock_recv(deaf, 1 << 20):
                    received += len(data)
            assert received < 9_000_000

    with limits(REQUEST_SECONDS=1.0):  # also the time of the others, on a machine under load
        serve(talk)


def test_a_body_in_pieces_waits_for_its_reader_and_ends_with_it() -> None:
    async def talk(port: int) -> None:
        closed = asyncio.Event()
        CLOSED[:] = [closed]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(get("/endless"))
        await reader.readexactly(1000)
        assert b"hello GET" in await exchange(port, get("/hello"))  # served while the other one waits
        assert not closed.is_set()
        writer.transport.abort()
        await closed.wait()

    serve(talk)


def test_the_first_piece_of_a_body_may_take_longer_than_a_request_to_arrive() -> None:
    async def talk(port: int) -> None:
        assert (await exchange(port, get("/late"))).endswith(b"7\r\nat last\r\n0\r\n\r\n")

    with limits(REQUEST_SECONDS=0.1):
        serve(talk)


def test_the_oldest_connection_makes_room() -> None:
    async def talk(port: int) -> None:
        pairs = []
        for _ in range(4):
            pairs.append(await asyncio.open_connection("127.0.0.1", port))
            pairs[-1][1].write(get("/hello", headers=""))
            await pairs[-1][0].readuntil(b"hello GET ")
        with suppress(ConnectionError):
            assert await pairs[0][0].read() == b""
        for reader, writer in pairs[1:]:
            writer.write(get("/hello", headers=""))
            await reader.readuntil(b"hello GET ")
        for _, writer in pairs:
            writer.close()

    serve(talk, Admission(lambda: (3, 1)))


@pytest.mark.parametrize(
    ("host", "clients"),
    [("0.0.0.0", ["127.0.0.1", "::1"]), ("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"])],
)
def test_addresses_of_both_families_are_served(host: str, clients: list[str]) -> None:
    async def run() -> None:
        server = HttpServer("test", HANDLER)
        server.start((host, 0))
        for client in clients:
            reader, writer = await asyncio.open_connection(client, server.port)
            writer.write(get("/hello"))
            assert b"hello" in await reader.read()
            writer.close()
        await server.stop()

    asyncio.run(run())


def test_an_address_that_is_taken_is_named() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = HttpServer("healthz", HANDLER)
            with pytest.raises(ApplyError, match=rf"cannot serve healthz on 127.0.0.1:{port}: Address already in use"):
                server.start(("127.0.0.1", port))
            await server.stop()

    asyncio.run(run())


def test_a_taken_address_is_tried_again_until_it_is_free() -> None:
    async def run() -> None:
        failures: list[ApplyError] = []
        thrice = asyncio.Event()

        def failed(error: ApplyError) -> None:
            failures.append(error)
            if len(failures) == 3:
                thrice.set()
                taken.close()

        server = HttpServer("metrics", HANDLER)
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with asyncio.timeout(5):
            server.start_retrying(("127.0.0.1", port), failed, interval=0.02)
            await thrice.wait()
            await asyncio.sleep(0.1)
            assert b"hello" in await exchange(port, get("/hello"))
        assert len(failures) == 3
        await server.stop()
        await server.stop()

    asyncio.run(run())


def test_stopping_at_any_moment_leaves_nothing() -> None:
    async def run(turns: int) -> None:
        server = HttpServer("test", HANDLER)
        server.start(("127.0.0.1", 0))
        client = socket.create_connection(("127.0.0.1", server.port))
        with client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            again = HttpServer("test", HANDLER)
            again.start(("127.0.0.1", 0))
            again.close()
            await again.stop()

    for turns in range(6):
        asyncio.run(run(turns))


def test_a_broken_page_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(port: int) -> None:
        await exchange(port, get("/broken"))

    with caplog.at_level(logging.ERROR, "kubeproxy"):
        serve(talk)
    assert "broken page" in caplog.text


def test_running_out_of_file_descriptors_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        """A listening socket of a process that has no free descriptors for a while."""

        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.refusals = 1

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self.real.accept()

    async def run() -> None:
        server = HttpServer("test", HANDLER, lambda *address: Full(bind(*address)))
        server.start(("127.0.0.1", 0))
        async with asyncio.timeout(10):
            assert b"hello" in await exchange(server.port, get("/hello"))
        await server.stop()

    with caplog.at_level(logging.WARNING, "kubeproxy"):
        asyncio.run(run())
    assert caplog.messages == ["Cannot accept a connection to test: [Errno 24] Too many open files"]


def test_connections_leave_nothing_for_the_garbage_collector() -> None:
    made: list[weakref.ref[ServerConnection]] = []

    def noted(one: ServerConnection) -> ServerConnection:
        made.append(weakref.ref(one))
        return one

    async def talk(port: int) -> None:
        for _ in range(3):
            await exchange(port, get("/hello"))
        await exchange(port, get("/pieces"))
        await exchange(port, b"no request at all\r\n\r\n")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/endless"))
        writer.transport.abort()

    with collecting_nothing(), pytest.MonkeyPatch.context() as noting:
        noting.setattr(server, "ServerConnection", lambda *given: noted(ServerConnection(*given)))
        serve(talk)
        assert len(made) >= 5
        assert [one for one in made if one() is not None] == []


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """The daemon's collector seldom runs: objects outside of cycles are freed at once all the same."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_client_that_disconnects_between_requests_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(port: int) -> None:
        for _ in range(5):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(get("/hello", headers="") * 50)
            sock.close()
            await asyncio.sleep(0)
        assert b"hello" in await exchange(port, get("/hello"))

    serve(talk)
    assert [record.getMessage() for record in caplog.records] == []
