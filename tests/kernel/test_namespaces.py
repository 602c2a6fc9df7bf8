"""Sockets in a network namespace that is found by its address; a child process without capabilities opens them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from support.namespaces import inside, namespace, run

# Runs in a separate process: enters the namespace with an address, and connects from there.
_PROGRAM = """
import json, os, socket, sys
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.proc.capability import keep_only
from kubeproxy.kernel.proc.namespaces import SocketsElsewhere

address, place, bounds = sys.argv[1:]
if bounds == "none":
    keep_only(frozenset())
try:
    with SocketsElsewhere.enter(socket.inet_aton(address)) as entered:
        made = entered.open(socket.SOCK_STREAM)
        status = open(f"/proc/{entered._child}/status").read()
        namespace = os.stat(f"/proc/{entered._child}/ns/net").st_ino
    made.connect((place, 80))
    sets = {line.split()[0]: line.split()[1] for line in status.splitlines() if line.startswith(("Cap", "NoNew"))}
    print(json.dumps([namespace, sets, made.getsockname()[0], os.listdir("/proc/self/task")[1:]]))
except KubeProxyError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""

# Runs in a separate process, too: its child process prints the namespace of its main thread in each step of the search.
_SEARCH = """
import os, socket, sys
from kubeproxy.kernel.proc import namespaces

has = namespaces._has

def shown(address):
    print(os.stat(f"/proc/{os.getpid()}/ns/net").st_ino, flush=True)
    return has(address)

namespaces._has = shown
namespaces.SocketsElsewhere.enter(socket.inet_aton(sys.argv[1])).close()
"""


def entered(node: str, address: str, bounds: str = "all", place: str = "10.99.0.1") -> list:
    command = ["ip", "netns", "exec", node, sys.executable, "-c", _PROGRAM, address, place, bounds]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def link(node: str, name: str, pod: str, address: str) -> None:
    """Connect a pod with a node, and give it an address."""
    run("ip", "link", "add", name, "netns", node, "type", "veth", "peer", "eth0", "netns", pod)
    run("ip", "-n", pod, "address", "add", f"{address}/24", "dev", "eth0")
    run("ip", "-n", pod, "link", "set", "eth0", "up")
    run("ip", "-n", node, "link", "set", name, "up")


def test_a_socket_in_the_namespace_of_an_address():
    with namespace() as node, namespace() as pod, namespace() as other_node, namespace() as other_pod:
        link(node, "to-pod", pod, "10.99.0.9")
        run("ip", "-n", node, "address", "add", "10.99.0.1/24", "dev", "to-pod")
        link(other_node, "to-pod", other_pod, "10.99.0.9")  # of another cluster on this machine
        with inside(node, lambda: socket.create_server(("10.99.0.1", 80))):
            found, sets, source, threads = entered(node, "10.99.0.9")
            assert (source, threads) == ("10.99.0.9", [])
            assert sets.pop("NoNewPrivs:") == "1"
            assert {int(one, 16) for one in sets.values()} == {0}
            assert found == (Path("/run/netns", pod)).stat().st_ino
            assert entered(node, "10.99.0.1")[2] == "10.99.0.1"  # its own
        run("ip", "-n", pod, "address", "add", "10.99.0.8/24", "dev", "eth0")
        with namespace() as second:
            link(node, "to-second", second, "10.99.0.8")
            assert entered(node, "10.99.0.8") == ["NoAnswerError", "2 network namespaces have this address"]


def test_the_end_of_the_processes_of_another_namespace_does_not_end_the_search():
    with namespace() as node, namespace() as pod, namespace():
        link(node, "to-pod", pod, "10.99.0.9")
        command = ["ip", "netns", "exec", node, sys.executable, "-c", _SEARCH, "10.99.0.9"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert len(found) >= 4
        assert set(found) == {str(Path("/run/netns", node).stat().st_ino)}


def test_errors():
    with namespace() as node, namespace() as pod:
        link(node, "to-pod", pod, "10.99.0.9")
        kind, text = entered(node, "10.99.0.7")
        assert kind == "NoAnswerError"
        assert text.endswith("other network namespaces that are visible here has this address")
        kind, text = entered(node, "10.99.0.9", "none")
        assert kind == "Unsupported"
        assert text.startswith("it needs CAP_SYS_ADMIN and the node's folder /run/netns: ")
