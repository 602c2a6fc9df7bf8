"""Allocates cluster IPs and node ports.

The Services in the store determine the used addresses and ports, so a failed or bulk write needs no bookkeeping. Like
the real allocators, it allocates addresses from the upper part of a range first, so that they rarely conflict with
addresses from the lower part that users choose (KEP-3070, KEP-3668). Unlike the real allocators it allocates in order,
so that each demo has the same addresses."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from lab.apiserver.status import Json
from lab.apiserver.store import Change, Record, Store

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
FIRST_NODE_PORT, LAST_NODE_PORT = 30000, 32767
NodePort = tuple[str, int]
"""(protocol, port)."""


def canonical(address: str) -> str:
    """Return an IP address in its canonical form; raises ValueError."""
    return str(ipaddress.ip_address(address))


def addresses_of(service: Json) -> list[str]:
    """Return the allocated cluster IPs of a Service."""
    spec = service.get("spec") or {}
    ips = spec.get("clusterIPs") or ([spec["clusterIP"]] if spec.get("clusterIP") else [])
    return [ip for ip in ips if ip and ip != "None"]


def node_ports_of(service: Json) -> list[NodePort]:
    """Return the node ports of a Service; the health check port counts as TCP."""
    spec = service.get("spec") or {}
    ports = {(p.get("protocol") or "TCP", p["nodePort"]) for p in spec.get("ports") or () if p.get("nodePort")}
    if spec.get("healthCheckNodePort"):
        ports.add(("TCP", spec["healthCheckNodePort"]))
    return sorted(ports)


_T = TypeVar("_T")


def _add(counter: Counter[_T], keys: Iterable[_T], by: int) -> None:
    for key in keys:
        counter[key] += by
        if counter[key] <= 0:
            del counter[key]


class Range:
    """The addresses of one ServiceCIDR."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.family = "IPv4" if network.version == 4 else "IPv6"
        size = network.num_addresses
        self._static = min(max(16, size // 16), 256) if size > 32 else 0
        self._next = self._candidates()

    def _candidates(self) -> Iterator[str]:
        last = self.network.num_addresses - (2 if self.network.version == 4 else 1)
        while True:
            for offset in (*range(self._static or 1, last + 1), *range(1, self._static)):
                yield str(self.network[offset])

    def free(self, taken: Counter[str]) -> str | None:
        """Return the next free address, None if there is none."""
        for _ in range(self.network.num_addresses):
            candidate = next(self._next)
            if candidate not in taken:
                return candidate
        return None


class Allocations:
    """Follows the Services in the store, and allocates free cluster IPs and node ports."""

    def __init__(self, store: Store, cidrs: tuple[str, ...]) -> None:
        self.ranges = [Range(ipaddress.ip_network(c)) for c in cidrs]
        self._store = store
        self._addresses: Counter[str] = Counter()
        self._ports: Counter[NodePort] = Counter()
        # KEP-3668: the lower part of the range is reserved for ports that users choose.
        size = LAST_NODE_PORT - FIRST_NODE_PORT + 1
        self._next_port = FIRST_NODE_PORT + min(max(16, size // 32), 128)
        for record in store.records("services"):
            self._count(record, 1)
        store.subscribe("services", self._on_change)

    @property
    def families(self) -> tuple[str, ...]:
        """The IP families of the cluster, the primary first."""
        return tuple(dict.fromkeys(r.family for r in self.ranges))

    def _on_change(self, change: Change) -> None:
        if change.old is not None:
            self._count(change.old, -1)
        if change.type != "DELETED":
            self._count(change.new, 1)

    def _count(self, record: Record, by: int) -> None:
        service = record.decode()
        _add(self._addresses, addresses_of(service), by)
        _add(self._ports, node_ports_of(service), by)

    def next_address(self, family: str) -> str | None:
        """Return a free cluster IP of the family; None if the range is full or the cluster lacks the family."""
        for candidates in self.ranges:
            if candidates.family == family and (free := candidates.free(self._addresses)):
                return free
        return None

    def why_not_address(self, address: str) -> str:
        """Return the reason why this address cannot be allocated, '' if it is free."""
        ip = ipaddress.ip_address(address)
        if not any(ip in network for network in self._networks()):
            return f"failed to allocate IP {address}: the provided network does not match the current range"
        if str(ip) in self._addresses:
            return f"failed to allocate IP {address}: provided IP is already allocated"
        return ""

    def _networks(self) -> list[Network]:
        """Return the ranges of addresses that users may choose: the range for automatic allocation, and later
        ServiceCIDRs (KEP-1880)."""
        later = [c for record in self._store.records("servicecidrs") for c in record.decode()["spec"]["cidrs"]]
        return [*(r.network for r in self.ranges), *map(ipaddress.ip_network, later)]

    def next_port(self, avoid: set[NodePort]) -> int | None:
        """Return a node port that is free for every protocol; None if there is none."""
        size = LAST_NODE_PORT - FIRST_NODE_PORT + 1
        for _ in range(size):
            port = self._next_port
            self._next_port = FIRST_NODE_PORT + (port + 1 - FIRST_NODE_PORT) % size
            if not any((p, port) in self._ports or (p, port) in avoid for p in ("TCP", "UDP", "SCTP")):
                return port
        return None

    def why_not_port(self, protocol: str, port: int) -> str:
        """Return the reason why this node port cannot be allocated, '' if it is free."""
        if not FIRST_NODE_PORT <= port <= LAST_NODE_PORT:
            bounds = f"{FIRST_NODE_PORT}-{LAST_NODE_PORT}"
            return f"provided port is not in the valid range. The range of valid ports is {bounds}"
        return "provided port is already allocated" if (protocol, port) in self._ports else ""
