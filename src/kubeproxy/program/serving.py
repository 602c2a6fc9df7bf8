"""Opens the proxy's ports and control socket; reports another process or kube-proxy that uses a port of this proxy."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from kubeproxy.ask.desk import Desk
from kubeproxy.ask.socket import socket_pages
from kubeproxy.ask.state import state_page
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.options import Options
from kubeproxy.config.types import describe, in_effect
from kubeproxy.control.listener import discard, listen
from kubeproxy.engine.pacing import Clock, TokenBucket
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.processes import Process, holder
from kubeproxy.model.addresses import split_host_port
from kubeproxy.page import PATHS
from kubeproxy.program.profiling import LEVEL_PAGE, profiling_pages
from kubeproxy.release import NUMBER, build
from kubeproxy.report import logs
from kubeproxy.report.events import EventRecorder
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.journal import Journal
from kubeproxy.report.metrics import KUBERNETES, SLIS_PAGE, ProxyMetrics, flags_text, metrics_pages, status_text
from kubeproxy.server.admission import Admission
from kubeproxy.server.http import JSON, TEXT, Handler, Request, Response, routes
from kubeproxy.server.server import HttpServer

if TYPE_CHECKING:
    from kubeproxy.page.pages import Whole


log = logging.getLogger("kubeproxy.serving")

METRICS_PAGE = ("127.0.0.1", "10249")
"""The usual address of a kube-proxy's metrics port. A proxy without a metrics port requests another kube-proxy's
mode there."""

COMMANDS_AT_ONCE = 16
"""The maximum number of connections to the control socket. The ports have a separate limit, because clients that flood
the ports must not block operators."""


class Servers(Struct):
    """The health port, the metrics port and the control socket; `fail` ends the program."""

    desk: Desk
    metrics: ProxyMetrics
    health: ProxyHealth
    journal: Journal
    events: EventRecorder
    output: logs.Output
    fail: Callable[[ApplyError], None]
    _servers: list[HttpServer] = []
    _page: Whole | None = None

    @property
    def _options(self) -> Options:
        return self.desk.snapshot.options

    def open(self) -> None:
        """Open all ports. If a port is in use, try again, or end the program if bindAddressHardFail is set."""
        options, config = self._options, self._options.config
        health = self.health.routes()
        page = split_host_port(config.metrics_bind_address) or METRICS_PAGE
        say = partial(self._warn, "AnotherKubeProxy")
        neighbours = Neighbours(config.active_mode, (page[0], int(page[1])), say)
        # Load balancers also use other methods; HAProxy uses OPTIONS.
        healthz = routes(health, any_method=health.keys())
        metrics = routes(self._pages(neighbours), any_method=frozenset((LEVEL_PAGE, SLIS_PAGE)))
        wanted = (
            ("healthz", config.healthz_bind_address, healthz, "FailedToStartProxierHealthcheck"),
            ("metrics", config.metrics_bind_address, metrics, "FailedToStartMetricServer"),
        )
        for name, address, handler, reason in wanted:
            place = split_host_port(address) if address else None
            if place is not None:
                server = HttpServer(name, handler, names=options.page.hosts)
                self._listen(server, (place[0], int(place[1])), reason, neighbours)
        if options.control_socket:
            self._serve_commands(options.control_socket)

    async def close(self) -> None:
        """Stop listening, and wait until all connections are closed."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        if self._page is not None:
            await self._page.close()
        if self._options.control_socket:
            discard(self._options.control_socket)

    def _listen(self, server: HttpServer, address: tuple[str, int], reason: str, neighbours: Neighbours) -> None:
        def say(text: str) -> None:
            self._warn(reason, text)
            if self._options.config.bind_address_hard_fail:
                self.fail(ApplyError(text))

        self._servers.append(server)
        server.start_retrying(address, port_failure(neighbours, address[1], say))

    def _serve_commands(self, path: str) -> None:
        warned: set[str] = set()

        def failed(error: ApplyError) -> None:  # called after each failed attempt, every 5 s
            level = logging.DEBUG if str(error) in warned else logging.WARNING
            warned.add(str(error))
            log.log(level, "%s; commands such as `kube-proxy why` cannot ask this proxy", error)

        pages = socket_pages(self.desk)
        admission = Admission(lambda: (COMMANDS_AT_ONCE, 1))
        server = HttpServer("commands", routes(pages), lambda at, _: listen(at), admission)
        self._servers.append(server)
        server.start_retrying((path, 0), failed)

    def _pages(self, neighbours: Neighbours) -> Mapping[str, Handler]:
        options, config = self._options, self._options.config
        on = partial(gate_enabled, config.feature_gates)
        pages = metrics_pages(self.metrics, config.active_mode, neighbours.asked_by)
        pages["/debug/state"] = state_page(self.desk.snapshot)
        configz = {"kubeproxy.config.k8s.io": describe(in_effect(config))}
        pages["/configz"] = lambda _: Response(200, JSON, msgspec.json.encode(configz))
        if on("ComponentStatusz"):
            status = partial(status_text, started=self.desk.snapshot.started, paths=pages)
            pages["/statusz"] = lambda _: Response(200, TEXT, status(self._facts()).encode())
        if on("ComponentFlagz"):
            pages["/flagz"] = lambda _: Response(200, TEXT, flags_text(options.flags).encode())
        if config.enable_profiling:
            pages.update(profiling_pages(self.output.verbosity.set))
        if options.page.networks:
            pages.update(dict.fromkeys(PATHS, self._show))
        return pages

    def _show(self, request: Request) -> Response:
        """Serve the page. Most of the page's modules are loaded at the first request."""
        if self._page is None:
            from kubeproxy.page.pages import Whole  # noqa: PLC0415 - loaded at the first request

            self._page = Whole(self.desk, self.journal)
        return self._page.handlers[request.path](request)

    def _facts(self) -> Mapping[str, str]:
        snapshot = self.desk.snapshot
        return {
            "Python version": platform.python_version(),
            "Binary version": build().name,
            "Commit": " ".join(filter(None, build()[1:])) or "unknown",
            "Emulation version": ".".join(KUBERNETES),
            "Mode": snapshot.mode.name,
            "Node": snapshot.planner.world.node_name,
            "Services": str(len(snapshot.planner.compiled)),
            "Ready": "; ".join(snapshot.health.unready().values()) or "yes",
        }

    def _warn(self, reason: str, text: str) -> None:
        log.error("%s", text)
        self.events.on_node("Warning", reason, text)


