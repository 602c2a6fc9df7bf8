"""Runs the demo: the cluster, the acts in order, the summary, and commands to try when the cluster stays up."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from time import perf_counter
from typing import Any, TextIO
from urllib.parse import urlsplit

from lab.cluster import ClusterConfig, LabCluster
from lab.demo import changes, fronts, thousand
from lab.demo.kernel import kernel_sizes
from lab.demo.ledger import Ledger
from lab.demo.life import ORPHAN, SHOP, life
from lab.demo.report import Report, milliseconds
from lab.demo.stage import LABELS, NAME, PORT, REPLICAS, Stage
from lab.demo.traffic import Traffic
from lab.objects import whoami_rc
from lab.proxyprocess import METRICS_PORT, ProxyError, proxy_command
from lab.runfolder import owner_pid, run_folder
from lab.topology import NODES, OUTSIDE_IP, OUTSIDE_IP6

DEFAULT_ID = "demo"
LOG_LINES = 10
INTERRUPTED = 130
"""The exit status of a shell after Ctrl-C."""


PICTURE = f"""
outside {OUTSIDE_IP}, {OUTSIDE_IP6}, a client and the network's router
  |-- node-a {NODES[0].ip}, {NODES[0].ip6}, with kube-proxy; pods {NODES[0].pod_cidr}
  '-- node-b {NODES[1].ip}, {NODES[1].ip6}, a neighbour;     pods {NODES[1].pod_cidr}

Each of these, and each pod, is a network namespace of this machine. The packets, the kernel's
nftables and kube-proxy are real; the API server is a small implementation of the API.

"""

Act = Callable[[Stage], Awaitable[None]]
ACTS: tuple[Act, ...] = (
    fronts.cluster_ip,
    fronts.node_port,
    fronts.load_balancer,
    fronts.affinity,
    fronts.local_policy,
    changes.pods_come_and_go,
    thousand.thousand_services,
)


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The settings of the demo. `proxy` replaces fields of kube-proxy's configuration."""

    cluster_id: str = ""
    """The cluster's id; if empty, "demo", or a random id while another demo runs."""
    keep: bool = False
    proxy: dict[str, Any] | None = None
    acts: tuple[Act, ...] = ACTS


def run(config: DemoConfig, output: TextIO | None = None) -> int:
    """Run the demo; return the exit status: 0 if all checks hold, 1 if one fails, 130 after an interruption.

    Raises KubeProxyError if this machine lacks a requirement.
    """
    return asyncio.run(Play(config, Report(output)).run())


