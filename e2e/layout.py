"""Names and addresses of the cluster: a hub with the control plane, and two nodes behind its bridge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/var/tmp/kpe2e")  # noqa: S108 - owned by root, with mode 0700; /tmp is often in memory
LOGS: Final = Path("/var/tmp/kpe2e-logs")  # noqa: S108
"""Logs and reports of the last run, which are kept."""

PREFIX: Final = "kpe2e-"
HUB: Final = f"{PREFIX}hub"
HUB_IPV4, HUB_IPV6 = "192.168.78.1", "fd78::1"
API: Final = f"https://{HUB_IPV4}:6443"
POD_CIDRS: Final = "10.244.0.0/16,fd00:10:244::/48"
SERVICE_CIDRS: Final = "10.96.0.0/16,fd00:10:96::/112"
CLUSTER_DNS: Final = "10.96.0.10"
DOMAIN: Final = "cluster.local"
LOAD_BALANCERS: Final = "203.0.113.0/24"
CLIENT: Final = "198.51.100.1"
"""The address of clients of load balancers: in no network of a node, as tests of preserved source addresses expect."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its number determines its names and addresses."""

    number: int

    @property
    def name(self) -> str:
        """The name of the Node object."""
        return f"n{self.number}"

    @property
    def namespace(self) -> str:
        """The network namespace; its cgroup has the same name."""
        return f"{PREFIX}{self.name}"

    @property
    def ipv4(self) -> str:
        """The node's address in the hub's IPv4 network."""
        return f"192.168.78.1{self.number}"

    @property
    def ipv6(self) -> str:
        """The node's address in the hub's IPv6 network."""
        return f"fd78::1{self.number}"

    @property
    def pods_ipv4(self) -> str:
        """The IPv4 network of the node's pods."""
        return f"10.244.{self.number}.0/24"

    @property
    def pods_ipv6(self) -> str:
        """The IPv6 network of the node's pods."""
        return f"fd00:10:244:{self.number}::/64"


NODES: Final = (Node(1), Node(2))
NAMESPACES: Final = (HUB, *(node.namespace for node in NODES))

TOKENS: Final = {
    "admin": ("system:admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", "system:masters"),
    "scheduler": ("system:kube-scheduler", "system:masters"),
    **{node.name: (f"system:node:{node.name}", "system:nodes") for node in NODES},
    "proxy": ("system:kube-proxy", "system:node-proxier"),
}
"""Clients of the API server: user and group of each."""