COMMAND: Final = "kube-proxy"
PAUSE: Final = 60.0  # seconds between two messages about the same problem
_ANSWER_SECONDS: Final = 2.0
_MOST_ANSWERED: Final = 4096
_ANSWER: Final = re.compile(rb"HTTP/1\.[01] 200 .*?\r\n\r\n([a-z]{1,20})\s*", re.S)
_AGENT: Final = re.compile(r"kube-proxy/[\w.+-]{1,40} \(pid ([0-9]{1,10}); mode ([a-z]{1,20})\)")
_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared


def user_agent(pid: int, mode: str) -> str:
    """Return the User-Agent header of a request that this proxy sends to the process that uses its port."""
    return f"kube-proxy/v{NUMBER} (pid {pid}; mode {mode})"


class Neighbours:
    """Detects other kube-proxies on this node; `say` gets a sentence about each kube-proxy that uses a port of this
    proxy.

    A proxy that finds a port in use requests /proxyMode, which every kube-proxy answers. The User-Agent of the request
    identifies the sender, so each proxy reports the other. Only digits and lower-case letters of another proxy's text
    are used. `mode` is this proxy's mode; `page` (host, port) is the metrics port at which the other proxy's mode is
    requested."""

    def __init__(
        self,
        mode: str,
        page: tuple[str, int],
        say: Callable[[str], None],
        find: Callable[[int, str], Process | None] = holder,
        clock: Clock = time.monotonic,
    ) -> None:
        self._mode = mode
        self._page = _WILDCARDS.get(page[0], page[0]), page[1]
        self._say = say
        self._find = find
        self._messages = TokenBucket(1 / PAUSE, 1, clock)

    def asked_by(self, agent: str) -> None:
        """Report the kube-proxy on this node that the User-Agent header of its request identifies, at most once a
        minute."""
        named = _AGENT.fullmatch(agent)
        if named is None or int(named[1]) == os.getpid() or not self._messages.take():
            return
        self._say(
            f"another kube-proxy (pid {named[1]} as it reports, in mode {named[2]}) runs on this node and tries to "
            f"open the ports of this proxy (pid {os.getpid()}, in mode {self._mode}): {_advice(self._mode, named[2])}"
        )

    async def holding(self, port: int) -> str:
        """Describe the process that listens on a port of this proxy."""
        process = await asyncio.to_thread(self._find, port, COMMAND)
        page = process if port == self._page[1] else await asyncio.to_thread(self._find, self._page[1], COMMAND)
        mode = "" if page is not None and page.pid == os.getpid() else await self._ask_mode()
        holder_text = (
            f"process {process.command} (pid {process.pid}) has it"
            if process is not None
            else "the process that uses it is not visible from here (it has other rights, or is in a container)"
        )
        if not mode:
            return holder_text
        same = process is not None and page is not None and process.pid == page.pid
        other = (
            f", a kube-proxy in mode {mode}" if same else f"; a kube-proxy in mode {mode} answers on {self._page[1]}"
        )
        return f"{holder_text}{other}: {_advice(self._mode, mode)}"

    async def _ask_mode(self) -> str:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                reader, writer = await asyncio.open_connection(*self._page, limit=_MOST_ANSWERED)
                try:
                    agent = user_agent(os.getpid(), self._mode)
                    head = f"GET /proxyMode HTTP/1.0\r\nHost: localhost\r\nUser-Agent: {agent}\r\n\r\n"
                    writer.write(head.encode("ascii"))
                    answered = b""
                    while len(answered) < _MOST_ANSWERED and (piece := await reader.read(_MOST_ANSWERED)):
                        answered += piece
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            return ""
        found = _ANSWER.fullmatch(answered)
        return found[1].decode("ascii") if found is not None else ""


def port_failure(
    neighbours: Neighbours, port: int, say: Callable[[str], None], clock: Clock = time.monotonic
) -> Callable[[ApplyError], None]:
    """Return a function that reports a port that cannot be opened: at the first failure, then at most once a minute."""
    messages = TokenBucket(1 / PAUSE, 1, clock)
    explaining: set[asyncio.Task[None]] = set()

    async def explain(error: ApplyError) -> None:
        say(f"{error}; {await neighbours.holding(port)}")

    def failed(error: ApplyError) -> None:
        if not messages.take():
            return
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            task = asyncio.get_running_loop().create_task(explain(error))
            explaining.add(task)
            task.add_done_callback(explaining.discard)
        else:
            say(str(error))

    return failed


def _advice(ours: str, theirs: str) -> str:
    return "both write rules for the same Services, " * (ours != theirs) + "stop one of them"
