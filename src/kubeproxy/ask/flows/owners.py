"""Maps a destination of clients to its Service and port, and follows changes of Services. Pure. The process that
follows connections for the page receives the changes as JSON lines: a FollowedNode, Fronts, and COMPLETE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, is_loopback
from kubeproxy.model.plan import NODEPORT_KEY, FrontendKind, ServicePlan

Keys = tuple[bytes, ...]
"""The keys of a Service's frontends. The key of a NodePort begins with its family, because a NodePort
has no address.
"""


def keys_of(plans: Iterable[ServicePlan]) -> Keys:
    """Return the frontends of a Service's plans."""
    return tuple(
        _nodeport(plan.key.family, one.nodeport_key) if one.kind is FrontendKind.NODEPORT else one.key
        for plan in plans
        for one in plan.frontends
    )


def keys_by_port(plans: Iterable[ServicePlan]) -> dict[str, Keys]:
    """Return the frontends of a Service's plans by port and family, such as http/TCP/IPv4."""
    named = ((plan.key, plan) for plan in plans)
    return {f"{k.port_name}/{PROTOCOL_NAMES[k.protocol]}/{k.family.label}": keys_of([plan]) for k, plan in named}


def _nodeport(family: int, key: bytes) -> bytes:
    return bytes([family]) + key


def nodeport_addresses(
    asked: Mapping[Family, Collection[bytes] | None], local: Mapping[Family, Iterable[bytes]]
) -> Mapping[Family, frozenset[bytes]]:
    """Return the packed addresses on which NodePorts answer; None stands for all local addresses except loopback."""
    return {
        family: frozenset([a for a in local[family] if not is_loopback(a)] if given is None else given)
        for family, given in asked.items()
    }


Owner = TypeVar("Owner")


class Targets(Generic[Owner]):
    """Maps a destination to its owner. `node`: the addresses on which NodePorts answer, by family."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        self._node = node
        self._owners: dict[bytes, Owner] = {}

    def give(self, keys: Iterable[bytes], owner: Owner) -> None:
        """Set the owner of these keys; an earlier owner loses the keys."""
        self._owners.update(dict.fromkeys(keys, owner))

    def of(self, target: bytes) -> Owner | None:
        """Return the owner of a connection to `target` (see kernel.tracked.Tracked); None for no owner."""
        if (owner := self._owners.get(target)) is not None:
            return owner
        address = target[:-NODEPORT_KEY]
        family = Family.IPV4 if len(address) == 4 else Family.IPV6
        owner = self._owners.get(_nodeport(family, target[-NODEPORT_KEY:]))
        return owner if owner is not None and address in self._node.get(family, ()) else None


class Owners(Targets[tuple[str, str]]):
    """Maps destinations of clients to Services and ports, and follows their changes."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        super().__init__(node)
        self._ports: dict[str, Mapping[str, Sequence[bytes]]] = {}

    def put(self, service: str, ports: Mapping[str, Sequence[bytes]]) -> None:
        """Replace the keys of a Service's ports (see keys_by_port); `ports` is empty for a deleted Service."""
        for port, keys in self._ports.pop(service, {}).items():
            for key in keys:
                if self._owners.get(key) == (service, port):
                    del self._owners[key]
        if ports:
            self._ports[service] = ports
        for port, keys in ports.items():
            self.give(keys, (service, port))


class FollowedNode(Struct, frozen=True):
    """The first line."""

    mode: str
    nodeports: dict[int, tuple[bytes, ...] | None]  # packed addresses of NodePorts by family; None: all local addresses


class Fronts(Struct, frozen=True, array_like=True):
    """A later line: the present frontends of a Service (see keys_by_port); empty for a deleted Service."""

    service: str
    ports: Mapping[str, Sequence[bytes]]


COMPLETE: Final = b"complete"
"""The line that ends the initial list of Services. The lines after it are changes."""
