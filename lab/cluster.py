"""The lab: starts and stops topology, API server, controllers and kubelets together.

async with LabCluster() as cluster:
    cluster.create(whoami_rc("web", 3))
    await cluster.pods_ready("app=web", 3)
    proxy = await cluster.start_proxy()
    print(await cluster.probe("outside", "tcp", "10.96.1.0", 80))
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from kubeproxy.engine.pacing import to_its_end
from kubeproxy.errors import ConfigError, KubeProxyError, Unsupported
from lab import objects, proxyprocess
from lab.answers import Answers
from lab.apiserver.resources import Resource, by_kind, by_plural
from lab.apiserver.selection import parse_labels
from lab.apiserver.server import ApiServer, Listener, ServerConfig
from lab.apiserver.store import Key
from lab.certificates import Certificates, make_certificates
from lab.controllers.base import Controller
from lab.controllers.endpointslice import EndpointSliceController
from lab.controllers.loadbalancer import LoadBalancers
from lab.controllers.namespaces import NamespaceController
from lab.controllers.replication import ReplicationManager
from lab.controllers.scheduling import Scheduler, condition
from lab.forward import Forward
from lab.netns import open_socket_in, run_in_async
from lab.pods import Kubelets
from lab.probes import Answer, NoAnswer, ask, ask_many
from lab.runfolder import claim, release, run_folder
from lab.topology import LB_RANGE, LB_RANGE6, NODE_A, NODES, OUTSIDE_IP, NodeNet, Topology, requirements

log = logging.getLogger("lab")

Json = dict[str, Any]


class NotInTimeError(KubeProxyError):
    """An expected state was not reached in time."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The settings of a cluster. The id is part of the names of its namespaces; with random ids several clusters run at
    the same time."""

    cluster_id: str = field(default_factory=lambda: secrets.token_hex(3))
    server: ServerConfig = field(default_factory=ServerConfig)
    tls: bool = False
    certificate_days: int = 2
    drain: float = 0.2
    """Seconds for which a deleted pod continues to answer, within its grace period."""
    host_port: int = 0
    """The port of the API server on this machine's loopback; 0 selects a free port."""


