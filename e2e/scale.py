"""Measures thousands of Services on a real API server: start, restart and take-over of kube-proxies, and received
bytes.

The cluster is etcd, an API server and the network of one node; no kubelet and no controller runs. Objects are Services
with one EndpointSlice of ten endpoints each.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from e2e.results import RESULTS, save
from e2e.run import commit, today
from e2e.run import versions as known_versions
from lab.netns import threads_in
from lab.proxyprocess import last_syncs

FOLDER_OF_RUNS: Final = RESULTS / "scale"
PAGE: Final = Path(__file__).parent.parent / "docs/capacity.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
ENDPOINTS: Final = 10
MODES: Final = ("nftables", "iptables")
_NODE: Final = NODES[0]
_TOGETHER: Final = 100  # writes in a transaction of etcd, which accepts 128
TIMEOUT: Final = 300.0


class Measured(msgspec.Struct, frozen=True):
    """One start of a kube-proxy: seconds until its first sync (TIMEOUT without one), CPU seconds of the kube-proxy and
    its commands, resident and peak megabytes, received megabytes, and CPU seconds of the API server.
    """

    case: str
    seconds: float
    cpu: float
    resident: float
    peak: float
    received: float
    server: float


class Record(msgspec.Struct, frozen=True):
    """A run: mode, number of Services, day, commit, versions, the machine's load, megabytes of all lists as JSON and of
    the managedFields in them, and a row for each start.
    """

    mode: str
    services: int
    date: str
    commit: str
    versions: dict[str, str]
    load: str
    lists: float
    managed: float
    rows: list[Measured]


class Place(NamedTuple):
    """An object: the path at which the API server creates it, its key in etcd, and its body."""

    path: str
    key: str
    body: dict[str, Any]


def first() -> tuple[Place, Place, Place]:
    """Return a Service, its EndpointSlice, and the IPAddress that the API server creates for the Service."""
    name, address = words(0)[:2]
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    spec = {"selector": {"app": name}, "clusterIP": address, "ports": [{**ports[0], "targetPort": 8080}]}
    service = {"metadata": {"name": name}, "spec": spec}
    pods = [
        {
            "addresses": [pod],
            "conditions": {"ready": True, "serving": True, "terminating": False},
            "nodeName": NODES[each % 2].name,
            "targetRef": {"kind": "Pod", "namespace": "default", "name": f"{name}-{each}"},
        }
        for each, pod in enumerate(words(0)[2:])
    ]
    meta = {"name": f"{name}-abcde", "labels": {"kubernetes.io/service-name": name, "app": name}}
    endpoints = {"metadata": meta, "addressType": "IPv4", "endpoints": pods, "ports": [{**ports[0], "port": 8080}]}
    slices, addresses = "discovery.k8s.io/v1/namespaces/default/endpointslices", "networking.k8s.io/v1/ipaddresses"
    return (
        Place("/api/v1/namespaces/default/services", f"/registry/services/specs/default/{name}", service),
        Place(f"/apis/{slices}", f"/registry/endpointslices/default/{name}-abcde", endpoints),
        Place(f"/apis/{addresses}", f"/registry/ipaddresses/{address}", {"metadata": {"name": address}}),
    )


def words(number: int) -> tuple[str, ...]:
    """Return name, cluster IP and endpoints' addresses of a Service; their lengths are the same for each number."""
    pods = (f"10.244.{100 + number * ENDPOINTS % 150}.{100 + (number + each) % 150}" for each in range(ENDPOINTS))
    return f"service-{number:05d}", f"10.96.{100 + number // 150}.{100 + number % 150}", *pods


def copied(text: bytes, uid: str, number: int) -> bytes:
    """Convert an object of the first Service, as etcd stores it, to an object of another Service.

    Equal lengths leave the lengths in the encoding unchanged.
    """
    new = dict(zip((uid, *words(0)), (f"{uid[:-5]}{number:05d}", *words(number)), strict=True))
    old = "|".join(map(re.escape, new)).encode()
    return re.sub(old, lambda found: new[found[0].decode()].encode(), text)


def create(count: int) -> None:
    """Create the first Service through the API server and copy its objects in etcd. Raises E2EError.

    The API server needs 0.05 s of CPU for each Service.
    """
    connection, etcd = _connection(), http.client.HTTPConnection("127.0.0.1", 2379, timeout=60)
    puts = []
    for path, key, body in first():
        if "ipaddresses" not in path:
            _ask(connection, "POST", path, json.dumps(body))
        uid = json.loads(_ask(connection, "GET", f"{path}/{body['metadata']['name']}"))["metadata"]["uid"]
        asked = json.dumps({"key": _base64(key.encode())})
        stored = base64.b64decode(json.loads(_ask(etcd, "POST", "/v3/kv/range", asked))["kvs"][0]["value"])
        puts += [
            {
                "requestPut": {
                    name: _base64(copied(text, uid, n)) for name, text in (("key", key.encode()), ("value", stored))
                }
            }
            for n in range(1, count)
        ]
    for n in range(0, len(puts), _TOGETHER):
        _ask(etcd, "POST", "/v3/kv/txn", json.dumps({"success": puts[n : n + _TOGETHER]}))


