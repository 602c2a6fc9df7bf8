"""Maps a destination of clients to its Service and port, and follows changes of Services. The process that follows
connections for the page receives the changes as JSON lines: a FollowedNode, Fronts, and COMPLETE."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES, Family, destination_text, is_loopback, unpack
from kubeproxy.model.plan import NODEPORT_KEY, FrontendKind, ServicePlan

Keys = tuple[bytes, ...]
"""The keys of a Service's frontends. The key of a NodePort begins with its family, because a NodePort has no address.
The key of a range of ports ends with its last port."""

_RANGE_SIZES: Final = frozenset({9, 21})  # sizes of keys with address, protocol, first and last port: IPv4, IPv6


def keys_of(plans: Iterable[ServicePlan]) -> Keys:
    """Return the keys of the frontends in a Service's plans."""
    return tuple(
        _nodeport(plan.key.family, one.nodeport_key) if one.kind is FrontendKind.NODEPORT else one.key
        for plan in plans
        for one in plan.frontends
    )


def keys_by_port(plans: Iterable[ServicePlan]) -> dict[str, Keys]:
    """Return the frontends of a Service's plans by port and family, such as http/TCP/IPv4."""
    found: dict[str, Keys] = {}
    for plan in plans:
        key, family = plan.key, plan.key.family.label
        found[f"{key.port_name}/{PROTOCOL_NAMES[key.protocol]}/{family}"] = keys_of([plan])
        found |= {f"{ports}/{family}": keys for ports, keys in keys_of_ranges(plan).items()}
    return found


def keys_of_ranges(plan: ServicePlan) -> dict[str, Keys]:
    """Return the keys of a plan's ranges of ports, by their ports, such as 10000-20000/UDP."""
    found: dict[str, Keys] = {}
    for span in plan.port_ranges:
        found[span.port_text] = (*found.get(span.port_text, ()), span.key + PORT_BYTES[span.last])
    return found


def _nodeport(family: int, key: bytes) -> bytes:
    return bytes([family]) + key


def nodeport_addresses(
    asked: Mapping[Family, Collection[bytes] | None], local: Mapping[Family, Iterable[bytes]]
) -> Mapping[Family, frozenset[bytes]]:
    """Return the packed addresses on which NodePorts answer. None in `asked` stands for all local addresses except
    loopback."""
    return {
        family: frozenset([a for a in local[family] if not is_loopback(a)] if given is None else given)
        for family, given in asked.items()
    }


class PortOwner(Struct):
    """A Service and its port or range of ports."""

    service: str
    port: str
    is_range: bool = False

    def endpoint(self, server: bytes) -> bytes:
        """Return the endpoint of a connection to a packed address and port: for a range of ports, only the address."""
        return server[:-2] if self.is_range else server


def endpoint_text(endpoint: bytes) -> str:
    """Return the text of an endpoint of a PortOwner."""
    return unpack(endpoint) if len(endpoint) in {4, 16} else destination_text(endpoint)


Owner = TypeVar("Owner", bound=PortOwner)


class Targets(Generic[Owner]):
    """Maps a destination to its owner. `node` has the addresses on which NodePorts answer, by family."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        self._node = node
        self._owners: dict[bytes, Owner] = {}
        self._ranges: dict[bytes, dict[bytes, Owner]] = {}  # by address and protocol, then by key

    def give(self, keys: Iterable[bytes], owner: Owner) -> None:
        """Set the owner of these keys; an earlier owner loses the keys."""
        for key in keys:
            self._holder(key)[key] = owner

    def _holder(self, key: bytes) -> dict[bytes, Owner]:
        return self._ranges.setdefault(key[:-4], {}) if len(key) in _RANGE_SIZES else self._owners

    def of(self, target: bytes) -> Owner | None:
        """Return the owner of a connection to `target` (see conntrack.tracked.Tracked), or None without an owner."""
        if (owner := self._owners.get(target)) is not None:
            return owner
        address = target[:-NODEPORT_KEY]
        family = Family.IPV4 if len(address) == 4 else Family.IPV6
        owner = self._owners.get(_nodeport(family, target[-NODEPORT_KEY:]))
        if owner is not None and address in self._node.get(family, ()):
            return owner
        ranges, port = self._ranges.get(target[:-2], {}).items(), target[-2:]
        return next((owner for key, owner in ranges if key[-4:-2] <= port <= key[-2:]), None)


class Owners(Targets[PortOwner]):
    """Maps destinations of clients to Services and ports, and follows their changes."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        super().__init__(node)
        self._ports: dict[str, Mapping[str, Sequence[bytes]]] = {}

    def put(self, service: str, ports: Mapping[str, Sequence[bytes]]) -> None:
        """Replace the keys of a Service's ports (see keys_by_port); `ports` is empty for a deleted Service."""
        for port, keys in self._ports.pop(service, {}).items():
            for key in keys:
                owner = self._holder(key).get(key)
                if owner is not None and (owner.service, owner.port) == (service, port):
                    del self._holder(key)[key]
        if ports:
            self._ports[service] = ports
        for port, keys in ports.items():
            self.give(keys, PortOwner(service, port, any(len(key) in _RANGE_SIZES for key in keys)))


class FollowedNode(Struct, frozen=True):
    """The first line of the input: the node's addresses for NodePorts."""

    mode: str
    nodeports: dict[int, tuple[bytes, ...] | None]  # addresses of NodePorts by family, or None for all local ones


class Fronts(Struct, frozen=True, array_like=True):
    """A later line with the present frontends of a Service (see keys_by_port); empty for a deleted Service."""

    service: str
    ports: Mapping[str, Sequence[bytes]]


COMPLETE: Final = b"complete"
"""The line that ends the initial list of Services; the following lines are changes."""
