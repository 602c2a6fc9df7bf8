"""Tracked connections, counted by service port, endpoint and client. A connection belongs to the service port to which
the client connected. In a mode in which clients' connections end at the proxy, an endpoint's connections are this
node's own connections to the endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field

from kubeproxy.ask.flows.owners import PortOwner, Targets, endpoint_text, keys_of, keys_of_ranges
from kubeproxy.kernel.conntrack.tracked import Tracked
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, destination_text, endpoint_id, unpack
from kubeproxy.model.plan import NODEPORT_KEY, ServicePlan

MOST_CLIENTS: Final = 1 << 16
"""Maximum number of clients that are counted separately, for all service ports together; the other clients share a
count."""

OTHERS: Final = "others"
"""Stands for the address of the clients that share a count."""
_NOBODY: Final = b""


class ConnectionCount(Struct):
    """Numbers of connections by state."""

    connections: int = 0  # open
    closing: int = 0  # closed, but still in the table
    unanswered: int = 0  # open and without a reply so far
    began: int = 0  # began while this program listened

    def fields(self) -> dict[str, int]:
        """Return the fields that the use of a port, an endpoint and a client share."""
        return {"connections": self.connections, "closing": self.closing, "unanswered": self.unanswered}


class ServedPort(PortOwner, eq=False, kw_only=True):
    """A service port, or a range of ports, of one family, with its connections."""

    family: Family
    endpoints: frozenset[bytes]
    total: ConnectionCount = field(default_factory=ConnectionCount)
    by_endpoint: dict[bytes, ConnectionCount] = field(default_factory=dict)
    by_client: dict[bytes, ConnectionCount] = field(default_factory=dict)  # b'': all clients without a separate count


class ServedPorts(Targets[ServedPort]):
    """Maps destinations of clients to service ports."""

    def __init__(self, plans: Iterable[ServicePlan], node: Mapping[Family, frozenset[bytes]]) -> None:
        super().__init__(node)
        self.all: list[ServedPort] = []
        self._by_endpoint: dict[bytes, ServedPort] = {}
        for plan in plans:
            self._take(plan)

    def _take(self, plan: ServicePlan) -> None:
        key, serving = plan.key, frozenset(plan.serving)
        service, protocol = f"{key.namespace}/{key.name}", PROTOCOL_NAMES[key.protocol]
        name = f"{key.port_name}/{protocol}" if key.port_name else protocol
        port = ServedPort(service, name, family=key.family, endpoints=serving)
        self.all.append(port)
        self.give(keys_of([plan]), port)
        for ports, keys in keys_of_ranges(plan).items():
            addresses = frozenset([endpoint[:-2] for endpoint in serving])
            self.all.append(ServedPort(service, ports, is_range=True, family=key.family, endpoints=addresses))
            self.give(keys, self.all[-1])
        for endpoint in plan.serving:
            self._by_endpoint.setdefault(endpoint_id(endpoint, key.protocol), port)

    def served_by(self, target: bytes) -> ServedPort | None:
        """Return a service port with the endpoint `target`."""
        return self._by_endpoint.get(target)


class Census:
    """Counts connections. `own` are the node's addresses in a mode that ends connections at the proxy, else None."""

    def __init__(self, ports: ServedPorts, own: frozenset[bytes] | None) -> None:
        self._ports = ports
        self._own = own
        self._clients = 0

    def add(self, entry: Tracked, *, silent: bool) -> None:
        """Count an entry of the table; `silent` means that both readings found the entry unanswered."""
        port, counts, is_client = self._place(entry)
        if port is not None and is_client:
            counts += [port.total, self._client(port, entry.client[:-2])]
        elif port is not None and silent:
            port.total.unanswered += 1
        for count in counts:
            if entry.over:
                count.closing += 1
            else:
                count.connections += 1
                count.unanswered += silent

    def began(self, entry: Tracked, weight: int) -> None:
        """Count the beginning of a sampled connection `weight` times."""
        port, counts, is_client = self._place(entry)
        for count in (*counts, *([port.total] if port is not None and is_client else ())):
            count.began += weight

    def _place(self, entry: Tracked) -> tuple[ServedPort | None, list[ConnectionCount], bool]:
        """Return the port of an entry, the count of its endpoint (none for a connection to the proxy), and whether the
        entry is a client's connection."""
        port, is_client = self._ports.of(entry.target), True
        if port is None and self._own is not None and entry.client[:-2] in self._own:
            port, is_client = self._ports.served_by(entry.target), False
        if port is None or (is_client and self._own is not None):
            return port, [], is_client
        endpoint = port.endpoint(entry.server) if is_client else entry.server
        return port, [port.by_endpoint.setdefault(endpoint, ConnectionCount())], is_client

    def _client(self, port: ServedPort, client: bytes) -> ConnectionCount:
        count = port.by_client.get(client)
        if count is None:
            self._clients += 1
            where = client if self._clients <= MOST_CLIENTS else _NOBODY
            count = port.by_client.setdefault(where, ConnectionCount())
        return count


class _Use(Struct, frozen=True, rename="camel"):
    connections: int
    closing: int
    unanswered: int


class ClientUse(_Use, frozen=True):
    """The connections of one client. The address is 'others' for all clients that are counted together."""

    address: str
    pod: str  # '' if unknown


class EndpointUse(ClientUse, frozen=True):
    """The use of one endpoint."""

    share: float  # of the port's open and closing connections: most short ones are closing when they are read
    new_per_second: float
    serving: bool  # False for a removed endpoint


class PortUse(_Use, frozen=True):
    """The use of a service port, or of a range of ports, of one family."""

    service: str
    port: str
    family: str
    new_per_second: float
    endpoints: tuple[EndpointUse, ...]
    clients: tuple[ClientUse, ...]


def numbers(use: EndpointUse | PortUse) -> tuple[float, ...]:
    """Return the numbers of connections, of new connections per second, of unanswered and of closing connections."""
    return use.connections, use.new_per_second, use.unanswered, use.closing


def uses(port: ServedPort, seconds: float, pods: Mapping[bytes, str]) -> PortUse:
    """Return the use of a service port, the busiest endpoints and clients first. `pods` has names by packed address."""
    known = sum(count.connections + count.closing for count in port.by_endpoint.values())
    everyone = {endpoint: ConnectionCount() for endpoint in port.endpoints} | port.by_endpoint

    def ranked(counts: Mapping[bytes, ConnectionCount]) -> list[tuple[bytes, ConnectionCount]]:
        return sorted(counts.items(), key=lambda item: (-item[1].connections, -item[1].closing, item[0]))

    return PortUse(
        service=port.service,
        port=port.port,
        family=port.family.label,
        new_per_second=round(port.total.began / seconds, 1),
        endpoints=tuple(
            EndpointUse(
                address=endpoint_text(endpoint),
                pod=pods.get(endpoint if port.is_range else endpoint[:-2], ""),
                share=(count.connections + count.closing) / known if known else 0.0,
                new_per_second=round(count.began / seconds, 1),
                serving=endpoint in port.endpoints,
                **count.fields(),
            )
            for endpoint, count in ranked(everyone)
        ),
        clients=tuple(
            ClientUse(address=unpack(client) if client else OTHERS, pod=pods.get(client, ""), **count.fields())
            for client, count in ranked(port.by_client)
        ),
        **port.total.fields(),
    )


def target_text(target: bytes) -> str:
    """Return a client's destination as 'address:port'."""
    return destination_text(target[:-NODEPORT_KEY] + target[-2:])
