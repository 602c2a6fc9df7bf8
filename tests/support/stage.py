"""The objects of one of upstream's scenarios: a separate namespace with pods and the Services that select them.

Pods are written "one@a two@b", by name and node; clients are the places of Live, "client-a" and "client-b", and the
scenario's pods by name. Endpoints come from the lab's EndpointSlice controller.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from lab.netns import run_in_async
from lab.objects import whoami_rc
from lab.pods import DRAIN_ANNOTATION, READY_ANNOTATION
from lab.probes import Answer, http_get
from support.live import PORTS, TIMEOUT, Front, Json, front_of
from support.two_nodes import TwoNodes

NODES = {"a": "node-a", "b": "node-b"}
EVERYBODY = ("client-a", "client-b", "node", "neighbour")
FOREVER = 30.0
"""Seconds that a pod takes to end if it must be terminating for the whole scenario."""
_serials = itertools.count(1)


def everybody(answer: str) -> dict[str, str]:
    """Return the same expected answer for a pod and the node itself, on either node."""
    return dict.fromkeys(EVERYBODY, answer)


class Stage:
    """An async context manager; at its end it removes the namespace and all objects in it."""

    def __init__(self, live: TwoNodes) -> None:
        self.live = live
        self.cluster = live.cluster
        self.mode = live.mode
        self.namespace = f"e2e-{next(_serials)}"

    async def open(self) -> None:
        """Create the namespace."""
        self.cluster.create({"kind": "Namespace", "metadata": {"name": self.namespace}})

    async def close(self) -> None:
        """Remove everything; pods have no grace period."""
        for plural in ("replicationcontrollers", "services", "endpointslices"):
            for obj in self.cluster.select(plural, namespace=self.namespace):
                self.cluster.delete(plural, obj["metadata"]["name"], self.namespace)
        for pod in self.cluster.select("pods", namespace=self.namespace):
            self.cluster.delete("pods", pod["metadata"]["name"], self.namespace, grace=0)
        self.cluster.delete("namespaces", self.namespace)
        for place in [place for place in self.live.ips if place.startswith(f"{self.namespace}/")]:
            del self.live.ips[place]

    # pods

    async def pods(self, text: str, app: str = "web", ports: Any = (3000,), drain: float = 0.1, **spec: Any) -> None:
        """Start pods and wait until they are ready;

        `ports` are numbers, for TCP and UDP, or a container's port list.
        """
        for word in text.split():
            self.create_pod(word, app, ports, drain, **spec)
        await self.ready(*(word.partition("@")[0] for word in text.split()))

    def create_pod(self, word: str, app: str = "web", ports: Any = (3000,), drain: float = 0.1, **spec: Any) -> None:
        """Create a pod that continues to answer for `drain` seconds after its deletion."""
        name, _, node = word.partition("@")
        listed = [entry for port in ports for entry in _container_ports(port)]
        containers = [{"name": "whoami", "image": "whoami", "ports": listed}]
        metadata = {
            "name": name,
            "labels": {"app": app},
            "annotations": {DRAIN_ANNOTATION: str(drain)},
        }
        pod = {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": NODES[node], "containers": containers} | spec}
        self.cluster.create(pod, self.namespace)

    async def ready(self, *names: str) -> None:
        """Wait until pods are ready, and store their addresses."""
        for name in names:
            await self.live.until(partial(self.has_condition, name, "Ready", "True"), f"pod {name} is ready")
            self.live.note_addresses(f"{self.namespace}/{name}", self.cluster.get("pods", name, self.namespace))

    def has_condition(self, name: str, condition: str, status: str) -> bool:
        """Return whether a condition of a pod has this status."""
        stated = self.cluster.get("pods", name, self.namespace)["status"].get("conditions") or ()
        return any(c["type"] == condition and c["status"] == status for c in stated)

    def probe_succeeds(self, name: str, *, succeeds: bool) -> None:
        """Make a pod's readiness probe succeed or fail from now on."""
        annotations = {READY_ANNOTATION: str(succeeds).lower()}
        self.cluster.patch("pods", name, {"metadata": {"annotations": annotations}}, self.namespace)

    def delete_pod(self, name: str, grace: int | None = None) -> None:
        """Delete a pod, which is terminating until its drain time is over; with a `grace` of 0 it ends at once."""
        self.cluster.delete("pods", name, self.namespace, grace)

    async def gone(self, name: str) -> None:
        """Wait until a deleted pod has ended."""
        there = (self.namespace, name)
        await self.live.until(lambda: not self.cluster.store.get("pods", there), f"pod {name} is gone")

    async def replicas(self, app: str, count: int) -> str:
        """Make a ReplicationController run this number of pods; return their names as one text, sorted."""
        if not self.cluster.store.get("replicationcontrollers", (self.namespace, app)):
            self.cluster.create(whoami_rc(app, count), self.namespace)
        self.cluster.scale(app, count, self.namespace)
        pods = await self.cluster.pods_ready(f"app={app}", count, self.namespace, TIMEOUT)
        for pod in pods:
            self.live.note_addresses(f"{self.namespace}/{pod['metadata']['name']}", pod)
        return " ".join(sorted(pod["metadata"]["name"] for pod in pods))

    # Services

    def service(self, name: str = "web", labels: Json | None = None, **spec: Any) -> Json:
        """Create a Service on port 80 for the pods whose app has its name; by TCP and UDP unless ports are given."""
        spec = copy.deepcopy({"ports": PORTS, "selector": {"app": name}} | spec)
        metadata = {"name": name} | ({"labels": labels} if labels else {})
        body = {"kind": "Service", "metadata": metadata, "spec": spec}
        return self.cluster.create(body, self.namespace)

    def patch(self, name: str = "web", **spec: Any) -> Json:
        """Change fields of a Service's spec; return the changed Service."""
        return self.cluster.patch("services", name, {"spec": spec}, self.namespace)

    def label(self, name: str, **labels: str | None) -> None:
        """Change a Service's labels; None removes one. Names are those of service.kubernetes.io, with _ for -."""
        full = {f"service.kubernetes.io/{key.replace('_', '-')}": value for key, value in labels.items()}
        self.cluster.patch("services", name, {"metadata": {"labels": full}}, self.namespace)

    def get(self, name: str = "web") -> Json:
        """Return the present Service."""
        return self.cluster.get("services", name, self.namespace)

    def delete_service(self, name: str = "web") -> None:
        """Delete a Service; the EndpointSlice controller deletes its slices."""
        self.cluster.delete("services", name, self.namespace)

    def front(
        self, kind: str = "cluster", name: str = "web", family: str = "IPv4", port: int = 0, host: str = "node"
    ) -> Front:
        """Return the address of a Service: cluster, external, loadbalancer, or nodeport on a host."""
        return front_of(self.get(name), kind, family, port, self.live.ips[host])

    async def balanced(self, name: str = "web") -> None:
        """Wait until a Service has its load balancer."""
        await self.live.until(lambda: self.get(name)["status"]["loadBalancer"].get("ingress"), "a load balancer")

    def slice_of(self, pods: str, ports: list[Json], name: str = "slice", hints: Json | None = None) -> None:
        """Create a slice of the Service `web` without the controller, with pods of the scenario; `hints` are by pod."""
        endpoints = []
        for pod in pods.split():
            endpoint = {"addresses": [self.live.ips[f"{self.namespace}/{pod}"]["IPv4"]]}
            endpoint["nodeName"] = self.cluster.get("pods", pod, self.namespace)["spec"]["nodeName"]
            endpoints.append(endpoint | ({"hints": hints[pod]} if hints else {}))
        body = {
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": ports,
        }
        self.cluster.create(body, self.namespace)

    # expected answers

    async def expect(self, front: Front, wanted: Mapping[str, str], protocols: str = "tcp udp") -> None:
        """Wait until every place gets the expected answer."""
        known = {self.place(place): self._answer(answer) for place, answer in wanted.items()}
        await self.live.expect(front, known, protocols)

    async def reachable(self, pods: str, name: str = "web", protocols: str = "tcp udp", family: str = "IPv4") -> None:
        """Wait until every client reaches all these pods: by the cluster IP, and by both nodes' NodePort."""
        fronts = [self.front(name=name, family=family)]
        if self.get(name)["spec"]["ports"][0].get("nodePort"):
            fronts += [self.front("nodeport", name, family, host=host) for host in ("node", "neighbour")]
        await asyncio.gather(*(self.expect(front, everybody(pods), protocols) for front in fronts))

    async def unanswered(self, *fronts: Front, protocols: str = "tcp udp", places: Iterable[str] = EVERYBODY) -> None:
        """Wait until no client gets an answer any more; the kind of failure depends on the mode and on the route."""
        asked = list(itertools.product(places, protocols.split(), fronts))

        async def check() -> str:
            probes = (self.cluster.probe(self.place(place), proto, *front, 0.25) for place, proto, front in asked)
            answers = zip(asked, await asyncio.gather(*probes), strict=True)
            return "\n".join(f"{what}: {answer}" for what, answer in answers if isinstance(answer, Answer))

        await self.live.eventually(check)

    async def met(self, front: Front, count: int, proto: str = "tcp", place: str = "client-a") -> set[str]:
        """Return the pods that a client reaches in this number of connections, or the reason why it reaches none."""
        answers = await self.cluster.probes(self.place(place), proto, *front, count, 3.0)
        return {answer.pod if isinstance(answer, Answer) else str(answer) for answer in answers}

    async def sticks(self, front: Front, pods: str, proto: str = "tcp", place: str = "client-a") -> None:
        """Wait until fifteen connections in a row, as upstream requires, reach the same one of these pods."""

        async def check() -> str:
            met = await self.met(front, 15, proto, place)
            return "" if len(met) == 1 and met <= set(pods.split()) else f"{front} {proto}: met {sorted(met)}"

        await self.live.eventually(check)

    def place(self, name: str) -> str:
        """Return the place that a word stands for here."""
        return f"{self.namespace}/{name}" if f"{self.namespace}/{name}" in self.live.ips else name

    def _answer(self, answer: str) -> str:
        # A proxy that relays the bytes connects from the node's own address.
        return self.mode.seen(answer)

    async def health(self, host: str, port: int, wanted: int | None) -> None:
        """Wait until a node's health check port answers with a status, or (None) is closed."""
        address = self.live.ips[host]["IPv4"]

        async def check() -> str:
            try:
                status, _ = await run_in_async(
                    self.cluster.namespace_of("outside"), lambda: http_get(address, port, "/healthz", 3.0)
                )
            except ConnectionError as error:
                return "" if wanted is None else str(error)
            return "" if status == wanted else f"the health check port of {host} says {status}, not {wanted}"

        await self.live.eventually(check)

    def endpoints(self, name: str = "web") -> list[Json]:
        """Return all endpoints of a Service's slices."""
        slices = self.cluster.select("endpointslices", f"kubernetes.io/service-name={name}", self.namespace)
        return [endpoint for entry in slices for endpoint in entry.get("endpoints") or ()]


def _container_ports(port: int | Json) -> list[Json]:
    if isinstance(port, dict):
        return [port]
    return [{"containerPort": port, "protocol": protocol} for protocol in ("TCP", "UDP")]
