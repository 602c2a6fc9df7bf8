"""A substitute for a cloud's load balancer: an IPv4 address for each LoadBalancer Service, routed to healthy nodes.

A Service with `healthCheckNodePort` gets the nodes whose health port answers 200, other Services get all nodes.
"""

from __future__ import annotations

import ipaddress
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from e2e.api import Api, Json
from e2e.layout import CLIENT, LOAD_BALANCERS, NODES


class Pool:
    """Addresses of Services by `namespace/name`."""

    def __init__(self, network: str = LOAD_BALANCERS) -> None:
        self._free = [str(address) for address in ipaddress.ip_network(network).hosts()]
        self.given: dict[str, str] = {}

    def give(self, key: str) -> str:
        """Return the address of a Service, the same at each call."""
        if key not in self.given:
            self.given[key] = self._free.pop(0)
        return self.given[key]

    def take_back(self, living: Iterable[str]) -> list[str]:
        """Return the addresses of deleted Services; they are allocated again last."""
        gone = [self.given.pop(key) for key in sorted(self.given.keys() - set(living))]
        self._free += gone
        return gone


def route(address: str, nodes: Sequence[str]) -> list[str]:
    """Return the arguments of `ip` that spread an address over nodes; unreachable without nodes."""
    if not nodes:
        return ["route", "replace", "unreachable", f"{address}/32"]
    hops = [word for node in nodes for word in ("nexthop", "via", node)]
    return ["route", "replace", f"{address}/32", "src", CLIENT, *hops]


def _key(service: Json) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"


def _healthy(node: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{node}:{port}/", timeout=0.5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


class LoadBalancer:
    """Repeated passes over all Services, with the routes of the previous pass."""

    def __init__(self, api: Api, run: Callable[[Sequence[str]], None], healthy: Callable[[str, int], bool]) -> None:
        self._api = api
        self._run = run
        self._healthy = healthy
        self._pool = Pool()
        self._routes: dict[str, list[str]] = {}

    def turn(self) -> None:
        """Read all Services, write addresses into their status, and set routes. Raises OSError."""
        services = self._api.get("/api/v1/services")["items"]
        wanted = [each for each in services if each["spec"]["type"] == "LoadBalancer"]
        for service in services:
            self._set_status(service, self._pool.give(_key(service)) if service in wanted else None)
        for service in wanted:
            self._set_route(service)
        for address in self._pool.take_back(map(_key, wanted)):
            if self._routes.pop(address, None) is not None:
                self._run(["route", "del", f"{address}/32"])

    def _set_status(self, service: Json, address: str | None) -> None:
        found = [each.get("ip") for each in service["status"].get("loadBalancer", {}).get("ingress") or ()]
        if found == ([address] if address else []):
            return
        ingress = [{"ip": address, "ipMode": "VIP"}] if address else None
        namespace, name = _key(service).split("/")
        path = f"/api/v1/namespaces/{namespace}/services/{name}/status"
        self._api.patch(path, {"status": {"loadBalancer": {"ingress": ingress}}})

    def _set_route(self, service: Json) -> None:
        nodes = [node.ipv4 for node in NODES]
        if port := service["spec"].get("healthCheckNodePort"):
            nodes = [node for node in nodes if self._healthy(node, port)]
        address = self._pool.give(_key(service))
        if self._routes.get(address) != nodes:
            self._run(route(address, nodes))
            self._routes[address] = nodes


def serve(folder: Path, pause: float = 0.5) -> None:
    """Update addresses and routes continuously until the process ends; errors are logged and retried."""

    def run(arguments: Sequence[str]) -> None:
        subprocess.run(["ip", *arguments], check=True)

    balancer = LoadBalancer(Api(folder), run, _healthy)
    while True:
        try:
            balancer.turn()
        except (OSError, subprocess.CalledProcessError) as e:
            print(f"load balancer: {e}", flush=True)
        time.sleep(pause)
