"""The setup for measuring the flowtable, inside a kernel with flowtables: a node between a client and a pod, and
connections.

The caller's network namespace is the node; client and pod have separate namespaces, named by `ip netns`. Both sockets
of a connection belong to this process, so the figures include sockets and forwarding, but no scheduling.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.forwarding import Devices
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.features import FAST_FORWARDING, Forwarding
from kubeproxy.kernel.route import ethernet_interfaces, interface_changes
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import (
    EndpointPort,
    EndpointSlice,
    Labels,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
)
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Planner
from lab.netns import open_socket_in

TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
SERVICE = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:96::1"}
POD = {Family.IPV4: "10.1.0.2", Family.IPV6: "fd00:1::2"}
PORT, POD_PORT = 80, 8080
_RUN = 25
_KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM}


def set_up() -> None:
    """Create the namespaces, and connect them."""
    lines = []
    for number, name in enumerate(("client", "pod")):
        lines += [f"ip netns add {name}", f"ip link add {name} type veth peer name eth0 netns {name}"]
        lines += [
            f"ip address add 10.{number}.0.1/24 dev {name}",
            f"ip -6 address add fd00:{number}::1/64 dev {name} nodad",
        ]
        lines += [f"ip link set {name} up", f"ip -n {name} link set eth0 up", f"ip -n {name} link set lo up"]
        lines += [f"ip -n {name} address add 10.{number}.0.2/24 dev eth0"]
        lines += [f"ip -n {name} -6 address add fd00:{number}::2/64 dev eth0 nodad"]
        lines += [f"ip -n {name} route add default via 10.{number}.0.1"]
        lines += [f"ip -n {name} -6 route add default via fd00:{number}::1"]
    lines += ["sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"]
    for line in lines:
        subprocess.run(line.split(), check=True)


def _lists() -> list[Replaced]:
    services, slices = [], []
    for family, address in SERVICE.items():
        name = family.label.lower()
        ports = [ServicePort(PORT, "tcp", "TCP"), ServicePort(PORT, "udp", "UDP")]
        meta = ObjectMeta(name=name, namespace="default", labels=Labels(service_name=name))
        spec = ServiceSpec(cluster_ip=address, cluster_ips=[address], ports=ports)
        services.append(Service(meta, spec))
        ends = [EndpointPort(POD_PORT, "tcp", "TCP"), EndpointPort(POD_PORT, "udp", "UDP")]
        slices.append(EndpointSlice(meta, family.label, [SliceEndpoint([POD[family]])], ends))
    return [Replaced("services", services), Replaced("endpointslices", slices)]


@contextmanager
def programmed(forwarding: Forwarding) -> Iterator[list[NftablesBackend]]:
    """Program both Services, and remove the tables at the end."""
    world = FAST_FORWARDING.on(Globals("node"), forwarding)
    planner = Planner(world)
    planner.apply(_lists())
    changes = planner.take()
    backends = []
    for family in world.families:
        devices = Devices(family, interface_changes(), ethernet_interfaces) if forwarding.protocols else None
        backend = NftablesBackend(KernelTable.open(family), world, None, devices)
        plans = {each.name: tuple(p for p in each.after.plans if p.key.family is family) for each in changes}
        for _ in backend.resync({name: found for name, found in plans.items() if found}):
            pass
        backend.upkeep()
        backends.append(backend)
    try:
        yield backends
    finally:
        for backend in backends:
            backend.close()
        subprocess.run(["nft", "flush", "ruleset"], check=True)


class Connection:
    """The sockets of a client and of the pod, connected through the Service."""

    def __init__(self, family: Family, protocol: int) -> None:
        kind = _KINDS[protocol]
        listening = open_socket_in("pod", lambda: socket.socket(family, kind))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((POD[family], POD_PORT))
        self.client = open_socket_in("client", lambda: socket.socket(family, kind))
        self.client.settimeout(10)
        if protocol == TCP:
            listening.listen()
            self.client.connect((SERVICE[family], PORT))
            self.pod, _ = listening.accept()
            listening.close()
            for end in (self.client, self.pod):
                end.setsockopt(TCP, socket.TCP_NODELAY, 1)
        else:
            self.client.connect((SERVICE[family], PORT))
            self.client.send(b"?")
            _, peer = listening.recvfrom(1)
            listening.connect(peer)
            self.pod = listening
        self.pod.settimeout(10)

    def ask(self, count: int) -> None:
        """Send a byte in both directions `count` times."""
        there, here = self.client, self.pod
        for _ in range(count):
            there.send(b"?")
            here.recv(1)
            here.send(b"!")
            there.recv(1)

    def close(self) -> None:
        self.client.close()
        self.pod.close()


class Cost(NamedTuple):
    """Return packets per second, and the microseconds of CPU time for each packet."""

    rate: float
    cpu: float


def cost(connection: Connection, count: int) -> Cost:
    """Return the time of a request and its answer, which are two packets: the best of many short runs.

    Other work of the machine makes a run slower, never faster, and often does not affect a short run.
    """
    connection.ask(200)
    found = []
    for _ in range(count // _RUN):
        began = time.perf_counter()
        connection.ask(_RUN)
        found.append(time.perf_counter() - began)
    # One process does everything and never waits, so elapsed time is CPU time; the clock of CPU time is too coarse.
    seconds = min(found)
    return Cost(2 * _RUN / seconds, seconds / (2 * _RUN) * 1e6)


def offloaded() -> list[str]:
    """Return the connections with fast forwarding, as listed by connection tracking."""
    with open("/proc/net/nf_conntrack", encoding="ascii") as file:
        return [line for line in file if "OFFLOAD" in line]


def measure(count: int, turns: int) -> Iterator[dict[str, object]]:
    """Yield figures of each protocol and family, with and without fast forwarding, in turns."""
    for family in Family:
        for protocol, name in ((TCP, "TCP"), (UDP, "UDP")):
            for turn in range(turns):
                for label, forwarding in (("rules", Forwarding()), ("fast", Forwarding(20, (TCP, UDP)))):
                    with programmed(forwarding):
                        connection = Connection(family, protocol)
                        found = cost(connection, count)
                        went = bool(offloaded())
                        connection.close()
                    yield {
                        "case": f"{name} {family.label}",
                        "kind": label,
                        "turn": turn,
                        "rate": found.rate,
                        "cpu": found.cpu,
                        "offloaded": went,
                    }


def main(say: Callable[[str], object] = print) -> None:
    """Measure, and print a line of JSON for each figure."""
    set_up()
    for figure in measure(int(sys.argv[1]), int(sys.argv[2])):
        say(json.dumps(figure))


if __name__ == "__main__":
    main()
