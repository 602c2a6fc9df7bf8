"""Answers without a running proxy: reads Services, slices and Nodes once, and compiles their plans as a proxy does."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time

from msgspec.structs import replace

from kubeproxy.api.source import Reach
from kubeproxy.ask.checks import contact
from kubeproxy.ask.desk import Desk
from kubeproxy.ask.finding import UnreadError
from kubeproxy.ask.places import Places
from kubeproxy.ask.snapshot import Planned, Snapshot
from kubeproxy.ask.why import Explained
from kubeproxy.config.options import Options, build_options
from kubeproxy.config.pflag import parse
from kubeproxy.errors import ConfigError, NoAnswerError
from kubeproxy.features import FEATURES
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings, Surroundings, build
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.setup import host, modes
from kubeproxy.setup.sources import Sources, open_sources

TIMEOUT = 30.0  # maximum seconds to wait for the objects
UNREACHED = 5.0  # maximum seconds to wait for a server that cannot be reached

_FLAGS = ("config", "manifests", "kubeconfig", "proxy-mode", "hostname-override", *FEATURES)


class ReadDesk(Desk):
    """Answers from objects that were read for one question; `why` also reads other Nodes."""

    def __init__(self, snapshot: Snapshot, options: Options, control: str, flags: str) -> None:
        super().__init__(snapshot)
        self._options = options
        self.control = control
        self.flags = flags

    def why(self, source: str, target: str, interface: str = "") -> Explained:
        """See Desk."""
        return asyncio.run(self._placed(super().why(source, target, interface)))

    async def _placed(self, made: Explained) -> Explained:
        sources = open_sources(self._options, made.world.node_name, lambda _: None, ProxyMetrics())
        self.places = Places(sources.nodes)
        try:
            return await self.placed(made)
        finally:
            await sources.close()


def desk(arguments: argparse.Namespace) -> Desk:
    """Return the Desk that answers as a proxy with these arguments. Raises ConfigError, and errors of `read`."""
    options = _options(arguments)
    settings = host.settings(options.config, options.features)
    mode = modes.named(options.config.active_mode)
    planner, reach = asyncio.run(read(options, settings))
    addresses = host.packed_local_addresses(settings.families)
    node = planner.nodes.get(settings.node_name)
    cidrs = [cidr for cidrs in planner.service_cidrs.values() for cidr in cidrs]
    planner.set_world(build(settings, Surroundings(node, cidrs, addresses, ejects=planner.ejections.in_use)))
    planner.take()

    planned = Planned(planner, addresses)
    snapshot = Snapshot(options, mode, planned, planned, lambda: reach, time.time(), "planned")
    return ReadDesk(snapshot, options, arguments.control_socket, _flags(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    given = vars(arguments)
    return {name: value for name in _FLAGS if (value := given.get(name.replace("-", "_")))}


def _flags(arguments: argparse.Namespace) -> str:
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in _given(arguments).items())


def _options(arguments: argparse.Namespace) -> Options:
    given = _given(arguments)
    kubeconfig = given.pop("kubeconfig") if {"config", "kubeconfig"} <= given.keys() else ""
    options = build_options(parse([f"--{name}={value}" for name, value in given.items()]))
    if not kubeconfig:
        return options
    client = replace(options.config.client_connection, kubeconfig=kubeconfig)
    return replace(options, config=replace(options.config, client_connection=client))


async def read(options: Options, settings: Settings) -> tuple[Planner, Reach | None]:
    """Return a planner with all objects, and the state of the connection to the API server.

    Raises UnreadError if no API server is configured, or it cannot be reached, refuses the lists, or exceeds TIMEOUT;
    NoAnswerError if a folder needs more than TIMEOUT; ConfigError if a folder cannot be a source; SourceError if a
    source fails permanently."""
    planner = Planner(build(settings, Surroundings()))
    try:
        sources = open_sources(options, settings.node_name, planner.apply, ProxyMetrics())
    except ConfigError as error:
        if options.manifests:
            raise
        raise UnreadError(contact.unread(None, str(error))) from error
    work = asyncio.ensure_future(sources.run())
    begun = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT):
            # The function polls, because a change of the watches' state causes no event.
            while not _is_read(planner, sources, begun):
                if work.done():
                    work.result()
                await asyncio.sleep(0.01)
    except TimeoutError:
        pass
    finally:
        reach = sources.reach()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await sources.close()
    if not planner.complete:
        late = f"the objects could not be read within {TIMEOUT:.0f} s"
        raise UnreadError(contact.unread(reach, late)) if reach is not None else NoAnswerError(late)
    return planner, reach


def _is_read(planner: Planner, sources: Sources, begun: float) -> bool:
    """Return whether all objects are read, or cannot be read. These objects include those that no plan needs, such as
    ServiceCIDRs."""
    reach = sources.reach()
    watched = reach.watched if reach is not None else ()
    has_node = planner.nodes or not sources.knows_nodes or all(one.synced for one in watched)
    if planner.complete and has_node:
        return all(one.synced or one.connected or one.trouble for one in watched)
    is_late = time.monotonic() - begun > UNREACHED
    return reach is not None and bool(contact.hopeless(reach) or (reach.trouble and is_late))