def _base64(text: bytes) -> str:
    return base64.b64encode(text).decode()


def _connection() -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(FOLDER / "ca.crt"))
    return http.client.HTTPSConnection(HUB_IPV4, 6443, context=context, timeout=60)


def _ask(connection: http.client.HTTPConnection, method: str, path: str, body: str = "") -> bytes:
    """Return the answer of the API server (as the administrator), or of etcd. Raises E2EError."""
    headers = {"Authorization": "Bearer admin", "Content-Type": "application/json"}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status not in (200, 201):
        raise E2EError(f"{method} {path}: {response.status} {answer[:300]!r}")
    return answer


def size_of_lists() -> tuple[float, float]:
    """Return the megabytes of all Services and EndpointSlices as JSON, and of the managedFields in them."""
    connection = _connection()
    size, managed = 0, 0
    for path in ("/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"):
        answer = _ask(connection, "GET", path)
        size += len(answer)
        managed += managed_fields(answer)
    return size / 1e6, managed / 1e6


def managed_fields(answer: bytes) -> int:
    """Return the number of bytes of managedFields, with their names, in a list in JSON."""
    listed = json.loads(answer)
    return sum(
        len(',"managedFields":') + len(msgspec.json.encode(each["metadata"]["managedFields"]))
        for each in listed["items"]
        if "managedFields" in each["metadata"]
    )


def measure(case: str, command: Sequence[str], mode: str, server: int, processes: Processes) -> Measured:
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
    """Measure with each number of Services in each mode, and record the results. Raises E2EError."""
    for count in counts:
        with alone(programs) as processes:
            say(f"creating {count} Services of {ENDPOINTS} endpoints")
            controlplane.add_node(programs, FOLDER, _NODE)
            with threads_in(HUB, 1) as pool:
                pool.submit(create, count).result()
                lists, managed = pool.submit(size_of_lists).result()
            versions = known_versions(programs, [ours])
            for mode in modes:
                loads = [os.getloadavg()[0]]
                rows = []
                for each in _starts(str(programs / "kube-proxy"), ours, mode, processes):
                    rows.append(each)
                    loads.append(os.getloadavg()[0])
                load = f"{min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} processors"
                write(Record(mode, count, today(), commit(), versions, load, lists, managed, rows))
    PAGE.write_text(into(PAGE.read_text(), read()))


def _starts(go: str, ours: str, mode: str, processes: Processes) -> Iterator[Measured]:
    """Start both kube-proxies in turn: on an empty node, and over the rules of the previous one."""
    server = processes.pid("apiserver")
    for case, command in (
        ("Go: start", go),
        ("ours: after Go", ours),
        ("ours: restart", ours),
        ("Go: after ours", go),
        ("ours: after Go after ours", ours),
    ):
        yield measure(case, [command], mode, server, processes)
    _empty()
    yield measure("ours: start", [ours], mode, server, processes)
    _empty()


def write(record: Record) -> None:
    """Write a run's file, which replaces the previous one of this mode and number of Services."""
    save(record, FOLDER_OF_RUNS / f"{record.mode}-{record.services}.json")


def read() -> list[Record]:
    """Read all runs: nftables mode first; in each mode by number of Services."""
    found = [msgspec.json.decode(path.read_bytes(), type=Record) for path in FOLDER_OF_RUNS.glob("*.json")]
    return sorted(found, key=lambda each: (MODES.index(each.mode), each.services))


def render(found: Sequence[Record]) -> str:
    """Return a table for each run, with a row for each start."""
    lines = []
    for each in found:
        known = ", ".join(f"{name} {version}" for name, version in each.versions.items() if name != "containerd")
        run = f"{each.date}, commit {each.commit}, {known}, load {each.load}"
        lists = f"All objects are {each.lists:.1f} MB of JSON, {each.managed:.1f} MB of it managedFields"
        text = f"{each.mode} mode, {each.services:,} Services ({run}). {lists}."
        lines += [textwrap.fill(text, 120, break_on_hyphens=False), "", *_table(each.rows), ""]
    return "\n".join(lines).rstrip()


def _table(rows: Sequence[Measured]) -> Iterator[str]:
    titles = ("case", "seconds", "CPU s", "resident MB", "peak MB", "received MB", "API server CPU s")
    yield f"| {' | '.join(titles)} |"
    yield "|---" + "|---:" * (len(titles) - 1) + "|"
    for each in rows:
        sizes = f"{each.resident:g} | {each.peak:g} | {each.received:g}"
        yield f"| {each.case} | {_limited(each.seconds)} | {each.cpu:g} | {sizes} | {each.server:g} |"


def _limited(seconds: float) -> str:
    return f"{seconds:g}" if seconds < TIMEOUT else f"not in {TIMEOUT:g}"


def into(page: str, found: Sequence[Record]) -> str:
    """Return docs/capacity.md with the tables between its marks."""
    before, mark, rest = page.partition(BEGIN)
    if not mark:
        raise E2EError(f"{PAGE} has no mark {BEGIN}")
    return f"{before}{BEGIN}\n{render(found)}\n{END}{rest.partition(END)[2]}"


def _end_commands() -> None:
    """End the processes on the node: an iptables-restore outlives its kube-proxy, and would slow the next one down."""
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
