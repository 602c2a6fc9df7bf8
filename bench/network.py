"""A node between its pods and a client: three network namespaces, joined by veth pairs, which end with their processes.

The caller's namespace is the node. Every endpoint address exists in the namespace of the pods; the client's address is
also in the pod network, so that the proxy treats the client as a pod.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from bench import objects
from bench.companion import Companion

CLIENT = "10.250.0.2"
PODS = ("10.128.0.0/12", "10.240.0.0/16")
"""The networks of objects.endpoints_of and objects.spare."""

_PODS_NODE, _PODS_LINK = "10.9.1.1", "10.9.1.2"
_CLIENT_NODE = "10.250.0.1"


class Network:
    """The namespaces of pods and client, each with a process that serves or probes: see pods.py and client.py."""

    def __init__(self) -> None:
        self.pods = Companion("bench.pods")
        self.client = Companion("bench.client")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self._link("pods", self.pods, f"{_PODS_NODE}/24")
        self._link("client", self.client, f"{_CLIENT_NODE}/24")
        _ip(f"address add {objects.NODE_IP}/32 dev lo", *(f"route add {net} via {_PODS_LINK}" for net in PODS))
        local = [f"route add local {net} dev lo" for net in PODS]
        self._settle(self.pods, f"{_PODS_LINK}/24", _PODS_NODE, local)
        self._settle(self.client, f"{CLIENT}/24", _CLIENT_NODE, [])

    def close(self) -> None:
        """End the processes, and thereby their namespaces."""
        self.client.close()
        self.pods.close()

    def _link(self, name: str, process: Companion, address: str) -> None:
        _ip(
            f"link add {name} type veth peer name eth0 netns {process.pid}",
            f"address add {address} dev {name}",
            f"link set {name} up",
        )

    def _settle(self, process: Companion, address: str, gateway: str, more: list[str]) -> None:
        lines = [f"address add {address} dev eth0", "link set eth0 up", f"route add default via {gateway}", *more]
        process.ask("configure", lines=lines)


def configure(command: dict[str, Any]) -> None:
    """Execute the command `configure`, inside the process of a namespace."""
    _ip(*command["lines"])


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
