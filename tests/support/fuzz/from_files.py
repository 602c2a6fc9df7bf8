"""Targets for files, for requests to the proxy's ports, and for answers of pods."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from kubeproxy.api.credentials import ExecPlugin
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.ask.state import parse_query
from kubeproxy.cluster.answers import decoded
from kubeproxy.config.load import read_text
from kubeproxy.config.options import page_access
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import dump
from kubeproxy.page.pages import refusal
from kubeproxy.report.metrics import takes_gzip
from kubeproxy.server.connection import ServerConnection
from kubeproxy.server.http import TEXT, Request, Response, routes
from support.fuzz.transports import Deaf, deliver

_LOOPBACK: Final = "127.0.0.1"
_ACCESS: Final = page_access(["127.0.0.0/8", "::1/128"], ["proxy.example"])
_kubeconfig: list[tempfile.TemporaryDirectory[str]] = []


def kubeconfig(data: bytes) -> None:
    """A kubeconfig, up to the TLS context that it requests; a credential plugin is not run."""
    if not _kubeconfig:
        _kubeconfig.append(tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()))
    path = Path(_kubeconfig[0].name, "config")
    path.write_bytes(data)
    found = load_cluster(str(path), "", environ={})
    if not isinstance(found.credentials, ExecPlugin):
        _runner.run(found.credentials.headers())
        _runner.run(found.tls_context())


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def configuration(data: bytes) -> None:
    """A KubeProxyConfiguration; an accepted configuration must be equal after it is written and read again."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    config, _ = read_text(text)
    assert read_text(dump(config))[0] == config


def flags(data: bytes) -> None:
    """A command line, whose words are separated by zeros."""
    parse([word.decode(errors="surrogateescape") for word in data.split(b"\0")])


def replies(data: bytes) -> None:
    """An answer to `kubectl kubeproxy`, after a letter for the command, in upper case if the command has a name."""
    commands = {command[0]: command for command in ("why", "doctor", "verify", "services", "flows", "trace")}
    letter = chr(data[0]) if data else ""
    if letter.lower() in commands:
        decoded(data[1:], commands[letter.lower()], ["default/web"] if letter.isupper() else [])


def _answer(request: Request) -> Response:
    refusal(_ACCESS, request, is_state=True)
    takes_gzip(request.accept_encoding)
    try:
        parse_query(request)
    except ValueError as error:
        return Response(400, TEXT, str(error).encode())
    return Response(200, TEXT, b"x")


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    yield b"a"
    yield request.body


_HANDLER: Final = routes(
    {"/": _answer, "/s": lambda request: Response(200, TEXT, _pieces(request))}, frozenset(("/", "/s"))
)
_runner = asyncio.Runner()


class _Raised(logging.Handler):
    """A failing handler logs a traceback and answers with 500: here that counts as a failure."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            _failures.append(record.exc_info[1])


_failures: list[BaseException] = []
_listening = _Raised()


def requests(data: bytes) -> None:
    """Requests on one connection to the metrics port; the first byte selects the cuts."""
    if not data:
        return
    log = logging.getLogger("kubeproxy.server")
    log.addHandler(_listening)
    try:
        _runner.run(_ask(data[0], data[1:]))
    finally:
        log.removeHandler(_listening)
    if _failures:
        raise _failures.pop()


async def _ask(how: int, data: bytes) -> None:
    transport = Deaf(sockname=(_LOOPBACK, 1), peername=(_LOOPBACK, 2))
    lost: list[ServerConnection] = []
    connection = ServerConnection(_HANDLER, lost.append)
    connection.connection_made(transport)
    deliver(connection, transport, data, 1 + (how & 63))
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert lost == [connection]
