"""The cluster of the scenarios: a lab with named pods, Services and endpoints as text, answers as text.

Pods are a1 to a4 on node-a (where the proxy runs) and b1 to b3 on node-b; all answer on TCP and UDP 3000 and 3001.
Endpoints are written "a1 b1/draining", expected answers "a1 b1 kept", "a1 masqueraded", "refused" or "timeout", clients
"pod", "node", "neighbour" (the other node), "outside", a pod's name, or "outside@192.168.100.50" for another address.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lab.cluster import LabCluster, NotInTimeError
from lab.netns import names, run_in_async
from lab.probes import Answer, NoAnswer, http_get
from lab.proxyprocess import HEALTH_PORT, METRICS_PORT, Proxy
from lab.topology import NODE_A, NODE_B, OUTSIDE_IP, OUTSIDE_IP6, NodeNet
from support import forking
from support.modes import GUEST, NFTABLES, ScenarioMode

Json = dict[str, Any]
PODS = ("a1", "a2", "a3", "a4", "b1", "b2", "b3")
TIMEOUT = 90.0 if GUEST else 15.0
"""Seconds to wait for any event; nearly all take milliseconds, also on a busy machine."""
ENOUGH = 120
"""Connections after which an endpoint without one counts as missing: for three endpoints an error of 1 in 2^60."""

_NO_PODS = {"kept", "masqueraded", *NoAnswer}
"""Words of an expected answer that name no pod."""
_HOSTS = {"node": NODE_A, "neighbour": NODE_B}

_STATES: dict[str, Json] = {
    "": {"ready": True, "serving": True, "terminating": False},
    "unready": {"ready": False, "serving": False, "terminating": False},
    "draining": {"ready": False, "serving": True, "terminating": True},
    "failed": {"ready": False, "serving": False, "terminating": True},
}
PORTS: list[Json] = [
    {"name": "tcp", "port": 80, "protocol": "TCP", "targetPort": 3000},
    {"name": "udp", "port": 80, "protocol": "UDP", "targetPort": 3000},
]
SLICE_PORTS: list[Json] = [
    {"name": "tcp", "port": 3000, "protocol": "TCP"},
    {"name": "udp", "port": 3000, "protocol": "UDP"},
]


class Front(NamedTuple):
    """An address and port of a Service."""

    address: str
    port: int


def front_of(service: Json, kind: str, family: str, port: int, host: Mapping[str, str]) -> Front:
    """Return the address of a kind and family, with a Service's port; a NodePort's address is that of `host`."""
    spec = service["spec"]
    chosen = spec["ports"][port]
    if kind == "nodeport":
        return Front(host[family], chosen["nodePort"])
    ingress = service.get("status", {}).get("loadBalancer", {}).get("ingress") or ()
    addresses = {
        "cluster": spec.get("clusterIPs") or (),
        "external": spec.get("externalIPs") or (),
        "loadbalancer": [entry["ip"] for entry in ingress],
    }[kind]
    return Front(next(a for a in addresses if (":" in a) == (family == "IPv6")), chosen["port"])


class Live:
    """A cluster with its pods, and the proxy if it runs. All calls are in the event loop's thread."""

    def __init__(self, cluster: LabCluster, mode: ScenarioMode = NFTABLES) -> None:
        self.cluster = cluster
        self.cluster.spawn = forking.spawn_or_fork
        self.mode = mode
        self.proxies: list[Proxy] = []
        self.ips: dict[str, dict[str, str]] = {
            "pod": {"IPv4": "10.244.0.2", "IPv6": "fd00:244::2"},
            "node": {"IPv4": NODE_A.ip, "IPv6": NODE_A.ip6},
            "neighbour": {"IPv4": NODE_B.ip, "IPv6": NODE_B.ip6},
            "outside": {"IPv4": OUTSIDE_IP, "IPv6": OUTSIDE_IP6},
        }

    # proxy

    @property
    def proxy(self) -> Proxy:
        """The proxy that was started last."""
        return self.proxies[-1]

    async def start(
        self,
        overrides: Json | None = None,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        *,
        ready_within: float | None = TIMEOUT,
    ) -> Proxy:
        """Start a proxy on node-a, and wait until all families are programmed unless `ready_within` is None.

        The proxy has the cluster's mode; `overrides` replace fields of the configuration, including the mode.
        """
        config = {**self.mode.config, **(overrides or {})}
        self.proxies.append(await self.cluster.start_proxy(config, args, command, ready_within=ready_within))
        if ready_within is not None:
            where = str((overrides or {}).get("healthzBindAddress", HEALTH_PORT))
            await self.eventually(lambda: self.unready(int(where.rpartition(":")[2])))
        return self.proxy

    async def unready(self, port: int = HEALTH_PORT) -> str:
        """Return the reason why /readyz reports that the proxy is not ready, '' if it is ready."""
        try:
            status, body = await self.page("/readyz", port)
        except OSError as error:
            return str(error)
        return "" if status == 200 else body

    def logged(self, pattern: str) -> list[str]:
        """Return the lines of the proxy's log that match a pattern."""
        return [line for line in self.proxy.log.read_text(errors="replace").splitlines() if re.search(pattern, line)]

    async def page(self, path: str, port: int = HEALTH_PORT) -> tuple[int, str]:
        """Return status and body of a page of the proxy, requested on the node."""
        status, body = await run_in_async(self.proxy.namespace, lambda: http_get("127.0.0.1", port, path, 5.0))
        return status, body.decode()

    async def metric(self, series: str) -> float:
        """Return the value of one series, such as 'kubeproxy_..._total{ip_family="IPv4"}'; 0 if it is missing."""
        _, text = await self.page("/metrics", METRICS_PORT)
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        return 0.0

    async def choose_variant(self, variant: str, place: str = "node") -> None:
        """Create the chain that selects a variant of iptables ("nft", "legacy", '' for none), as a kubelet does."""
        if variant:
            await self.run(f"iptables-{variant}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT", place=place)

    async def run(self, *command: str, place: str = "node") -> str:
        """Run a command on a node and return its output."""
        status, out, err = await self.cluster.exec(place, list(command))
        assert status == 0, f"{command}: {err}"
        return out

    async def ask(self, *words: str) -> tuple[int, str]:
        """Run a subcommand of kube-proxy for the proxy that was started last; return its exit code and text."""
        where = ["--control-socket", str(self.proxy.control)]
        return await forking.ask(self.cluster.namespace_of("node"), [*words, *where], 2 * TIMEOUT)

    async def nft(self, *arguments: str) -> str:
        """Run nft on the node."""
        return await self.run("nft", *arguments)

    # objects

    async def add_pods(self) -> None:
        """Start all pods and store their addresses."""
        for name in PODS:
            self.cluster.create(_pod(name, NODE_A if name.startswith("a") else NODE_B))
        for pod in await self.cluster.pods_ready("role=endpoint", len(PODS), timeout=TIMEOUT):
            v4, v6 = (entry["ip"] for entry in pod["status"]["podIPs"])
            self.ips[pod["metadata"]["name"]] = {"IPv4": v4, "IPv6": v6}

    def service(self, name: str, endpoints: str | None = None, **spec: Any) -> Json:
        """Create a Service without selector on TCP and UDP port 80, and its slices if endpoints are given."""
        spec = copy.deepcopy({"ports": PORTS} | spec)  # The API server adds defaults.
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        created = self.cluster.create(body)
        if endpoints is not None:
            self.endpoints(name, endpoints)
        return created

    def endpoints(self, name: str, text: str, ports: list[Json] | None = None) -> None:
        """Write a Service's slices, one for each of its families, as an EndpointSlice controller would."""
        for family in self.cluster.get("services", name)["spec"]["ipFamilies"]:
            found = [self._endpoint(word, family) for word in text.split()]
            self.cluster.store.put("endpointslices", slice_of(name, family, found, ports))

    def _endpoint(self, word: str, family: str) -> Json:
        name, _, state = word.partition("/")
        node, address = NODE_A if name.startswith("a") else NODE_B, self.ips[name][family]
        return {"addresses": [address], "conditions": _STATES[state], "nodeName": node.name, "zone": node.zone}

    def delete(self, name: str) -> None:
        """Delete a Service and its slices."""
        self.cluster.delete("services", name)
        for record in self.cluster.store.records("endpointslices", "default"):
            if record.labels.get("kubernetes.io/service-name") == name:
                self.cluster.delete("endpointslices", record.key[1])

    def has_addresses(self, name: str) -> bool:
        """Return whether a Service has a load balancer address of each of its families, if it is a load balancer."""
        service = self.cluster.get("services", name)
        balanced = service["spec"]["type"] == "LoadBalancer"
        return not balanced or len(service["status"]["loadBalancer"].get("ingress") or ()) > 1

    def front(self, name: str, kind: str = "cluster", family: str = "IPv4", port: int = 0) -> Front:
        """Return the address of a Service (cluster IP, nodeport, loadbalancer or external IP) with its first port."""
        return front_of(self.cluster.get("services", name), kind, family, port, self.ips["node"])

    def events(self, name: str) -> list[str]:
        """Return the events about an object, as 'reason: note'."""
        found = [record.decode() for record in self.cluster.store.records("events")]
        about = [e for e in found if (e.get("regarding") or e.get("involvedObject") or {}).get("name") == name]
        return [f"{e.get('reason')}: {e.get('note') or e.get('message')}" for e in about]

    async def destinations(self, front: Front, proto: str = "tcp", map_name: str = "endpoints") -> set[str]:
        """Return the endpoints that the kernel has for an address of a Service, by pod and port: {"a1:3000"}."""
        table = "ip6" if ":" in front.address else "ip"
        text = " ".join((await self.nft("list", "map", table, "kube-proxy", map_name)).split())
        head = (
            rf"{re.escape(front.address)} \. {proto} \. {front.port}" if front.address else rf"{proto} \. {front.port}"
        )
        by_ip = {ip: name for name, ips in self.ips.items() for ip in ips.values()}
        counted = r"(?: counter packets \d+ bytes \d+)?"
        found = re.findall(rf"{head} \. \d+{counted} : (\S+) \. (\d+)", text)
        if not found:  # The Service may have session affinity.
            text = " ".join((await self.nft("list", "table", table, "kube-proxy")).split())
            (_, text) = text.split(f"map {map_name.replace('endpoints', 'session-pools')} {{", 1)
            if number := re.search(rf"{head} : (\S+?)[ ,]", text.split(" map ", 1)[0]):
                slots = re.findall(rf"[ ,]{re.escape(number[1])} \. \d+ : (\S+?)[ ,]", text)
                numbers = "|".join(map(re.escape, slots)) or "none"
                found = re.findall(rf" (?:{numbers}) \. {proto}{counted} : (\S+) \. (\d+)", text)
        return {f"{by_ip.get(ip, ip)}:{port}" for ip, port in found}

    async def programmed(self, front: Front, pods: str, port: int = 3000) -> None:
        """Wait until the kernel (or, in other modes, the proxy) has exactly these endpoints for a cluster IP."""
        wanted = {f"{pod}:{port}" for pod in pods.split()}
        ask = self.destinations if self.mode.name == "nftables" else self._said

        async def check() -> str:
            there = await ask(front)
            return "" if there == wanted else f"{front}: {wanted} expected in the kernel, found {there}"

        await self.eventually(check)

    async def _said(self, front: Front) -> set[str]:
        """Return the endpoints that the proxy reports as programmed for a cluster IP, or else the reported state."""
        services = [record.decode() for record in self.cluster.store.records("services")]
        (name,) = [s["metadata"]["name"] for s in services if front.address in (s["spec"].get("clusterIPs") or ())]
        status, text = await self.page(f"/debug/state?namespace=default&name={name}", METRICS_PORT)
        if status != 200:  # The proxy has not received the Service yet.
            return {text}
        (service,) = json.loads(text)["services"]
        if service["state"] != "programmed":
            return {service["state"]}
        family = "IPv6" if ":" in front.address else "IPv4"
        by_ip = {ip: name for name, ips in self.ips.items() for ip in ips.values()}
        texts = [text for port in service["ports"] if port["family"] == family for text in port["endpoints"]]
        ends = [text.rpartition(":") for text in texts]
        return {f"{by_ip.get(ip.strip('[]'), ip)}:{port}" for ip, _, port in ends}

    # waiting and requests

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until a condition is true."""
        try:
            await self.cluster.until(lambda: bool(holds()), what, TIMEOUT)
        except NotInTimeError as error:
            raise AssertionError(f"{error}\nthe proxy said:\n{self._tail()}") from error

    async def eventually(self, check: Callable[[], Awaitable[str]]) -> None:
        """Wait until a check returns ''; until then it returns the deviation."""
        deadline = time.monotonic() + TIMEOUT
        began = 0.0
        while wrong := await check():
            if began > deadline:  # from the last check, which may have waited
                raise AssertionError(f"{wrong}\nthe proxy said:\n{self._tail()}")
            await asyncio.sleep(0.02)
            began = time.monotonic()

    def _tail(self) -> str:
        return self.proxy.tail() if self.proxies else "nothing, it does not run"

    async def expect(self, front: Front, wanted: Mapping[str, str], protocols: str = "tcp udp") -> None:
        """Wait until every place gets the expected answer, by every protocol."""
        pairs = list(itertools.product(wanted.items(), protocols.split()))

        async def check() -> str:
            found = await asyncio.gather(*(self.look(p, proto, front, answer) for (p, answer), proto in pairs))
            return "\n".join(filter(None, found))

        # A connection that comes too early takes a second, because TCP sends its SYN again: changes arrive within
        # milliseconds.
        await asyncio.sleep(0.05)
        await self.eventually(check)

    async def look(self, place: str, proto: str, front: Front, wanted: str) -> str:
        """Return how the answers to a place differ from the expected ones, '' if they do not."""
        words = wanted.split()
        pods, source = set(words) - _NO_PODS, words[-1]
        where, _, own = place.partition("@")
        if not pods:
            timeout = 0.25 if wanted == "timeout" else 3.0
            answer = await self.cluster.probe(where, proto, *front, timeout, own or None)
            return "" if answer == wanted else f"{place} {proto} {front}: {wanted} expected, got {answer}"
        seen: set[str] = set()
        for _ in range(ENOUGH // 6):
            for answer in await self.cluster.probes(where, proto, *front, 6, 3.0, own or None):
                if isinstance(answer, NoAnswer) or answer.pod not in pods:
                    return f"{place} {proto} {front}: {wanted} expected, got {answer}"
                if source in {"kept", "masqueraded"} and not self._has_source(place, front, answer, source):
                    return f"{place} {proto} {front}: source {source} expected, got {answer}"
                seen.add(answer.pod)
            if seen == pods:
                return ""
        return f"{place} {proto} {front}: {wanted} expected, met only {sorted(seen)}"

    def _has_source(self, place: str, front: Front, answer: Answer, source: str) -> bool:
        host = _HOSTS.get(place)
        others = {address for node in _HOSTS.values() if node is not host for address in node.addresses}
        if host and answer.node != host.name and front.address not in others:
            return True  # Packets from a node through its own proxy have the same source address in either case.
        where, _, own = place.partition("@")
        return (answer.client in ({own} if own else self.ips[where].values())) == (source == "kept")


def slice_of(service: str, family: str, endpoints: Iterable[Json] | None, ports: list[Json] | None = None) -> Json:
    """Return an EndpointSlice of a Service."""
    return {
        "metadata": {
            "name": f"{service}-{family.lower()}",
            "namespace": "default",
            "uid": f"slice-of-{service}-{family}",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": None if endpoints is None else list(endpoints),
        "ports": SLICE_PORTS if ports is None else ports,
    }


def _pod(name: str, node: NodeNet) -> Json:
    ports = [{"containerPort": port, "protocol": proto} for port in (3000, 3001) for proto in ("TCP", "UDP")]
    container = {"name": "whoami", "image": "whoami", "ports": ports}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"role": "endpoint"}},
        "spec": {"nodeName": node.name, "containers": [container]},
    }


def leftovers(live: Live) -> list[str]:
    """Return the remains of a cluster after its end."""
    return [*names(live.cluster.topology.prefix), *(f"process {p.pid}" for p in live.proxies if p.returncode is None)]
