"""Builds and connects the parts of the program; lifetime.py ends them.

sources (API or manifests) --events--> engine --transactions--> backends
                                         |--> reporter --> metrics, health, events, service health, conntrack
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from msgspec import structs

from kubeproxy.api.connection import Loop
from kubeproxy.ask.desk import Desk
from kubeproxy.ask.places import Places
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.backends.mode import Backend, Mode, Operations
from kubeproxy.config.gates import gate_states
from kubeproxy.config.load import watch as watch_config
from kubeproxy.config.modes import FALLBACK
from kubeproxy.config.options import Options
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.validate import notices
from kubeproxy.engine.ejecting import Ejector
from kubeproxy.engine.engine import Engine, Pace
from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import ApplyError, ConfigError, Unsupported
from kubeproxy.features import EJECTION, STARTUP_TAINT
from kubeproxy.kernel.proc.capability import raise_net_admin
from kubeproxy.kernel.proc.processes import INIT, Orphans, raise_limit
from kubeproxy.kernel.proc.sysctl import apply_settings
from kubeproxy.kernel.route import AddressMonitor
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Event
from kubeproxy.model.plan import FamilyGlobals, Globals
from kubeproxy.model.world import Settings, eligible, pod_cidrs, primary_family
from kubeproxy.program import lifetime, startup_taint
from kubeproxy.program.serving import Servers
from kubeproxy.release import build
from kubeproxy.report import logs
from kubeproxy.report.events import EventRecorder, ObjectReference
from kubeproxy.report.flows import FlowCleaner
from kubeproxy.report.health import Notifier, ProxyHealth, ServiceHealth
from kubeproxy.report.journal import Journal
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.report.reporter import Reporter
from kubeproxy.setup import host, modes
from kubeproxy.setup.sources import Sources, open_sources
from kubeproxy.wording import counted

log = logging.getLogger("kubeproxy.app")

FIRST_REMOVAL_RETRY = 0.5  # seconds; short, because the other mode's rules still translate connections
SLOWEST_REMOVAL_RETRY = 600.0  # seconds; long, because without the required rights no attempt succeeds
CONFIG_CHANGED = 1  # exit code, with which the supervisor restarts the proxy


def run(options: Options) -> int:
    """Run the proxy, or the action that the options request; return the exit code. Raises KubeProxyError."""
    config = options.config
    # A container's first process ignores signals without a handler. An interrupted action ends with exit code 1.
    interrupted = int(options.cleanup or options.init_only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(interrupted))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    output = logs.setup(config.logging)
    raise_net_admin()
    raise_limit()
    for name, value in options.flags if log.isEnabledFor(logs.level(1)) else ():
        log.log(logs.level(1), 'FLAG: --%s="%s"', name, value)
    if options.cleanup:
        failures = modes.clean_up()
        for failure in failures:
            log.error("Cannot clean up: %s", failure)
        return int(bool(failures))
    for notice in notices(config):
        log.warning("%s", notice)
    options, mode, settings = _chosen(options)
    config, operations = options.config, mode.operations()
    host.check_families(settings)
    if options.init_only:
        _prepare_host(operations, config)
        apply_settings(operations.sysctls(config))  # the proxy may have fewer rights later
        return 0
    lifetime.postpone_garbage_collection()
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(_main(options, settings, mode, output))


def _chosen(options: Options) -> tuple[Options, Mode, Settings]:
    """Return the options, the selected mode, and the node's settings. If the options name no mode and the node cannot
    run the default mode, select the fallback mode, and set it in the options. Raises Unsupported."""
    try:
        return _in_mode(options)
    except Unsupported as error:
        if options.config.mode:
            raise
        fallback = structs.replace(options, config=structs.replace(options.config, mode=FALLBACK.name))
        try:
            found = _in_mode(fallback)
        except Unsupported:
            raise error from None
        log.warning("mode is empty and the default mode cannot run here: %s; running %s mode", error, FALLBACK.name)
        return found


def _in_mode(options: Options) -> tuple[Options, Mode, Settings]:
    mode = modes.named(options.config.active_mode)
    operations = mode.operations()
    settings = host.settings(options.config, options.features)
    check = partial(operations.check, options.config)
    able = host.supported(settings.families, primary_family(settings, None), check)
    if able.lack:
        log.warning("%s", able.words)
    return options, mode, operations.within(structs.replace(settings, families=able.families))


async def _main(options: Options, settings: Settings, mode: Mode, output: logs.Output) -> int:
    async with opened(options, settings, mode, output, lifetime.give_up) as app:
        return await app.run()


@asynccontextmanager
async def opened(
    options: Options, settings: Settings, mode: Mode, output: logs.Output, give_up: Callable[[Sequence[str], str], None]
) -> AsyncIterator[App]:
    """Build the program; yield it ready to run. Steps that may fail come before steps that change the host. `give_up`
    drops capabilities (lifetime.py) after the preparation of the host and before the first thread. Its arguments are
    the files that the proxy reads again later, and the credential plugin. Raises ConfigError, Unsupported or
    ApplyError."""
    config, operations = options.config, mode.operations()
    metrics = ProxyMetrics()
    if mode.refusals:
        metrics.count_refusals(*mode.refusals)
    metrics.begin(family.label for family in settings.families)
    metrics.show_features(gate_states(config.feature_gates))

    def deliver(events: Sequence[Event]) -> None:
        app.take(events)

    async with AsyncExitStack() as stack:
        sources = open_sources(options, settings.node_name, deliver, metrics)
        stack.push_async_callback(sources.close)
        _prepare_host(operations, config)
        give_up([*filter(None, [options.config_file]), *sources.files()], sources.plugin)
        ours = dict.fromkeys(settings.families, FamilyGlobals())
        world = Globals(
            settings.node_name, features=settings.features, ipv4=ours.get(Family.IPV4), ipv6=ours.get(Family.IPV6)
        )
        backends = operations.open(config, world, metrics.registry)
        for backend in backends:
            stack.callback(backend.close)
        app = App(options, settings, mode, output, metrics, sources, backends)
        yield app


def _prepare_host(operations: Operations, config: KubeProxyConfiguration) -> None:
    host.tune(config.conntrack, config.oom_score_adj)
    operations.prepare(config)


async def remove_others(mode: Mode, backoff: Backoff) -> None:
    """Remove the rules of other modes; repeat a removal that fails, for example while another program holds the
    iptables lock."""
    logged: set[str] = set()
    while failures := await asyncio.to_thread(modes.remove_others, mode):
        for failure in failures:
            if failure not in logged:
                log.error("Cannot remove the rules of another mode error=%r", failure)
        logged.update(failures)
        await asyncio.sleep(backoff.failed())


class App:
    """One running proxy, on the event loop."""

    def __init__(
        self,
        options: Options,
        settings: Settings,
        mode: Mode,
        output: logs.Output,
        metrics: ProxyMetrics,
        sources: Sources,
        backends: Sequence[Backend],
    ) -> None:
        config = self._config = options.config
        self._output = output
        self._systemd = Notifier.of_environment(os.environ)
        self._mode = mode
        self._options = options
        self._settings = settings
        self._metrics = metrics
        self._sources = sources
        self._lifetime = lifetime.Lifetime(output.handler.flush)
        self._health = ProxyHealth(self._metrics, config.syncs.sync_period)
        self._events = EventRecorder(settings.node_name, self._sources.post)
        self._service_health = ServiceHealth(self._health.healthy, self._service_health_failed)
        self._flows = self._flow_cleaner(backends)
        self._journal = Journal(
            lambda: (
                (reach.trouble, reach.silent, reach.failing) if (reach := sources.reach()) is not None else ("", 0, "")
            )
        )
        observers = self._health, self._service_health, self._events, self._flows, self._journal
        self._reporter = Reporter(self._metrics, *observers)
        pace = Pace(config.syncs.min_sync_period, config.syncs.sync_period)
        self._engine = Engine(
            settings,
            backends,
            self._reporter,
            pace,
            partial(host.packed_local_addresses, settings.families),
            node_timeout=self._sources.node_timeout,
            servers=lambda: sources.route.places,
        )
        self._suspects = [read for each in backends if (read := each.abilities.suspects) is not None]
        sources.route.changed = self._engine.addresses_changed
        self._journal.engine = self._engine
        snapshot = Snapshot(
            options, mode, self._engine, self._health, sources.reach, time.time(), journal=self._journal
        )
        desk, fail = Desk(snapshot, Places(sources.nodes)), self._lifetime.fail
        self._servers = Servers(desk, self._metrics, self._health, self._journal, self._events, output, fail)
        self._pod_cidrs: tuple[str, ...] = ()

    def _flow_cleaner(self, backends: Sequence[Backend]) -> FlowCleaner:
        relays = {each.family: ports_of for each in backends if (ports_of := each.abilities.ports_of)}
        disturbed = {each.family: ask for each in backends if (ask := each.abilities.disturbed)}
        families = self._settings.families
        addresses = partial(host.packed_local_addresses, families)
        return FlowCleaner(self._metrics, families, addresses, relays=relays, disturbed=disturbed)

    async def run(self) -> int:
        """Run until the program ends; return the exit code."""
        loop = asyncio.get_running_loop()
        self._lifetime.heed_signals()
        monitor = AddressMonitor.listen(ignored=modes.interfaces())
        loop.add_reader(monitor.fileno(), self._addresses, monitor)
        self._health.ready_when("api", self._sources.stale)
        self._health.ready_when("kernel", lambda: next((s.refusal for s in self._engine.standings if s.refusal), None))
        self._metrics.own.ready.follow(lambda: not self._health.unready())
        self._servers.open()
        for name, work in self._work().items():
            self._lifetime.start(name, work)
        log.info(
            "Starting version=%s mode=%s node=%s families=%s",
            build().name,
            self._mode.name,
            self._settings.node_name,
            ",".join(f.label for f in self._settings.families),
        )
        self._events.on_node("Normal", "Starting", "")
        if self._options.idle:
            self._events.on_node("Warning", "FlagWithoutEffect", self._options.idle)
        if (old := self._mode.deprecation) is not None:
            self._events.on_node("Warning", old.reason, old.note)
        try:
            return await self._lifetime.end()
        finally:
            self._systemd.stopping()
            loop.remove_reader(monitor.fileno())
            monitor.close()
            await self._lifetime.cancel_parts()
            await self._service_health.stop()
            await self._servers.close()

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        work = {
            "engine": self._engine.run(),
            "events": self._events.run(),
            "resyncs": self._reporter.count_resyncs(
                self._config.config_sync_period, lambda: self._engine.planner.objects
            ),
            "flows": self._flows.run(),
            "first sync": self._after_first_sync(),
            "journal": self._journal.run(),
            "systemd": self._systemd.run(self._health.healthy, self._summary),
            "source": self._sources.run(),
        }
        if EJECTION.supported(self._mode.name):
            work["ejection"] = Ejector(self._engine, self._suspects).run()
        if taint := STARTUP_TAINT.among(self._options.features):
            work["startup taint"] = self._announce_readiness(taint)
        if self._output.handler.buffered:
            work["logs"] = self._output.handler.flush_every(self._config.logging.flush_frequency)
        if os.getpid() == INIT:
            work["orphans"] = Orphans().run()
        if self._options.config_file:
            work["config"] = self._watch_config()
        return work

    def take(self, events: Sequence[Event]) -> None:
        """Pass events to the engine; apply changes of this proxy's Node."""
        self._journal.arrived(events)
        self._engine.arrive(events)
        node = self._engine.planner.nodes.get(self._settings.node_name)
        self._health.node_eligible = eligible(node) if self._sources.knows_nodes else True
        if self._settings.local_mode == "NodeCIDR":
            try:
                host.check_pod_cidrs(self._settings, node)
            except ConfigError as error:
                self._lifetime.fail(error)
            cidrs = pod_cidrs(node)
            if self._pod_cidrs and cidrs and cidrs != self._pod_cidrs:
                log.error("The Node's podCIDRs changed old=%s new=%s; restarting", self._pod_cidrs, cidrs)
                self._lifetime.stop(1)
            self._pod_cidrs = cidrs or self._pod_cidrs

    def _addresses(self, monitor: AddressMonitor) -> None:
        try:
            if monitor.drain():
                self._engine.addresses_changed()
        except ApplyError as error:
            log.error("Cannot watch the local addresses error=%r", str(error))

    def _service_health_failed(self, namespace: str, name: str, port: int, why: str) -> None:
        # The note and the uid are the same as in the Go kube-proxy, because operators may search for them.
        service = ObjectReference("Service", name, namespace, f"{namespace}/{name}")
        node = self._settings.node_name
        note = f'node {node} failed to start healthcheck "{namespace}/{name}" on port {port}: {why}'
        self._events.record(service, "Warning", "FailedToStartServiceHealthcheck", "Listen", note)

    def _summary(self) -> str:
        if self._engine.progress is not None:
            return str(self._engine.progress)
        if reasons := self._health.unready():
            return "Not ready: " + "; ".join(reasons.values())
        return f"Ready: {counted(len(self._engine.planner.compiled), 'Service')} in {self._config.active_mode} mode"

    async def _after_first_sync(self) -> None:
        await lifetime.resume_garbage_collection(self._engine.ready)
        self._systemd.ready()
        node = self._engine.planner.nodes.get(self._settings.node_name)  # known by now if the Node exists
        host.warn_of_addresses(self._config, self._settings, node)
        await remove_others(self._mode, Backoff(FIRST_REMOVAL_RETRY, SLOWEST_REMOVAL_RETRY))
        self._flows.recheck(self._engine.planner.compiled)

    async def _announce_readiness(self, key: str) -> None:
        if self._sources.patch is None:
            log.warning("--startup-taint has no effect without an API server")
            return
        await self._engine.ready.wait()
        name, nodes = self._settings.node_name, self._engine.planner.nodes
        await startup_taint.remove(key, name, lambda: nodes.get(name), self._sources.patch, self._events.on_node)

    async def _watch_config(self) -> None:
        changes = watch_config(
            self._options.config_file, self._config, self._options.resolve, invalid=self._metrics.own.config_invalid.set
        )
        async for difference in changes:
            log.warning("The configuration changed, restarting: %s", "; ".join(difference))
            self._lifetime.stop(CONFIG_CHANGED)
