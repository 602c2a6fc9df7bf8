"""Creates the network namespaces and links of a Kubernetes node, its neighbour and a client outside.

                 outside (192.168.100.1, a bridge that is the LAN of all nodes)
                 /                                                        \\
    node-a 192.168.100.2, the node under test              node-b 192.168.100.3, the neighbour
    bridge cbr0 10.244.0.1/24, fd00:244::1/64              bridge cbr0 10.244.1.1/24, fd00:244:1::1/64
       |- client 10.244.0.2, fd00:244::2                      |- pods
       '- pods

Every pod has its own namespace. Addresses are the same in every cluster; names contain the cluster's id, so several
clusters can run at the same time. This module does not use the API.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lab.carrier import wait_for_links
from lab.iproute import LinkError, ip_batch, processes_in
from lab.netns import NamespaceError, names, run_in, run_in_new

PREFIX = "kd-"
OUTSIDE_IP, OUTSIDE_IP6 = "192.168.100.1", "fd00:100::1"
SECOND_OUTSIDE_IP = "192.168.100.50"
LB_RANGE, LB_RANGE6 = "203.0.113.0/24", "2001:db8:2::/64"
# The networks that the outside routes to node-a: cluster IPs, load balancer IPs, and ranges for externalIPs.
SERVICE_ROUTES = ("10.96.0.0/16", "198.51.100.0/24", LB_RANGE, "fd00:10:96::/112", "2001:db8:1::/64", LB_RANGE6)
# If both ends of a veth have the same index by chance, the kernel's link watch does not recognise them as a pair, and
# reports the carrier up to a second late (linkwatch_urgent_event): so links named eth0 get an index that no other link
# has.
ETH0_INDEX = 100_000
BRIDGE_MAC = "02:00:00:00:00:01"
CLIENT_HOST = 2
FIRST_POD_HOST = 10

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class NodeNet:
    """The addresses of one node."""

    name: str
    zone: str
    ip: str
    ip6: str
    second_ip: str
    pod_cidr: str
    pod_cidr6: str

    @property
    def addresses(self) -> tuple[str, str]:
        """The InternalIPs, IPv4 first."""
        return (self.ip, self.ip6)


NODE_A = NodeNet("node-a", "zone-a", "192.168.100.2", "fd00:100::2", "172.31.0.2", "10.244.0.0/24", "fd00:244::/64")
NODE_B = NodeNet("node-b", "zone-b", "192.168.100.3", "fd00:100::3", "172.31.0.3", "10.244.1.0/24", "fd00:244:1::/64")
NODES = (NODE_A, NODE_B)


@dataclass(frozen=True, slots=True)
class PodNet:
    """The namespace and addresses of one pod; a pod in its node's network has no link."""

    namespace: str
    link: str
    node: NodeNet
    ip: str
    ip6: str


def requirements() -> list[str]:
    """Return the requirements that this machine lacks for a cluster, one line each, with remedies. Changes nothing."""
    if os.geteuid() != 0:
        return ["root is needed to make network namespaces: run this as root (sudo)"]
    missing = [
        f"{tool} is not installed: apt-get install {package}"
        for tool, package in (("ip", "iproute2"), ("nft", "nftables"))
        if shutil.which(tool) is None
    ]
    return missing or _kernel_lacks()


def _kernel_lacks() -> list[str]:
    def tries(kind: str, argv: list[str], text: str) -> str:
        done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False)
        if done.returncode == 0:
            return ""
        said = done.stderr.strip().splitlines()
        hint = f"use a kernel with {kind}, or load its module (modprobe)"
        return f"the kernel refuses {kind} ({said[0] if said else 'no reason given'}): {hint}"

    def work() -> list[str]:
        ip = ["ip", "-batch", "-"]
        nft = ["nft", "-f", "-"]
        chain = "type nat hook output priority -100; ip daddr 192.0.2.1 dnat to 192.0.2.2"
        rule = f"table ip probe {{\nchain c {{\n{chain}\n}}\n}}\n"
        problems = [
            tries("veth links", ip, "link add v0 type veth peer name v1"),
            tries("bridges", ip, "link add b0 type bridge"),
        ]
        # The guest kernel of ipvs mode has only iptables; modes other than nftables work with it.
        if lacks_nat := tries("nftables NAT", nft, rule):
            problems.append(tries("NAT of iptables", ["iptables-legacy", "-t", "nat", "-S"], "") and lacks_nat)
        if not Path("/proc/net/if_inet6").exists():
            problems.append("the kernel has no IPv6: boot without ipv6.disable=1")
        return [p for p in problems if p]

    try:
        return run_in_new(work)
    except NamespaceError as e:
        return [f"network namespaces cannot be made ({e}): run as root outside an unprivileged container"]


def host(cidr: str, number: int) -> str:
    """Return the address at an offset in a network."""
    return str(ipaddress.ip_network(cidr)[number])


