"""A kube-proxy process in a node's namespace: start with a configuration, wait until ready, stop or kill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from kubeproxy.errors import KubeProxyError
from lab.netns import run_in_async
from lab.probes import http_get

HEALTH_PORT, METRICS_PORT = 10256, 10249
_LAST_SYNC = re.compile(rb"^kubeproxy_sync_proxy_rules_last_timestamp_seconds(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)

_serials = itertools.count(1)


class ProxyError(KubeProxyError):
    """The proxy ended, or did not become ready; the message contains the end of its log."""


def proxy_command() -> str:
    """Return the path of this installation's kube-proxy."""
    return str(Path(sys.executable).with_name("kube-proxy"))


def last_syncs(metrics: bytes) -> list[float]:
    """Return the time of each family's last sync from the text of /metrics, in seconds since the epoch; 0 before the
    first sync.
    """
    return [float(value) for value in _LAST_SYNC.findall(metrics)]


def configuration(kubeconfig: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a KubeProxyConfiguration for node-a; `overrides` replace its fields (in clientConnection one by one)."""
    config: dict[str, Any] = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": "node-a",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": "10.244.0.0/16,fd00:244::/32",
        "healthzBindAddress": f"0.0.0.0:{HEALTH_PORT}",
        "metricsBindAddress": f"127.0.0.1:{METRICS_PORT}",
        # Namespaces share the machine's conntrack limits, which a cluster of the lab must not change.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "oomScoreAdj": 0,
    }
    connection = config["clientConnection"] | (overrides or {}).get("clientConnection", {})
    return config | (overrides or {}) | {"clientConnection": connection}


class Process(Protocol):
    """The required methods of a process, as in asyncio."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """The exit status: None while the process runs, negative after a signal."""

    async def wait(self) -> int:
        """Wait until the process ends; return its exit status."""

    def send_signal(self, signal: int) -> None:
        """Send the process a signal. Raises ProcessLookupError."""


Spawn = Callable[[str, Sequence[str], Path], Awaitable[Process]]
"""A function that starts a command line inside a namespace, with its output in a file."""


async def spawn(namespace: str, argv: Sequence[str], log: Path) -> Process:
    """Call as described in Spawn."""
    with log.open("wb") as output:
        # ip execs the command, so the process is the proxy itself. Ctrl-C reaches only the cluster.
        return await asyncio.create_subprocess_exec(
            *["ip", "netns", "exec", namespace, *argv],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class Proxy:
    """One process of kube-proxy. Its output is written to `log`; start() creates instances."""

    def __init__(self, process: Process, namespace: str, log: Path, config: Path) -> None:
        self._process = process
        self.namespace = namespace
        self.log = log
        self.config = config
        self.control = Path("/run/kube-proxy/control.sock")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, None while the process runs."""
        return self._process.returncode

    async def wait_ready(self, timeout: float = 30.0) -> float:
        """Wait until the proxy is healthy and has synced; return the duration in seconds. Raises ProxyError."""
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            if self._process.returncode is not None:
                raise ProxyError(f"kube-proxy exited with status {self._process.returncode}:\n{self.tail()}")
            if await self._is_ready():
                return time.monotonic() - start
        raise ProxyError(f"kube-proxy was not ready after {timeout:g} s:\n{self.tail()}")

    async def _is_ready(self) -> bool:
        """Ask for up to 0.2 seconds: entering the namespace takes more CPU time than a refused request."""

        def ask() -> bool:
            try:
                if http_get("127.0.0.1", HEALTH_PORT, "/healthz")[0] != 200:
                    return False
                status, body = http_get("127.0.0.1", METRICS_PORT, "/metrics", 5.0)
            except OSError:
                return False
            synced = last_syncs(body)
            return status == 200 and bool(synced) and all(v > 0 for v in synced)

        def ask_often() -> bool:
            until = time.monotonic() + 0.2
            while not (ready := ask()) and time.monotonic() < until:
                time.sleep(0.01)
            return ready

        return await run_in_async(self.namespace, ask_often)

    async def metrics(self) -> str:
        """Return the text of /metrics. Raises OSError."""
        _, body = await run_in_async(self.namespace, lambda: http_get("127.0.0.1", METRICS_PORT, "/metrics", 5.0))
        return body.decode()

    def tail(self, lines: int = 20) -> str:
        """Return the end of the process's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def wait(self) -> int:
        """Wait until the process ends without a signal; return its exit status."""
        return await self._process.wait()

    async def stop(self, timeout: float = 5.0) -> int:
        """End the process in order, by force after `timeout` seconds; return its exit status."""
        self._signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), timeout)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill the process with SIGKILL."""
        self._signal(signal.SIGKILL)
        return await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


async def start(
    namespace: str,
    folder: Path,
    config: dict[str, Any],
    command: Sequence[str],
    args: Sequence[str] = (),
    spawned: Spawn = spawn,
) -> Proxy:
    """Start `command` --config FILE `args` inside a namespace. The files go to `folder`."""
    serial = next(_serials)
    config_file = folder / f"proxy-{serial}.yaml"
    config_file.write_text(yaml.safe_dump(config))
    control = folder / f"proxy-{serial}.sock"  # All nodes share the machine's /run.
    given = ["--config", str(config_file), "--control-socket", str(control), *args]
    proxy = await launch(namespace, folder, [*command, *given], config_file, spawned)
    proxy.control = control
    return proxy


async def launch(namespace: str, folder: Path, argv: Sequence[str], config_file: Path, spawned: Spawn = spawn) -> Proxy:
    """Start a complete command line, which names `config_file`, inside a namespace. The log is written to `folder`."""
    log = folder / f"proxy-{next(_serials)}.log"
    return Proxy(await spawned(namespace, argv, log), namespace, log, config_file)
