"""Clients of a Service without endpoints are refused; with IPv4 at once, for any number of clients."""

import errno
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from kubeproxy.model.objects import ServicePort
from support.cluster_objects import world
from support.namespaces import inside, namespace, run
from support.nftables_ground import resync
from support.nftables_plans import V4, V6, plans_of

NODE = {V4: "192.0.2.1", V6: "2001:db8::1"}
CLIENT = {V4: "192.0.2.9", V6: "2001:db8::9"}
ELSEWHERE = {V4: "198.51.100.", V6: "2001:db8:1::"}
SERVICE = {V4: "10.96.0.1", V6: "fd00:96::1"}
PORTS = [ServicePort(port=80, name="tcp", node_port=30080), ServicePort(port=53, name="udp", protocol="UDP")]
CLIENTS = 30  # more than the number of ICMP errors that the kernel sends in one burst
TIMEOUT = 60.0


@pytest.fixture
def client(ground):
    """The name of a client's namespace, whose packets to Services pass this namespace, the node's."""
    with namespace() as name:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "name", "up0", "type", "veth", "peer", "name", "up0", "netns", name)
        run("ip", "link", "add", "name", "away", "type", "veth", "peer", "name", "nobody")
        for device in ("up0", "away", "nobody"):
            run("ip", "link", "set", "dev", device, "up")
        run("ip", "-n", name, "link", "set", "dev", "up0", "up")
        for family in (V4, V6):
            bits, nodad = ("24", ()) if family is V4 else ("64", ("nodad",))
            run("ip", "address", "add", f"{NODE[family]}/{bits}", "dev", "up0", *nodad)
            run("ip", "address", "add", f"{ELSEWHERE[family]}2/{bits}", "dev", "away", *nodad)
            run("ip", "route", "add", "default", "via", f"{ELSEWHERE[family]}1")
            run("ip", "-n", name, "address", "add", f"{CLIENT[family]}/{bits}", "dev", "up0", *nodad)
            run("ip", "-n", name, "route", "add", "default", "via", NODE[family])
        for key in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", key).write_text("1")
        yield name


def outcome(address, port, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as sock:
        sock.settimeout(TIMEOUT)
        try:
            sock.connect((address, port))
            with suppress(PermissionError):  # The packet was rejected on its way out; recv returns the reason.
                sock.send(b"?")
            return sock.recv(10)
        except OSError as error:
            return errno.errorcode.get(error.errno, str(error))


def repeated():
    """Return the number of SYNs that this network had to repeat."""
    names, values = [line.split() for line in Path("/proc/thread-self/net/netstat").read_text().splitlines()[:2]]
    return int(values[names.index("TCPSynRetrans")])


def refusals(address, port):
    """Return the number of refused clients, and the number of SYNs beyond one each."""
    before = repeated()
    found = [outcome(address, port) for _ in range(CLIENTS)]
    return found.count("ECONNREFUSED"), repeated() - before


def without_endpoints(ground, family):
    """A Service without endpoints; the destinations of its TCP clients, and of its UDP clients."""
    globals_ = world(families=[family])
    resync(ground.start(globals_), {("default", "a"): plans_of("a", 1, 0, globals_, PORTS)})
    return ((SERVICE[family], 80), (SERVICE[family], 81), (NODE[family], 30080)), (SERVICE[family], 53)


def test_every_client_is_refused_with_its_first_packet(ground, client):
    places, _ = without_endpoints(ground, V4)
    for where in places:
        assert inside(client, lambda where=where: refusals(*where)) == (CLIENTS, 0)
        assert refusals(*where) == (CLIENTS, 0)


@pytest.mark.parametrize("family", [V4, V6])
def test_clients_are_refused(ground, client, family):
    places, datagrams = without_endpoints(ground, family)
    for where, kind in (*((place, socket.SOCK_STREAM) for place in places), (datagrams, socket.SOCK_DGRAM)):
        assert inside(client, lambda where=where, kind=kind: outcome(*where, kind)) == "ECONNREFUSED"
        assert outcome(*where, kind) == "ECONNREFUSED"
