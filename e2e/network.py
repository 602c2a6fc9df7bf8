"""The cluster's network: a bridge in the hub's namespace, a namespace for each node, routes of the pods' networks."""

from __future__ import annotations

import subprocess

from e2e.layout import CLIENT, HUB, HUB_IPV4, HUB_IPV6, LOAD_BALANCERS, NAMESPACES, NODES
from lab.iproute import ip_batch
from lab.netns import names

_FORWARDING = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")


def network_up() -> None:
    """Make namespaces, links, addresses and routes. Raises LinkError."""
    ip_batch(f"netns add {name}" for name in NAMESPACES)
    hub = ["link set lo up", "link add br0 type bridge", f"addr add {HUB_IPV4}/24 dev br0"]
    hub += [f"addr add {HUB_IPV6}/64 dev br0 nodad", "link set br0 up", f"addr add {CLIENT}/32 dev lo"]
    # A removed load balancer does not answer. Without this route `connect` fails, which a test of UDP does not expect.
    hub += ["link add gone type bridge", "link set gone arp off up"]
    hub += [f"route add {LOAD_BALANCERS} dev gone src {CLIENT}"]
    for node in NODES:
        hub += [f"link add {node.name} type veth peer name eth0 netns {node.namespace}"]
        hub += [f"link set {node.name} master br0 up"]
    ip_batch(hub, HUB)
    for node in NODES:
        lines = ["link set lo up", f"addr add {node.ipv4}/24 dev eth0", f"addr add {node.ipv6}/64 dev eth0 nodad"]
        lines += ["link set eth0 up", f"route add default via {HUB_IPV4}", f"route add ::/0 via {HUB_IPV6}"]
        lines += _pod_routes(but=node.number)
        ip_batch(lines, node.namespace)
    ip_batch(_pod_routes(), HUB)
    for name in NAMESPACES:
        subprocess.run([*inside(name), "sysctl", "-qw", *_FORWARDING], check=True)


def _pod_routes(but: int = 0) -> list[str]:
    routes = []
    for node in NODES:
        if node.number != but:
            routes += [f"route add {node.pods_ipv4} via {node.ipv4}", f"route add {node.pods_ipv6} via {node.ipv6}"]
    return routes


def network_down() -> None:
    """Remove the existing namespaces, and thereby their links."""
    there = set(names("kpe2e-"))
    ip_batch(f"netns del {name}" for name in NAMESPACES if name in there)


def inside(namespace: str, hostname: str = "") -> list[str]:
    """Return the beginning of a command that runs in a namespace.

    With a host name it has a separate UTS namespace. `ip netns exec` would hide /sys, which the kubelet reads.
    """
    head = ["nsenter", f"--net=/run/netns/{namespace}"]
    if not hostname:
        return head
    return [*head, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hostname]
