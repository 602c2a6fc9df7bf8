"""Builds the parts of the program, runs them, and stops them in order. The only module that knows them all.

sources (API or manifests) --events--> engine --transactions--> backends
                                         |--> reporter --> metrics, health, events, service health, conntrack
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from kubeproxy import __version__, host, modes
from kubeproxy.backends.ipvs.layout import INTERFACE as SERVICE_INTERFACE
from kubeproxy.backends.mode import Mode
from kubeproxy.config.addresses import split_host_port
from kubeproxy.config.options import Options
from kubeproxy.config.watch import watch as watch_config
from kubeproxy.config.write import describe
from kubeproxy.engine import Engine, Pace
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.addresses import AddressMonitor
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event
from kubeproxy.model.plan import FamilyGlobals, Globals
from kubeproxy.model.world import Settings, pod_cidrs
from kubeproxy.observe import logs
from kubeproxy.observe.events import EventRecorder, ObjectReference
from kubeproxy.observe.health import ProxyHealth, eligible
from kubeproxy.observe.http import HttpServer, routes
from kubeproxy.observe.metrics import Metrics
from kubeproxy.observe.pages import metrics_pages
from kubeproxy.observe.service_health import ServiceHealth
from kubeproxy.reporter import FlowCleaner, Reporter
from kubeproxy.sources import Sources, open_sources

log = logging.getLogger("kubeproxy.app")

CONFIG_CHANGED = 1  # the supervisor restarts us with the new file, as it does the Go kube-proxy


def run(options: Options) -> int:
    """Do what the options ask for; return the exit code. Raises KubeProxyError, to be shown to the user."""
    config = options.config
    logs.setup(config.logging.verbosity, config.logging.format)
    if options.cleanup:
        return _clean_up()
    mode = modes.load(config.active_mode)
    settings = host.settings(config)
    mode.check(config, settings.families)
    host.check_families(settings)
    host.tune(config.conntrack, config.oom_score_adj)
    if options.init_only:
        return 0
    # 100,000 endpoints come in at once, and a collection every 700 objects would find nothing among them.
    gc.set_threshold(50_000, 20, 50)
    return asyncio.run(_main(options, settings, mode))


async def _main(options: Options, settings: Settings, mode: Mode) -> int:
    return await App(options, settings, mode).run()


def _clean_up() -> int:
    failures = modes.clean_up()
    for failure in failures:
        log.error("Cannot clean up: %s", failure)
    return 1 if failures else 0


def _bare(settings: Settings) -> Globals:
    """Return what is known before the Node is: which families there are."""
    ours = {family: FamilyGlobals() for family in settings.families}
    return Globals(settings.node_name, ipv4=ours.get(Family.IPV4), ipv6=ours.get(Family.IPV6))


class App:
    """One running proxy. Made and run on the event loop."""

    def __init__(self, options: Options, settings: Settings, mode: Mode) -> None:
        config = self._config = options.config
        self._mode = mode
        self._options = options
        self._settings = settings
        self._node = ObjectReference("Node", settings.node_name, "", settings.node_name)
        self._metrics = Metrics()
        self._health = ProxyHealth(self._metrics, config.sync_period)
        self._sources: Sources = open_sources(options, settings.node_name, self._take, self._metrics)
        self._events = EventRecorder(settings.node_name, self._sources.post)
        self._service_health = ServiceHealth(self._health.healthy, self._service_health_failed)
        self._flows = FlowCleaner(self._metrics, settings.families, self._local_addresses)
        self._reporter = Reporter(
            self._metrics, self._health, self._service_health, self._events, self._flows, self._node
        )
        self._backends = mode.open(config, _bare(settings), self._reporter)
        pace = Pace(config.min_sync_period, config.sync_period)
        self._engine = Engine(
            settings,
            self._backends,
            self._reporter,
            pace,
            self._local_addresses,
            node_patience=self._sources.node_patience(settings.local_mode == "NodeCIDR"),
        )
        self._servers: list[HttpServer] = []
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pod_cidrs: tuple[str, ...] = ()

    async def run(self) -> int:
        """Run until told to stop; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, 0)
        monitor = AddressMonitor(ignored=SERVICE_INTERFACE)
        loop.add_reader(monitor.fileno(), self._addresses, monitor)
        self._health.ready_when("api", self._sources.stale)
        self._health.ready_when("kernel", lambda: next(iter(self._reporter.refused.values()), None))
        self._serve()
        tasks = [self._spawn(name, work) for name, work in self._work().items()]
        log.info(
            "Starting version=%s mode=%s node=%s families=%s",
            __version__,
            self._mode.name,
            self._settings.node_name,
            ",".join(f.label for f in self._settings.families),
        )
        self._events.record(self._node, "Normal", "Starting", "StartKubeProxy", "")
        try:
            return await self._done
        finally:
            loop.remove_reader(monitor.fileno())
            monitor.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._sources.close()
            await self._service_health.stop()
            await asyncio.gather(*(server.stop() for server in self._servers))
            for backend in self._backends:
                backend.close()

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return all that runs for as long as the program does, by name."""
        work = {
            "engine": self._engine.run(),
            "events": self._events.run(),
            "flows": self._flows.run(),
            "settle": self._settle(),
            **self._sources.work(),
        }
        if self._options.config_file:
            work["config"] = self._watch_config()
        return work

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part; one that ends with an error ends the program, for the supervisor to start it anew."""
        task = asyncio.get_running_loop().create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self._done.done():
                self._done.set_exception(error)

        task.add_done_callback(ended)
        return task

    def _stop(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)

    def _take(self, events: Sequence[Event]) -> None:
        """Hand events on, and note what concerns the proxy itself: its own Node."""
        self._engine.sink(events)
        node = self._engine.planner.nodes.get(self._settings.node_name)
        self._health.node_eligible = eligible(node) if self._sources.knows_nodes else True
        if self._settings.local_mode == "NodeCIDR":
            cidrs = pod_cidrs(node)
            if self._pod_cidrs and cidrs and cidrs != self._pod_cidrs:
                log.error("The Node's podCIDRs changed old=%s new=%s; restarting", self._pod_cidrs, cidrs)
                self._stop(1)
            self._pod_cidrs = cidrs or self._pod_cidrs

    def _local_addresses(self) -> Mapping[Family, list[bytes]]:
        return host.packed_local_addresses(self._settings.families)

    def _addresses(self, monitor: AddressMonitor) -> None:
        try:
            if monitor.drain():
                self._engine.addresses_changed()
        except ApplyError as error:
            log.error("Cannot watch the local addresses error=%r", str(error))

    def _serve(self) -> None:
        """Open the health and the metrics port; one that is taken is tried again, or ends the program."""
        config = self._config
        flags = "\n".join(f"{name}={value}" for name, value in self._options.flags)
        pages = metrics_pages(
            self._metrics,
            lambda: config.active_mode,
            configz=lambda: msgspec.json.encode({"kubeproxy.config.k8s.io": describe(config)}),
            statusz=self._status,
            flagz=lambda: flags,
        )
        wanted = (
            ("healthz", config.healthz_bind_address, self._health.routes(), "FailedToStartProxierHealthcheck"),
            ("metrics", config.metrics_bind_address, pages, "FailedToStartMetricServer"),
        )
        for name, address, table, reason in wanted:
            place = split_host_port(address) if address else None
            if place is not None:
                server = HttpServer(name, routes(table))
                self._servers.append(server)
                self._listen(server, (place[0], int(place[1])), reason)

    def _listen(self, server: HttpServer, address: tuple[str, int], reason: str) -> None:
        def failed(error: ApplyError) -> None:
            log.error("%s", error)
            self._events.record(self._node, "Warning", reason, "StartKubeProxy", str(error))
            if self._config.bind_address_hard_fail and not self._done.done():
                self._done.set_exception(error)

        server.start_retrying([address], failed)

    def _service_health_failed(self, namespace: str, name: str, port: int, why: str) -> None:
        service = ObjectReference("Service", name, namespace)
        note = f"port {port}: {why}"
        self._events.record(service, "Warning", "FailedToStartServiceHealthcheck", "Listen", note)

    def _status(self) -> str:
        planner = self._engine.planner
        return (
            f"kube-proxy statusz\nVersion: {__version__}\nMode: {self._config.active_mode}\n"
            f"Node: {self._settings.node_name}\nServices: {len(planner.compiled)}\n"
            f"Ready: {self._engine.ready.is_set()}\n"
        )

    async def _settle(self) -> None:
        """What is done once, when our own rules are in place."""
        await self._engine.ready.wait()
        # What the first sync made lives on, and has no cycles to find: out of the collector's sight with it.
        gc.freeze()
        for failure in await asyncio.to_thread(modes.remove_others, self._mode):
            log.error("Cannot remove the rules of another mode error=%r", failure)

    async def _watch_config(self) -> None:
        async for change in watch_config(self._options.config_file, self._config, self._options.resolve):
            log.warning("The configuration changed, restarting: %s", "; ".join(change.difference))
            self._stop(CONFIG_CHANGED)
