"""Whose an address is that clients send to: Services by frontend, as they come and change. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from kubeproxy.model.addresses import Family, is_loopback
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


def nodeport_addresses(
    asked: Mapping[Family, Collection[bytes] | None], local: Mapping[Family, Iterable[bytes]]
) -> Mapping[Family, frozenset[bytes]]:
    """Return the packed addresses on which NodePorts answer: those asked for; None is all local ones but loopback."""
    return {
        family: frozenset([a for a in local[family] if not is_loopback(a)] if given is None else given)
        for family, given in asked.items()
    }


Owner = TypeVar("Owner")


class Targets(Generic[Owner]):
    """Who has what clients send to. `node` has the addresses on which NodePorts answer, by family."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        self._node = node
        self._owners: dict[bytes, Owner] = {}

    def give(self, keys: Iterable[bytes], owner: Owner) -> None:
        """Have an owner for these keys; who had one of them before has it no more."""
        self._owners.update(dict.fromkeys(keys, owner))

    def of(self, target: bytes) -> Owner | None:
        """Return whose a connection to `target` is (see kernel.tracked.Tracked), None for nobody's."""
        if (owner := self._owners.get(target)) is not None:
            return owner
        address = target[:-NODEPORT_KEY]
        family = Family.IPV4 if len(address) == 4 else Family.IPV6
        owner = self._owners.get(_nodeport(family, target[-NODEPORT_KEY:]))
        return owner if owner is not None and address in self._node.get(family, ()) else None


class Owners(Targets[str]):
    """Services by what clients send to, as they come and change."""

    def __init__(self, node: Mapping[Family, frozenset[bytes]]) -> None:
        super().__init__(node)
        self._keys: dict[str, Sequence[bytes]] = {}

    def put(self, service: str, keys: Sequence[bytes]) -> None:
        """Take what a Service has from now on; nothing for one that is gone."""
        for key in self._keys.pop(service, ()):
            if self._owners.get(key) == service:
                del self._owners[key]
        if keys:
            self._keys[service] = keys
            self.give(keys, service)