class LabCluster:
    """An async context manager; it always removes everything at its end."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.config = config or ClusterConfig()
        self.folder = run_folder(self.config.cluster_id)
        self.topology = Topology(self.config.cluster_id)
        self.server = ApiServer(self.config.server)
        self.rest = self.server.rest
        self.store = self.server.store
        self.faults = self.server.faults
        self.certificates: Certificates | None = None
        self._answers = Answers()
        self._kubelets = Kubelets(self.rest, self.topology, self._answers, self.config.drain)
        self._controllers: tuple[Controller, ...] = (
            Scheduler(self.rest),
            ReplicationManager(self.rest),
            EndpointSliceController(self.rest),
            LoadBalancers(self.rest, {"IPv4": LB_RANGE, "IPv6": LB_RANGE6}),
            NamespaceController(self.rest),
        )
        self.spawn: proxyprocess.Spawn = proxyprocess.spawn
        self._proxies: list[proxyprocess.Proxy] = []
        self._forwards: list[Forward] = []

    # life

    async def __aenter__(self) -> Self:
        lacking = requirements()
        if lacking:
            raise Unsupported("; ".join(lacking))
        claim(self.folder)
        try:
            await self._up()
        except BaseException:
            await self._down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._down()

    async def _up(self) -> None:
        start = time.perf_counter()
        if self.config.tls:
            self.certificates = await asyncio.to_thread(
                make_certificates, self.folder / "pki", days=self.config.certificate_days
            )
        made = asyncio.create_task(to_its_end(self.topology.up))
        try:
            await self._answers.start()
        finally:
            await made  # A cancelled start stops the parts that have already started.
        await self._serve()
        self.rest.create(by_plural("endpointslices"), objects.api_slice(OUTSIDE_IP), "default")
        for node in NODES:
            self.store.put("nodes", objects.node(node))
        for controller in self._controllers:
            controller.start()
        self._kubelets.start()
        self._write_kubeconfigs()
        log.info("lab up id=%s seconds=%.3f", self.config.cluster_id, time.perf_counter() - start)

    async def _serve(self) -> None:
        tls = self.certificates.server_context() if self.certificates else None
        node = self.topology.node(NODE_A)
        places: list[Callable[[], socket.socket]] = [
            functools.partial(_listen, "127.0.0.1", self.config.host_port),
            functools.partial(open_socket_in, node, functools.partial(_listen, "127.0.0.1", objects.API_PORT)),
            functools.partial(
                open_socket_in, self.topology.outside, functools.partial(_listen, OUTSIDE_IP, objects.API_PORT)
            ),
        ]
        await self.server.start(*(Listener(place, tls) for place in places))
        # If the kernel chose the port, the server uses the same port when it listens again.
        port = self.server.addresses[0][1]
        places[0] = functools.partial(_listen, "127.0.0.1", port)
        self.server.set_listeners(*(Listener(place, tls) for place in places))

    async def _down(self) -> None:
        """Stop everything; a failure of one part does not prevent the stop of the others."""
        failures: list[BaseException] = []
        steps: list[Callable[[], Any]] = [
            *(f.close for f in self._forwards),
            *(p.stop for p in self._proxies),
            self._kubelets.stop,
        ]
        steps += [self.server.close, self._answers.close, functools.partial(to_its_end, self.topology.down)]
        for controller in self._controllers:
            controller.stop()
        for step in steps:
            try:
                await step()
            except (Exception, asyncio.CancelledError) as e:
                log.warning("lab step failed during the stop err=%r", e)
                failures.append(e)
        self._proxies.clear()
        self._forwards.clear()
        release(self.folder)
        if failures:
            raise failures[0]

    # the API, without HTTP

    def create(self, obj: Json, namespace: str = "") -> Json:
        """Create an object; return the stored object. Raises ApiError."""
        return self._complete(obj, self.rest.create(self._resource(obj), obj, namespace).decode())

    def update(self, obj: Json) -> Json:
        """Replace an object. Raises ApiError."""
        return self._complete(obj, self.rest.update(self._resource(obj), obj, self._key(obj)).decode())

    def patch(self, plural: str, name: str, patch: Json, namespace: str = "default", subresource: str = "") -> Json:
        """Apply a JSON merge patch. Raises ApiError."""
        resource = by_plural(plural)
        key = (namespace if resource.namespaced else "", name)
        return self.rest.patch(resource, patch, "application/merge-patch+json", key, subresource).decode()

    def delete(self, plural: str, name: str, namespace: str = "default", grace: int | None = None) -> None:
        """Delete an object; `grace` in seconds for pods. Raises ApiError."""
        resource = by_plural(plural)
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        self.rest.delete(resource, (namespace if resource.namespaced else "", name), options)

    def scale(self, name: str, replicas: int, namespace: str = "default") -> None:
        """Scale a ReplicationController. Raises ApiError."""
        self.rest.set_scale(by_plural("replicationcontrollers"), {"spec": {"replicas": replicas}}, (namespace, name))

    def get(self, plural: str, name: str, namespace: str = "default") -> Json:
        """Return the present object. Raises ApiError."""
        resource = by_plural(plural)
        return self.rest.get(resource, (namespace if resource.namespaced else "", name)).decode()

    def select(self, plural: str, selector: str = "", namespace: str | None = None) -> list[Json]:
        """Return the objects that match a label selector. Raises ApiError for an invalid selector."""
        chosen = parse_labels(selector)
        records = self.store.records(by_plural(plural).storage, namespace)
        return [r.decode() for r in records if chosen.matches(r.labels)]

    @staticmethod
    def _resource(obj: Json) -> Resource:
        resource = by_kind(obj.get("apiVersion", "v1"), obj["kind"])
        if resource is None:
            raise ConfigError(f"kind: the lab has no {obj['kind']} of {obj.get('apiVersion', 'v1')}")
        return resource

    def _key(self, obj: Json) -> Key:
        metadata = obj["metadata"]
        namespaced = self._resource(obj).namespaced
        return (metadata.get("namespace", "default") if namespaced else "", metadata["name"])

    @staticmethod
    def _complete(asked: Json, stored: Json) -> Json:
        return {"kind": asked["kind"], "apiVersion": asked.get("apiVersion", "v1")} | stored

    async def until(self, holds: Callable[[], bool], what: str, timeout: float = 5.0) -> None:
        """Wait until a condition is true; check it often. Raises NotInTimeError, naming `what`."""
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                raise NotInTimeError(f"not within {timeout:g} s: {what}")
            await asyncio.sleep(0.01)

    async def pods_ready(
        self, selector: str, count: int, namespace: str = "default", timeout: float = 5.0
    ) -> list[Json]:
        """Wait until exactly `count` selected pods exist, all ready and none terminating; return them."""
        found: list[Json] = []

        def holds() -> bool:
            found[:] = self.select("pods", selector, namespace)
            living = [p for p in found if not p["metadata"].get("deletionTimestamp")]
            return len(living) == len(found) == count and all(condition(p, "Ready") == "True" for p in living)

        await self.until(holds, f"{count} ready pods with {selector}", timeout)
        return found

    # network namespaces

    def namespace_of(self, place: str) -> str:
        """Return the network namespace of a place: node, outside, pod (a client on node-a), neighbour, or a pod
        NS/NAME.

        Raises ConfigError for any other place.
        """
        fixed = {
            "node": self.topology.node(NODE_A),
            "neighbour": self.topology.node(NODES[1]),
            "outside": self.topology.outside,
            "pod": self.topology.client,
        }
        if place in fixed:
            return fixed[place]
        namespace, _, name = place.rpartition("/")
        record = self.store.get("pods", (namespace or "default", name))
        net = self._kubelets.net_of(record.decode()["metadata"]["uid"]) if record else None
        if net is None:
            raise ConfigError(f"place: {place!r} is none of {', '.join(fixed)} and no running pod")
        return net.namespace

    async def probe(
        self, place: str, proto: str, address: str, port: int, timeout: float = 0.5, source: str | None = None
    ) -> Answer | NoAnswer:
        """Query a whoami server by tcp or udp from a place; return its answer, or "refused", "timeout",
        "unreachable"."""
        question = functools.partial(ask, proto, address, port, timeout, source)
        return await run_in_async(self.namespace_of(place), question)

    async def probes(
        self,
        place: str,
        proto: str,
        address: str,
        port: int,
        count: int,
        timeout: float = 0.5,
        source: str | None = None,
    ) -> list[Answer | NoAnswer]:
        """Return `count` successive probes; a probe takes about 0.3 ms if a server answers."""
        questions = functools.partial(ask_many, proto, address, port, count, timeout, source)
        return await run_in_async(self.namespace_of(place), questions)

    async def exec(self, place: str, argv: Sequence[str], timeout: float = 30.0) -> tuple[int, str, str]:
        """Run a program in a place; return (exit status, stdout, stderr). Raises TimeoutError after killing it."""
        pipe = asyncio.subprocess.PIPE
        command = ["ip", "netns", "exec", self.namespace_of(place), *argv]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except BaseException:
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")

    async def start_proxy(
        self,
        overrides: dict[str, Any] | None = None,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        *,
        node: NodeNet = NODE_A,
        ready_within: float | None = 30.0,
    ) -> proxyprocess.Proxy:
        """Run kube-proxy on a node and wait until it is ready (None: do not wait). Raises ProxyError.

        `overrides` replace fields of its configuration, `args` are appended to its command line, `command` is another
        binary with its first arguments.
        """
        kubeconfig = self.node_kubeconfig if node is NODE_A else self.neighbour_kubeconfig
        config = proxyprocess.configuration(kubeconfig, {"hostnameOverride": node.name} | (overrides or {}))
        command = command or [proxyprocess.proxy_command()]
        proxy = await proxyprocess.start(self.topology.node(node), self.folder, config, command, args, self.spawn)
        self._proxies.append(proxy)
        if ready_within is not None:
            await proxy.wait_ready(ready_within)
        return proxy

    async def launch_proxy(self, argv: Sequence[str], config_file: Path) -> proxyprocess.Proxy:
        """Start a kube-proxy on node-a with a complete command line, which contains its `config_file`; do not wait."""
        proxy = await proxyprocess.launch(self.topology.node(NODE_A), self.folder, argv, config_file)
        self._proxies.append(proxy)
        return proxy

    async def page(self) -> str:
        """Forward a port of this machine's loopback to the page of node-a's proxy; return its address."""
        port = proxyprocess.METRICS_PORT
        self._forwards.append(await Forward(self.topology.node(NODE_A), port, port).__aenter__())
        return f"http://127.0.0.1:{self._forwards[-1].port}/ui/"

    # kubeconfig

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig for kubectl on this machine."""
        return self.folder / "kubeconfig"

    @property
    def node_kubeconfig(self) -> Path:
        """The kubeconfig for programs on node-a."""
        return self.folder / "node.kubeconfig"

    @property
    def neighbour_kubeconfig(self) -> Path:
        """The kubeconfig for programs on node-b."""
        return self.folder / "neighbour.kubeconfig"

    def _write_kubeconfigs(self) -> None:
        files = {
            self.kubeconfig: f"127.0.0.1:{self.server.addresses[0][1]}",
            self.node_kubeconfig: f"127.0.0.1:{objects.API_PORT}",
            self.neighbour_kubeconfig: f"{OUTSIDE_IP}:{objects.API_PORT}",
        }
        for path, address in files.items():
            path.touch(mode=0o600)
            path.write_text(yaml.safe_dump(self._kubeconfig(address)))

    def _kubeconfig(self, address: str) -> Json:
        cluster: Json = {"server": f"http://{address}"}
        user: Json = {}
        if self.certificates is not None:
            cluster = {"server": f"https://{address}", "certificate-authority": str(self.certificates.ca)}
        if self.config.server.tokens:
            user = {"token": next(iter(self.config.server.tokens))}
        elif self.certificates is not None:
            user = {
                "client-certificate": str(self.certificates.client),
                "client-key": str(self.certificates.client_key),
            }
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "lab", "user": user}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
            "current-context": "lab",
        }


def _listen(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), backlog=256)
