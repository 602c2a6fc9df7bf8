"""The Services of the clients, their servers in pods, and the clients in a pod, on a node and outside.

The pods of `kept` remain; those of `rolled` are replaced by a rolling update. Each server is upstream's `agnhost
netexec`. After SIGTERM it is not ready, but answers for another DRAIN seconds.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from e2e.controlplane import kubectl
from e2e.errors import E2EError
from e2e.layout import FOLDER, HUB, NODES
from prove.asking import KINDS, Client
from support.live import Front

KEPT, ROLLED = "kept", "rolled"
DRAIN: Final = 10
REPLICAS: Final = 4

_CLIENT, _PORT = "client", 3000
_REQUEST: Final = b"GET /hostname HTTP/1.1\r\nHost: netexec\r\n\r\n"
Json = dict[str, Any]


class Offer(NamedTuple):
    """A Service: the Deployment of its endpoints, the clients' places, further fields of its spec, annotations."""

    deployment: str
    places: tuple[str, ...]
    spec: Json
    annotations: Mapping[str, str] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of traffic to the Service: a connection to a pod that a rolling update deletes has to end."""
        return tuple(kind for kind in KINDS if self.deployment == KEPT or kind != "long TCP")


OFFERS: Final[Mapping[str, Offer]] = {
    "plain": Offer(KEPT, ("pod", "node", "outside"), {}),
    "sticky": Offer(KEPT, ("pod", "node", "outside"), {"sessionAffinity": "ClientIP"}),
    "weighted": Offer(KEPT, ("pod",), {}, {"kube-proxy-py/weights": f"{NODES[1].name}=50"}),
    "hashed": Offer(KEPT, ("pod",), {}, {"kube-proxy-py/algorithm": "maglev-251"}),
    "rolled": Offer(ROLLED, ("pod", "node"), {}, {"kube-proxy-py/slow-start": "5"}),
}


def objects(image: str, pause: str) -> Json:
    """Return the Services of OFFERS for both families, the Deployments behind them, and a client's pod on a node."""
    ports = [{"name": each, "port": 80, "targetPort": _PORT, "protocol": each.upper()} for each in ("tcp", "udp")]
    items: list[Json] = []
    for name, offer in OFFERS.items():
        spec = {"type": "NodePort", "ipFamilyPolicy": "RequireDualStack", "ports": ports, **offer.spec}
        meta = {"name": name, "annotations": dict(offer.annotations)}
        spec["selector"] = {"app": offer.deployment}
        items.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
    for name in (KEPT, ROLLED):
        template = {"metadata": {"labels": {"app": name}}, "spec": _server(image)}
        spec = {"replicas": REPLICAS, "selector": {"matchLabels": {"app": name}}, "template": template}
        items.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec})
    containers = [{"name": "c", "image": pause, "imagePullPolicy": "Never"}]
    pod = {"nodeName": NODES[0].name, "terminationGracePeriodSeconds": 0, "containers": containers}
    items.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _CLIENT}, "spec": pod})
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _server(image: str) -> Json:
    arguments = ["netexec", f"--http-port={_PORT}", f"--udp-port={_PORT}", f"--delay-shutdown={DRAIN}"]
    probe = {"httpGet": {"path": "/readyz", "port": _PORT}, "periodSeconds": 1, "failureThreshold": 1}
    container = {"name": "c", "image": image, "imagePullPolicy": "Never", "args": arguments, "readinessProbe": probe}
    return {"terminationGracePeriodSeconds": 2 * DRAIN, "containers": [container]}


def make(programs: Path, image: str, pause: str) -> list[Client]:
    """Create the objects, wait until all pods are ready, and return the clients. Raises E2EError."""
    given = json.dumps(objects(image, pause))
    kubectl(programs, FOLDER, "apply", "--validate=false", "-f", "-", given=given)
    for name in (KEPT, ROLLED):
        kubectl(programs, FOLDER, "rollout", "status", f"deployment/{name}", "--timeout=120s")
    kubectl(programs, FOLDER, "wait", f"pod/{_CLIENT}", "--for=condition=Ready", "--timeout=120s")
    pod = json.loads(kubectl(programs, FOLDER, "get", "pod", _CLIENT, "-o", "json"))
    services = json.loads(kubectl(programs, FOLDER, "get", "services", "-o", "json"))["items"]
    return list(clients({each["metadata"]["name"]: each for each in services}, _namespace(pod["status"]["podIP"])))


def clients(services: Mapping[str, Json], pod: str) -> Iterator[Client]:
    """Yield a client of each kind, place and family of every Service; `pod` is a pod's network namespace.

    Clients outside use the NodePort on the second node; the others, on the first node, use the cluster IP.
    """
    for name, offer in OFFERS.items():
        spec = services[name]["spec"]
        node_ports = {port["name"]: port["nodePort"] for port in spec["ports"]}
        for place, kind, address in itertools.product(offer.places, offer.kinds, spec["clusterIPs"]):
            namespace = {"pod": pod, "node": NODES[0].namespace, "outside": HUB}[place]
            front = Front(address, 80)
            if place == "outside":
                node = NODES[1].ipv6 if ":" in address else NODES[1].ipv4
                front = Front(node, node_ports[kind.rpartition(" ")[2].lower()])
            yield Client(namespace, place, kind, name, front, frozenset({offer.deployment}))


def ask(sock: socket.socket) -> str:
    """Request a server's name once; return its Deployment. Raises OSError."""
    if sock.type == socket.SOCK_DGRAM:
        sock.sendall(b"hostname")
        return _deployment(sock.recv(512))
    sock.sendall(_REQUEST)
    received = b""
    while True:
        data = sock.recv(4096)
        if not data:
            raise ConnectionError("ended early")
        received += data
        head, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if length and len(body) >= int(length[1]):
            return _deployment(body)


def _deployment(pod: bytes) -> str:
    """Return the Deployment of a pod by the pod's name, which ends with two random words."""
    return pod.decode().strip().rsplit("-", 2)[0]


def _namespace(address: str) -> str:
    """Return the path of the network namespace of the pod with an address. Raises E2EError."""
    for path in FOLDER.glob("n*/state/**/netns/cni-*"):
        command = ["nsenter", f"--net={path}", "ip", "-json", "address", "show", "dev", "eth0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for link in json.loads(shown or "[]"):
            if any(each["local"] == address for each in link["addr_info"]):
                return str(path)
    raise E2EError(f"no network namespace of a pod has the address {address}")
