"""Our kube-proxy replaced by the Go one, and back, on a real cluster: `python -m prove.replacement`, as root.

Pods, EndpointSlices and addresses are the cluster's own; the lab's servers answer inside the pods' network namespaces.
Clients in a pod, on a node and outside ask all the time, over both families (prove/asking.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from e2e import nodes
from e2e.binaries import programs_to_run
from e2e.cluster import cluster, say
from e2e.controlplane import kubectl
from e2e.errors import E2EError
from e2e.images import PAUSE, tags, upstream_names
from e2e.layout import FOLDER, HUB, NODES
from e2e.processes import Processes
from lab.answers import Answers
from prove.asking import KINDS, Client, Crowd
from prove.wayback import HEAD, Program, Step
from support.live import Front

STEPS: Final = (("ours", "go"), ("go", "go"), ("go", "ours"), ("ours", "ours"))
SETTLE: Final = 5.0
"""Seconds of traffic before a program ends, and after the next one is healthy on both nodes."""

_SERVER, _CLIENT, _PORT, _SERVERS = "whoami", "client", 3000, 4
Json = dict[str, Any]


class Pod(NamedTuple):
    """A running pod: its app, its node, and the path of its network namespace."""

    name: str
    app: str
    node: str
    namespace: str


def objects(image: str) -> Json:
    """Return a Service of type NodePort for both families, and Deployments of its servers and of a client."""
    ports = [{"name": each, "port": 80, "targetPort": _PORT, "protocol": each.upper()} for each in ("tcp", "udp")]
    families = {"ipFamilyPolicy": "RequireDualStack"}
    service = {"type": "NodePort", "selector": {"app": _SERVER}, "ports": ports, **families}
    items: list[Json] = [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": _SERVER}, "spec": service}]
    containers = [{"name": "c", "image": image, "imagePullPolicy": "Never"}]
    for name, replicas in ((_SERVER, _SERVERS), (_CLIENT, 1)):
        template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": containers}}
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        items.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec})
    return {"apiVersion": "v1", "kind": "List", "items": items}


async def play(
    programs: Path, image: str, commands: Mapping[str, Sequence[str]], mode: str, processes: Processes
) -> list[Step]:
    """Replace the programs as STEPS say; ours runs. Raises E2EError."""
    kubectl(programs, FOLDER, "apply", "--validate=false", "-f", "-", given=json.dumps(objects(image)))
    pods = _running_pods(programs)
    service = json.loads(kubectl(programs, FOLDER, "get", "service", _SERVER, "-o", "json"))
    answers = Answers()
    await answers.start()
    try:
        for pod in pods:
            if pod.app == _SERVER:
                await answers.open(pod.name, pod.namespace, pod.name, pod.node, [("TCP", _PORT), ("UDP", _PORT)])
        with Crowd(clients(service, pods)) as crowd:
            return [await _replace(*step, commands, mode, processes, crowd) for step in STEPS]
    finally:
        await answers.close()


async def _replace(
    before: str, after: str, commands: Mapping[str, Sequence[str]], mode: str, processes: Processes, crowd: Crowd
) -> Step:
    await asyncio.sleep(SETTLE)
    say(f"{before} to {after}")
    begin = time.monotonic()
    for node in NODES:
        await asyncio.to_thread(processes.stop, f"kube-proxy-{node.name}")
    await asyncio.to_thread(nodes.start_proxies, commands[after], mode, FOLDER, processes)
    await asyncio.sleep(SETTLE)
    times = begin, time.monotonic()
    found = {kind: crowd.figures(kind, *times) for kind in KINDS}
    return Step(Program(before, mode), Program(after, mode), found, crowd.failures(*times))


def clients(service: Json, pods: Sequence[Pod]) -> Iterator[Client]:
    """Yield a client of each kind, place and family: those outside ask the NodePort on the second node."""
    servers = frozenset(pod.name for pod in pods if pod.app == _SERVER)
    inside = next(pod.namespace for pod in pods if pod.app == _CLIENT)
    node_ports = {port["name"]: port["nodePort"] for port in service["spec"]["ports"]}
    for kind, address in itertools.product(KINDS, service["spec"]["clusterIPs"]):
        cluster_ip = Front(address, 80)
        node = NODES[1].ipv6 if ":" in address else NODES[1].ipv4
        nodeport = Front(node, node_ports[kind.rpartition(" ")[2].lower()])
        yield Client(inside, "pod", kind, _SERVER, cluster_ip, servers)
        yield Client(NODES[0].namespace, "node", kind, _SERVER, cluster_ip, servers)
        yield Client(HUB, "outside", kind, _SERVER, nodeport, servers)


def _running_pods(programs: Path, seconds: float = 120) -> list[Pod]:
    deadline = time.monotonic() + seconds
    while True:
        listed = json.loads(kubectl(programs, FOLDER, "get", "pods", "-o", "json"))["items"]
        running = [each for each in listed if each["status"]["phase"] == "Running"]
        if len(running) == _SERVERS + 1:
            break
        if time.monotonic() > deadline:
            raise E2EError(f"{len(running)} of {_SERVERS + 1} pods are running after {seconds:.0f} s")
        time.sleep(1)
    there = _pod_namespaces()
    return [
        Pod(meta["name"], meta["labels"]["app"], each["spec"]["nodeName"], there[each["status"]["podIP"]])
        for each in running
        if (meta := each["metadata"])
    ]


def _pod_namespaces() -> dict[str, str]:
    """Return the path of each pod's network namespace by each of the pod's addresses."""
    found = {}
    for path in FOLDER.glob("n*/state/**/netns/cni-*"):
        command = ["nsenter", f"--net={path}", "ip", "-json", "address", "show", "dev", "eth0"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for link in json.loads(shown or "[]"):
            found.update({address["local"]: str(path) for address in link["addr_info"]})
    return found


def table(steps: Sequence[Step]) -> str:
    """Return the table, and a line for each client that failed."""
    failures = [f"{step.before} to {step.after}: {line}" for step in steps for line in step.failures]
    return "\n".join(["", HEAD, *(step.line for step in steps), "", *failures])


def main() -> int:
    """Run; return the exit code: 1 when a client failed."""
    parser = argparse.ArgumentParser(prog="python -m prove.replacement", description=__doc__)
    parser.add_argument(
        "--kubernetes", type=Path, required=True, metavar="DIR", help="source tree or folder of binaries"
    )
    parser.add_argument("--mode", choices=("nftables", "iptables"), default="nftables")
    given = parser.parse_args()
    try:
        folder = programs_to_run(given.kubernetes.resolve())
        image = tags(PAUSE, upstream_names(folder / "e2e.test"))[0]
        commands = {"ours": [str(Path(sys.executable).with_name("kube-proxy"))], "go": [str(folder / "kube-proxy")]}
        with cluster(folder, commands["ours"], given.mode) as processes:
            steps = asyncio.run(play(folder, image, commands, given.mode, processes))
    except E2EError as error:
        print(f"replacement: {error}", file=sys.stderr)
        return 2
    print(table(steps))
    return int(any(step.failures for step in steps))


if __name__ == "__main__":
    sys.exit(main())