def _sysctls(values: dict[str, str]) -> None:
    for name, value in values.items():
        Path("/proc/sys/net", name.replace(".", "/")).write_text(value)


_COMMON_SYSCTLS = {"ipv6.conf.all.accept_dad": "0", "ipv6.conf.default.accept_dad": "0"}
_ROUTER_SYSCTLS = _COMMON_SYSCTLS | {
    "ipv4.ip_forward": "1",
    "ipv6.conf.all.forwarding": "1",
    "ipv4.conf.all.rp_filter": "0",
    "ipv4.conf.default.rp_filter": "0",
    # Rejects are ICMP messages; the kernel must not limit their rate, because a test counts each of them.
    "ipv4.icmp_ratelimit": "0",
    "ipv6.icmp.ratelimit": "0",
}


class Topology:
    """The namespaces of one cluster. Call up() first and down() at the end; both calls can be repeated."""

    def __init__(self, cluster_id: str) -> None:
        self.prefix = f"{PREFIX}{cluster_id}-"
        self.outside = f"{self.prefix}outside"
        self.client = f"{self.prefix}client"
        # Threads create and remove pods; down() waits for these threads.
        self._lock = threading.Lock()
        self._is_up = False
        self._numbers = itertools.count(1)
        self._hosts = {n.name: itertools.cycle(range(FIRST_POD_HOST, 255)) for n in NODES}
        self._used: dict[str, set[int]] = {n.name: set() for n in NODES}

    def node(self, node: NodeNet) -> str:
        """Return the namespace of a node."""
        return f"{self.prefix}{node.name}"

    # all namespaces of the cluster

    def up(self) -> None:
        """Create the namespaces and links, after removing leftovers of this id. Raises LinkError."""
        self.down()
        with self._lock:
            self._make()
            self._is_up = True

    def _make(self) -> None:
        routers = [self.outside, *(self.node(n) for n in NODES)]
        ip_batch(f"netns add {ns}" for ns in (*routers, self.client))
        # Set before any link exists: a router does not solicit neighbours from a link-local address under duplicate
        # address detection, and the setting applies only to later links.
        for namespace in routers:
            run_in(namespace, lambda: _sysctls(_ROUTER_SYSCTLS))
        run_in(self.client, lambda: _sysctls(_COMMON_SYSCTLS))
        ip_batch(
            [
                *(_veth_line(self.node(n), n.name, self.outside) for n in NODES),
                _veth_line(self.client, "client", self.node(NODE_A)),
            ]
        )
        ip_batch(self._outside_lines(), self.outside)
        for node in NODES:
            ip_batch(self._node_lines(node), self.node(node))
        client = PodNet(
            self.client, "client", NODE_A, host(NODE_A.pod_cidr, CLIENT_HOST), host(NODE_A.pod_cidr6, CLIENT_HOST)
        )
        ip_batch(_pod_lines(client), self.client)
        ip_batch(_port_lines([client]), self.node(NODE_A))
        wait_for_links(self.outside, [*(n.name for n in NODES), "lan"])
        for node in NODES:
            wait_for_links(self.node(node), ["eth0"])
        self._wait_for_pods([client])

    def add_node(self, node: NodeNet) -> None:
        """Create a further node on the LAN, without pods; for programs that run on a node. Raises LinkError."""
        namespace = self.node(node)
        with self._lock:
            ip_batch([f"netns add {namespace}"])
            run_in(namespace, lambda: _sysctls(_ROUTER_SYSCTLS))
            ip_batch([_veth_line(namespace, node.name, self.outside)])
            ip_batch([f"link set {node.name} master lan", f"link set {node.name} up"], self.outside)
            ip_batch(self._node_lines(node), namespace)
            wait_for_links(self.outside, [node.name])
            wait_for_links(namespace, ["eth0"])

    def exists(self) -> bool:
        """Return whether any namespace of this id exists."""
        return bool(names(self.prefix))

    def down(self) -> None:
        """Remove every namespace of this id, and end the processes in them."""
        with self._lock:
            self._is_up = False
            found = names(self.prefix)
            for namespace in found:
                for pid in processes_in(namespace):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            ip_batch(f"netns del {ns}" for ns in found)

    def _outside_lines(self) -> list[str]:
        lines = ["link set lo up", *_bridge_lines("lan")]
        lines += [f"addr add {a}/24 dev lan" for a in (OUTSIDE_IP, SECOND_OUTSIDE_IP)]
        lines += [f"addr add {OUTSIDE_IP6}/64 dev lan nodad"]
        for node in NODES:
            lines += [f"link set {node.name} master lan", f"link set {node.name} up"]
        for node in NODES:
            lines += [f"route add {node.pod_cidr} via {node.ip}", f"route add {node.pod_cidr6} via {node.ip6}"]
            lines.append(f"route add {node.second_ip}/32 via {node.ip}")
        return lines + [f"route add {r} via {_hop(r, NODE_A)}" for r in SERVICE_ROUTES]

    @staticmethod
    def _node_lines(node: NodeNet) -> list[str]:
        lines = ["link set lo up", "link set eth0 up", *_bridge_lines("cbr0")]
        lines += [f"addr add {node.ip}/24 dev eth0", f"addr add {node.ip6}/64 dev eth0 nodad"]
        lines.append(f"addr add {node.second_ip}/32 dev eth0")
        lines += [
            f"addr add {host(node.pod_cidr, 1)}/24 dev cbr0",
            f"addr add {host(node.pod_cidr6, 1)}/64 dev cbr0 nodad",
        ]
        for other in NODES:
            if other is not node:
                lines += [f"route add {other.pod_cidr} via {other.ip}", f"route add {other.pod_cidr6} via {other.ip6}"]
        if node is not NODE_A:
            # The neighbour has no proxy: its pods reach Services through node-a.
            lines += [f"route add {r} via {_hop(r, NODE_A)}" for r in SERVICE_ROUTES]
        return [*lines, f"route add default via {OUTSIDE_IP}", f"route add ::/0 via {OUTSIDE_IP6}"]

    # pods

    def host_pod(self, node: NodeNet) -> PodNet:
        """Return the network of a pod in its node's network: nothing is reserved, created or removed."""
        return PodNet(self.node(node), "", node, *node.addresses)

    def plan_pod(self, node: NodeNet) -> PodNet:
        """Reserve a namespace name and addresses. Raises LinkError if the node has no free address."""
        used = self._used[node.name]
        for _ in range(FIRST_POD_HOST, 255):
            number = next(self._hosts[node.name])
            if number not in used:
                used.add(number)
                serial = next(self._numbers)
                addresses = host(node.pod_cidr, number), host(node.pod_cidr6, number)
                return PodNet(f"{self.prefix}pod{serial}", f"pod{serial}", node, *addresses)
        raise LinkError(f"{node.name} has no pod address left in {node.pod_cidr}: delete some pods")

    def add_pods(self, pods: list[PodNet]) -> None:
        """Create the namespaces and links of planned pods, and wait until they carry packets.

        Takes about 10 ms for one pod, 4 ms for each of many. Raises LinkError.
        """
        pods = [p for p in pods if p.link]
        with self._lock:
            if not self._is_up:
                raise LinkError("the cluster is going down: no more pods")
            root = [f"netns add {p.namespace}" for p in pods]
            root += [_veth_line(p.namespace, p.link, self.node(p.node)) for p in pods]
            ip_batch(root)
            for pod in pods:
                ip_batch(_pod_lines(pod), pod.namespace)
            for node in NODES:
                ip_batch(_port_lines([p for p in pods if p.node is node]), self.node(node))
            self._wait_for_pods(pods)

    def _wait_for_pods(self, pods: list[PodNet]) -> None:
        for node in {p.node for p in pods}:
            wait_for_links(self.node(node), [*(p.link for p in pods if p.node is node), "cbr0"])
        for pod in pods:
            wait_for_links(pod.namespace, ["eth0"])

    def remove_pods(self, pods: list[PodNet]) -> None:
        """Remove the namespaces of pods, and thereby their links."""
        pods = [p for p in pods if p.link]
        with self._lock:
            existing = set(names(self.prefix))
            ip_batch(f"netns del {p.namespace}" for p in pods if p.namespace in existing)
        for pod in pods:
            number = int(ipaddress.ip_address(pod.ip)) & 0xFF
            self._used[pod.node.name].discard(number)