class Play:
    """One run of the demo. The first signal ends it in order; later signals do not interrupt the clean-up."""

    def __init__(self, config: DemoConfig, report: Report) -> None:
        self._config = config
        self._report = report
        self._ledger = Ledger()
        self._stop = asyncio.Event()
        self._keeping = False

    async def run(self) -> int:
        """Run the demo, and return the exit status."""
        play = asyncio.create_task(self._play())
        with self._signals(play):
            try:
                return await play
            except asyncio.CancelledError:
                if not self._stop.is_set():
                    play.cancel()
                    await asyncio.gather(play, return_exceptions=True)
                    raise
                self._report.fact("Interrupted. The cluster is removed.")
                return INTERRUPTED

    @contextlib.contextmanager
    def _signals(self, play: asyncio.Task[int]) -> Iterator[None]:
        def on_signal() -> None:
            if not self._stop.is_set() and not self._keeping:
                play.cancel()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (SIGINT, SIGTERM, SIGHUP):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (SIGINT, SIGTERM, SIGHUP):
                loop.remove_signal_handler(number)

    async def _play(self) -> int:
        start = perf_counter()
        async with LabCluster(ClusterConfig(cluster_id=self._config.cluster_id or _free_id())) as cluster:
            self._report.title(f"kube-proxy in nftables mode runs the whoami example, on Linux {platform.release()}")
            for line in PICTURE.splitlines():
                self._report.literal(line, "dim")
            stage = await self._set_the_stage(cluster, perf_counter() - start)
            try:
                await self._acts(stage)
            finally:
                await stage.flood.stop()
            if self._ledger.wrong:
                self._report.log(stage.proxy.tail(LOG_LINES))
            if self._config.keep:
                self._report.outcome(self._ledger, perf_counter() - start)
                await self._keep(stage)
        if not self._config.keep:
            self._report.outcome(self._ledger, perf_counter() - start)
        return 1 if self._ledger.wrong else 0

    async def _set_the_stage(self, cluster: LabCluster, up: float) -> Stage:
        start = perf_counter()
        proxy = await cluster.start_proxy(self._config.proxy)
        ready = perf_counter() - start
        self._report.fact(
            f"The cluster was up after {milliseconds(up)}, kube-proxy ready {milliseconds(ready)} after its start "
            "(its process, the first lists, IPv4 and IPv6 in the kernel)."
        )
        flood = await Traffic(cluster.namespace_of("outside"), "udp").__aenter__()
        stage = Stage(cluster, proxy, self._report, self._ledger, flood)
        try:
            stage.empty = await kernel_sizes(stage.cluster)
            cluster.create(whoami_rc(NAME, REPLICAS, PORT, LABELS))
            pods = await stage.refresh_pods()
        except BaseException:
            await flood.stop()
            raise
        self._report.fact(
            f"A ReplicationController runs {REPLICAS} whoami pods; each sends its name on TCP and UDP port {PORT}:"
        )
        rows = [
            [p["metadata"]["name"], p["spec"]["nodeName"], *(i["ip"] for i in p["status"]["podIPs"])]
            for p in sorted(pods, key=lambda p: str(p["metadata"]["name"]))
        ]
        self._report.table(["pod", "node", "IPv4", "IPv6"], rows)
        return stage

    async def _acts(self, stage: Stage) -> None:
        for act in self._config.acts:
            await act(stage)
            if self._stop.is_set():
                # asyncio.wait_for of Python 3.11 loses a cancellation that arrives as the awaited task ends.
                raise asyncio.CancelledError
            if stage.proxy.returncode is not None:
                raise ProxyError(f"kube-proxy exited with status {stage.proxy.returncode}:\n{stage.proxy.tail()}")
        self._report.act(
            "How long changes took",
            "From the API write to the first answer that shows the change, for a client outside that sends a request "
            "every 0.3 ms; for a deleted pod, to the last request that reached it. The time includes API server, "
            "watch, kube-proxy, kernel and network.",
        )
        self._report.times(self._ledger)

    async def _keep(self, stage: Stage) -> None:
        """Leave the cluster up until a signal arrives."""
        self._keeping = True
        await thousand.remove_more(stage)
        async with life(stage):
            for line in how_to_use(stage, await stage.cluster.page()).splitlines():
                self._report.literal(line)
            await self._stop.wait()
        self._report.fact("Taking it down.")


def _free_id() -> str:
    return DEFAULT_ID if owner_pid(run_folder(DEFAULT_ID)) is None else secrets.token_hex(3)


def _kubectl() -> str:
    """Return the path of kubectl: this machine's, or the one that `make setup` downloaded."""
    fetched = Path(sys.executable).with_name("kubectl")
    return "kubectl" if shutil.which("kubectl") or not fetched.exists() else str(fetched)


def how_to_use(stage: Stage, page: str) -> str:
    """Print commands to try on a cluster that stays up."""
    cluster = stage.cluster
    front = fronts.balancer_fronts(stage)[0]
    inside, node = "ip netns exec", cluster.namespace_of("node")
    port, kubectl = urlsplit(page).port, _kubectl()
    asked, socket = f"{inside} {node} {proxy_command()}", f"--control-socket {stage.proxy.control}"
    return f"""
The cluster stays up until Ctrl-C, with a few requests a second; Service {SHOP} gets and loses pods all the time,
{ORPHAN} has none. See it in a browser, and change something while you look:

  {page}

If this machine has no browser, forward the port to a machine with a browser, and open the same address there:

  ssh -N -L {port}:127.0.0.1:{port} {platform.node()}

Three commands worth trying, in another terminal:

  {asked} why {OUTSIDE_IP} {NAME}:{PORT} {socket}
  {asked} flows {SHOP} -f {socket}
  {asked} doctor {socket}

And kubectl, packets and rules:

  export KUBECONFIG={cluster.kubeconfig}
  {kubectl} get nodes,pods,svc,endpointslices -o wide
  {kubectl} scale rc {NAME} --replicas=5
  {kubectl} delete pod {stage.pods[0]}
  {kubectl} patch svc {NAME} -p '{{"spec":{{"sessionAffinity":"ClientIP"}}}}'

  {inside} {cluster.namespace_of("outside")} curl -s http://{front}
  {inside} {cluster.namespace_of("pod")} curl -s http://{fronts.CLUSTER_FRONTS[0]}
  {inside} {node} nft list table ip kube-proxy
  {inside} {node} curl -s http://127.0.0.1:{METRICS_PORT}/metrics
  tail -f {stage.proxy.log}
"""
