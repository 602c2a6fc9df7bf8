"""Who owns an address and port that several Services ask for: whom the API server gave it, then the oldest.

Source: CVE-2020-8554 (who may write externalIPs must not take other Services' addresses); the Go kube-proxy leaves it
to chance.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

from msgspec import Struct, structs

from kubeproxy.model.plan import ServiceName


class Right(IntEnum):
    """Why a Service may have a key; the smaller one wins."""

    ALLOCATED = 0  # the API server gave it to this Service: cluster IPs, NodePorts
    WRITTEN = 1  # somebody wrote it into the object: external IPs, load balancers' addresses


class Claimant(Struct, frozen=True, order=True, gc=False):
    """A Service that asks for keys by some right; the smallest has them. `created` is RFC 3339: text order is age."""

    right: Right
    created: str
    namespace: str
    name: str

    @property
    def writing(self) -> Claimant:
        """Return the same Service as it asks for what is written into it."""
        return structs.replace(self, right=Right.WRITTEN)

    @property
    def service(self) -> ServiceName:
        """Return the Service's namespace and name."""
        return self.namespace, self.name

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Claims:
    """The frontends of one family and their owners. A key is a frontend's: an address, or a NodePort without one.

    `written` are the keys that Services ask for because somebody wrote them.
    """

    def __init__(self) -> None:
        self.written: dict[ServiceName, tuple[bytes, ...]] = {}
        self._owner: dict[bytes, Claimant] = {}
        self._contested: dict[bytes, list[Claimant]] = {}

    def replace(
        self, old: Claimant | None, new: Claimant | None, before: Collection[bytes], after: Collection[bytes]
    ) -> set[ServiceName]:
        """Replace a Service's claims of one right; return the other Services that ask for a key whose owner changed.

        `old` and `new` differ when a Service was deleted and made again with another age.
        """
        touched: set[ServiceName] = set()
        if old is not None and before:
            keys = set(after)
            for key in before:
                if old != new or key not in keys:
                    touched |= self._release(key, old)
        if new is not None:
            for key in after:
                owner = self._owner.setdefault(key, new)
                if owner is not new and owner != new:
                    touched |= self._contest(key, new)
        if touched and new is not None:
            touched.discard(new.service)
        return touched

    def replace_written(
        self, name: ServiceName, old: Claimant | None, new: Claimant | None, after: tuple[bytes, ...]
    ) -> set[ServiceName]:
        """Replace what a Service asks for because somebody wrote it; return whom that concerns, as `replace` does."""
        before = self.written.pop(name, ())
        if after:
            self.written[name] = after
        return self.replace(old and old.writing, new and new.writing, before, after)

    @property
    def contested(self) -> bool:
        """Return whether any key has more than one claimant."""
        return bool(self._contested)

    def owner(self, key: bytes) -> Claimant | None:
        """Return who holds a key."""
        return self._owner.get(key)

    def _release(self, key: bytes, claimant: Claimant) -> set[ServiceName]:
        waiting = self._contested.get(key)
        if waiting is None:
            if self._owner.get(key) == claimant:
                del self._owner[key]
            return set()
        waiting = [c for c in waiting if c != claimant]
        return self._settle(key, waiting)

    def _contest(self, key: bytes, claimant: Claimant) -> set[ServiceName]:
        waiting = self._contested.get(key) or [self._owner[key]]
        if claimant in waiting:
            return set()
        return self._settle(key, sorted([*waiting, claimant]))

    def _settle(self, key: bytes, waiting: list[Claimant]) -> set[ServiceName]:
        """Give the key to the first; when that is another one, return all who ask for it: they report the owner."""
        before = self._owner.get(key)
        if len(waiting) > 1:
            self._contested[key] = waiting
        else:
            self._contested.pop(key, None)
        if not waiting:
            self._owner.pop(key, None)
            return set()
        self._owner[key] = waiting[0]
        return {claimant.service for claimant in waiting} if before != waiting[0] else set()