def _veth_line(namespace: str, peer: str, peer_namespace: str) -> str:
    """Return the command for a veth pair: eth0 in one namespace, a named end in another."""
    return f"link add eth0 index {ETH0_INDEX} netns {namespace} type veth peer name {peer} netns {peer_namespace}"


def _bridge_lines(name: str) -> list[str]:
    """Return the commands for a bridge that is up. It has a fixed MAC: otherwise its MAC changes with its ports, and
    neighbours have an old one.
    """
    return [f"link add {name} address {BRIDGE_MAC} type bridge mcast_snooping 0", f"link set {name} up"]


def _hop(route: str, node: NodeNet) -> str:
    return node.ip6 if ":" in route else node.ip


def _pod_lines(pod: PodNet) -> list[str]:
    return [
        "link set lo up",
        f"addr add {pod.ip}/24 dev eth0",
        f"addr add {pod.ip6}/64 dev eth0 nodad",
        "link set eth0 up",
        f"route add default via {host(pod.node.pod_cidr, 1)}",
        f"route add ::/0 via {host(pod.node.pod_cidr6, 1)}",
    ]


def _port_lines(pods: Iterable[PodNet]) -> list[str]:
    """Return the commands for bridge ports on the node's side; with hairpin mode a pod can reach itself through its
    Service.
    """
    return [
        line
        for p in pods
        for line in (
            f"link set {p.link} master cbr0",
            f"link set {p.link} type bridge_slave hairpin on",
            f"link set {p.link} up",
        )
    ]
