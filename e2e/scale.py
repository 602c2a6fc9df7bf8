"""Thousands of Services on a real API server: start, restart and take-over of kube-proxies, and the bytes they read.

The cluster is etcd, an API server and the network of one node; no kubelet and no controller runs. Objects are Services
with one EndpointSlice of ten endpoints each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from bench import memory
from e2e import controlplane
from e2e.cluster import alone, say
from e2e.errors import E2EError
from e2e.layout import FOLDER, HUB, HUB_IPV4, NODES
from e2e.network import inside
from e2e.nodes import proxy_configuration
from e2e.processes import Processes
from lab.netns import threads_in
from lab.proxyprocess import last_syncs

RESULTS: Final = Path(__file__).parent / "scale.json"
PAGE: Final = Path(__file__).parent.parent / "docs/capacity.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
ENDPOINTS: Final = 10
MODES: Final = ("nftables", "iptables")
_NODE: Final = NODES[0]
_WRITERS: Final = 8
TIMEOUT: Final = 300.0


class Measured(msgspec.Struct, frozen=True):
    """One start of a kube-proxy: seconds until its first sync (TIMEOUT if there was none), CPU seconds of it and its
    commands, resident and peak megabytes, megabytes that it received, and CPU seconds of the API server.
    """

    case: str
    services: int
    seconds: float
    cpu: float
    resident: float
    peak: float
    received: float
    server: float


def objects(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the body of each object to create."""
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    for n in range(count):
        name = f"service-{n:05d}"
        spec = {"selector": {"app": name}, "ports": [{**ports[0], "targetPort": 8080}]}
        yield "/api/v1/namespaces/default/services", {"metadata": {"name": name}, "spec": spec}
        addresses = [f"10.244.{n * ENDPOINTS % 250}.{1 + (n + each) % 250}" for each in range(ENDPOINTS)]
        pods = [
            {
                "addresses": [address],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": NODES[each % 2].name,
                "targetRef": {"kind": "Pod", "namespace": "default", "name": f"{name}-{each}"},
            }
            for each, address in enumerate(addresses)
        ]
        labels = {"kubernetes.io/service-name": name, "app": name}
        yield (
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
            {
                "metadata": {"name": f"{name}-abcde", "labels": labels},
                "addressType": "IPv4",
                "endpoints": pods,
                "ports": [{**ports[0], "port": 8080}],
            },
        )


def create(made: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Create objects over one connection. Raises E2EError."""
    context = ssl.create_default_context(cafile=str(FOLDER / "ca.crt"))
    connection = http.client.HTTPSConnection(HUB_IPV4, 6443, context=context, timeout=60)
    headers = {"Authorization": "Bearer admin", "Content-Type": "application/json"}
    for path, body in made:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 201:
            raise E2EError(f"POST {path}: {response.status} {answer[:300]!r}")


def measure(case: str, services: int, command: Sequence[str], mode: str, server: int, processes: Processes) -> Measured:
    """Start a kube-proxy, wait for its first sync, measure, and end it. Raises E2EError."""
    file = FOLDER / "proxy.yaml"
    file.write_text(yaml.safe_dump(proxy_configuration(_NODE, FOLDER, mode)))
    received, cpu, began = _received(), memory.cpu_seconds(server), time.time()
    processes.start("kube-proxy", _NODE.namespace, [*command, "--config", str(file)])
    pid = processes.pid("kube-proxy")
    while not _synced(began):
        processes.check()
        if time.time() > began + TIMEOUT:
            break
        time.sleep(0.05)
    seconds = min(time.time() - began, TIMEOUT)
    time.sleep(2)  # the rest of the first sync, such as the clean-up of another mode's rules
    resident, peak = memory.resident(pid)
    found = Measured(
        case,
        services,
        round(seconds, 2),
        round(memory.cpu_seconds(pid), 2),
        round(resident),
        round(peak),
        round((_received() - received) / 1e6, 1),
        round(memory.cpu_seconds(server) - cpu, 2),
    )
    processes.stop("kube-proxy")
    _end_commands()
    say(f"{case}: {found}")
    return found


def run(programs: Path, ours: str, counts: Sequence[int], modes: Sequence[str] = MODES) -> None:
    """Measure with each number of Services in each mode and record. Raises E2EError."""
    go = str(programs / "kube-proxy")
    found: list[Measured] = []
    for count in counts:
        with alone(programs) as processes:
            server = processes.pid("apiserver")
            say(f"creating {count} Services of {ENDPOINTS} endpoints")
            controlplane.add_node(programs, FOLDER, _NODE)
            made = list(objects(count))
            with threads_in(HUB, _WRITERS) as pool:
                list(pool.map(create, [made[n::_WRITERS] for n in range(_WRITERS)]))
            for mode in modes:
                for case, command in (
                    (f"Go {mode}: start", [go]),
                    (f"ours {mode}: after Go", [ours]),
                    (f"ours {mode}: restart", [ours]),
                    (f"Go {mode}: after ours", [go]),
                    (f"ours {mode}: after Go after ours", [ours]),
                ):
                    found.append(measure(case, count, command, mode, server, processes))
                _empty()
                found.append(measure(f"ours {mode}: start", count, [ours], mode, server, processes))
                _empty()
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    PAGE.write_text(into(PAGE.read_text(), found))


def render(found: Sequence[Measured]) -> str:
    """Return the table, a row for each start."""
    titles = ("case", "Services", "seconds", "CPU s", "resident MB", "peak MB", "received MB", "API server CPU s")
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for each in found:
        sizes = f"{each.resident:g} | {each.peak:g} | {each.received:g}"
        lines.append(
            f"| {each.case} | {each.services:,} | {_limited(each.seconds)} | {each.cpu:g} | {sizes} | {each.server:g} |"
        )
    return "\n".join(lines)


def _limited(seconds: float) -> str:
    return f"{seconds:g}" if seconds < TIMEOUT else f"not in {TIMEOUT:g}"


def into(page: str, found: Sequence[Measured]) -> str:
    """Return docs/capacity.md with the table between its marks."""
    before, mark, rest = page.partition(BEGIN)
    if not mark:
        raise E2EError(f"{PAGE} has no mark {BEGIN}")
    return f"{before}{BEGIN}\n{render(found)}\n{END}{rest.partition(END)[2]}"


def _end_commands() -> None:
    """End what runs on the node: an iptables-restore outlives its kube-proxy, and would slow the next one down."""
    listed = subprocess.run(["ip", "netns", "pids", _NODE.namespace], capture_output=True, text=True, check=True).stdout
    for pid in map(int, listed.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _empty() -> None:
    """Remove all rules of the node."""
    subprocess.run([*inside(_NODE.namespace), "nft", "flush", "ruleset"], check=True)


def _synced(since: float) -> bool:
    command = [*inside(_NODE.namespace), "curl", "-sf", "-m5", "http://127.0.0.1:10249/metrics"]
    synced = last_syncs(subprocess.run(command, capture_output=True, check=False).stdout)
    return bool(synced) and all(each >= since for each in synced)


def _received() -> int:
    command = [*inside(_NODE.namespace), "ip", "-json", "-stats", "link", "show", "eth0"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return int(shown[0]["stats64"]["rx"]["bytes"])
