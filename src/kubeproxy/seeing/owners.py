"""Whose an address is that clients send to: Services by frontend, as they come and change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import NODEPORT_KEY, FrontendKind, ServicePlan

Keys = tuple[bytes, ...]
"""The frontends of a Service: their keys, a NodePort's with the family before it, as it has no address."""


def keys_of(plans: Iterable[ServicePlan]) -> Keys:
    """Return the frontends of a Service's plans."""
    return tuple(_keys(plans))


def _keys(plans: Iterable[ServicePlan]) -> Iterator[bytes]:
    for plan in plans:
        for frontend in plan.frontends:
            is_nodeport = frontend.kind is FrontendKind.NODEPORT
            yield _nodeport(plan.key.family, frontend.nodeport_key) if is_nodeport else frontend.key


def _nodeport(family: int, key: bytes) -> bytes:
    return bytes([family]) + key


class Owners:
    """Services by what clients send to. `node` has the addresses on which NodePorts answer, by family."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        self._node = node
        self._owners: dict[bytes, str] = {}
        self._keys: dict[str, Sequence[bytes]] = {}

    def put(self, service: str, keys: Sequence[bytes]) -> None:
        """Take what a Service has from now on; nothing for one that is gone."""
        for key in self._keys.pop(service, ()):
            if self._owners.get(key) == service:
                del self._owners[key]
        if keys:
            self._keys[service] = keys
            self._owners.update(dict.fromkeys(keys, service))

    def of(self, target: bytes) -> str | None:
        """Return whose a connection to `target` is (see kernel.tracked.Tracked), None for nobody's."""
        if (owner := self._owners.get(target)) is not None:
            return owner
        address = target[:-NODEPORT_KEY]
        family = Family.IPV4 if len(address) == 4 else Family.IPV6
        owner = self._owners.get(_nodeport(family, target[-NODEPORT_KEY:]))
        return owner if owner is not None and address in self._node.get(family, ()) else None
