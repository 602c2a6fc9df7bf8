"""A kube-proxy as a process: ours, or any other that accepts --config. Started in the namespace of the caller."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from bench import memory, objects
from bench.report import ROOT
from bench.worker import die_with_parent

OURS = f"{shlex.quote(str(ROOT / '.venv' / 'bin' / 'kube-proxy'))} --config {{config}}"
HEALTH_PORT = 10256


class Contestant:
    """One running proxy. `started` is the time of its start, in seconds of the monotonic clock."""

    def __init__(self, command: str, mode: str, server: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kube-proxy-bench-")
        folder = Path(self._folder.name)
        config = _write(folder, mode, server)
        self._log = folder / "log"
        argv = [word.replace("{config}", str(config)) for word in shlex.split(command)]
        with self._log.open("wb") as log:
            self.started = time.monotonic()
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with_parent)  # noqa: PLW1509 - the parent has no threads

    @property
    def pid(self) -> int:
        """Return the id of the proxy's process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def logged(self) -> str:
        """Return the proxy's log."""
        return self._log.read_text(errors="replace")

    def said(self) -> str:
        """Return the end of the proxy's log."""
        return self.logged()[-3000:]

    def answers(self, path: str) -> bool:
        """Return whether the proxy's health port answers a path with 200."""
        try:
            with socket.create_connection(("127.0.0.1", HEALTH_PORT), timeout=1) as link:
                link.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                return link.recv(64).split(b" ")[1:2] == [b"200"]
        except OSError:
            return False

    def wait(self, path: str, limit: float) -> float:
        """Return the seconds from the proxy's start until a path of its health port answers 200.

        Raises RuntimeError.
        """
        while time.monotonic() - self.started < limit:
            if self.answers(path):
                return time.monotonic() - self.started
            if not self.running:
                break
            time.sleep(0.002)
        raise RuntimeError(f"the proxy did not answer {path} with 200 within {limit:.0f} s:\n{self.said()}")

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process, and of its children that have ended."""
        return memory.cpu_seconds(self._process.pid)

    def memory(self) -> tuple[float, float]:
        """Return the present and the maximum resident memory, in MB."""
        return memory.resident(self._process.pid)

    def close(self) -> None:
        """Stop the process and remove its files."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _write(folder: Path, mode: str, server: str) -> Path:
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "users": [{"name": "bench", "user": {}}],
        "clusters": [{"name": "bench", "cluster": {"server": server}}],
    }
    (folder / "kubeconfig").write_bytes(msgspec.json.encode(kubeconfig))
    pace = {"minSyncPeriod": "1ms"}
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": objects.NODE,
        "clusterCIDR": objects.CLUSTER_CIDR,
        "healthzBindAddress": f"127.0.0.1:{HEALTH_PORT}",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {
            "kubeconfig": str(folder / "kubeconfig"),
            "contentType": "application/json",
            "qps": 0,
        },
        "conntrack": {"maxPerCore": 0},
        "iptables": pace,
        "nftables": pace,
        "ipvs": pace,
    }
    path = folder / "config.yaml"
    path.write_bytes(msgspec.json.encode(config))
    return path
