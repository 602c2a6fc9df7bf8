"""Who owns an address and port that several Services ask for: the oldest, until it lets go.

Source: DESIGN "Element keys can collide"; the Go kube-proxy leaves it to chance.
"""

from __future__ import annotations

from collections.abc import Collection

from kubeproxy.model.plan import ServiceName

Claimant = tuple[str, str, str]
"""Creation timestamp (RFC 3339, so text order is age), namespace and name: the smallest wins."""


class Claims:
    """The frontends of one family and their owners."""

    def __init__(self) -> None:
        self._owner: dict[bytes, Claimant] = {}
        self._contested: dict[bytes, list[Claimant]] = {}

    def replace(
        self, old: Claimant | None, new: Claimant | None, before: Collection[bytes], after: Collection[bytes]
    ) -> set[ServiceName]:
        """Replace a Service's claims; return the other Services that ask for a key whose owner changed.

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
            touched.discard(new[1:])
        return touched

    @property
    def contested(self) -> bool:
        """Return whether any key has more than one claimant."""
        return bool(self._contested)

    def owns(self, key: bytes, claimant: Claimant) -> bool:
        """Return whether a claimant holds a key."""
        return self._owner.get(key) == claimant

    def owner(self, key: bytes) -> ServiceName | None:
        """Return the Service that holds a key."""
        owner = self._owner.get(key)
        return owner[1:] if owner is not None else None

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
        """Give the key to the oldest; when that is another one, return all who ask for it: they report the owner."""
        before = self._owner.get(key)
        if len(waiting) > 1:
            self._contested[key] = waiting
        else:
            self._contested.pop(key, None)
        if not waiting:
            self._owner.pop(key, None)
            return set()
        self._owner[key] = waiting[0]
        return {claimant[1:] for claimant in waiting} if before != waiting[0] else set()
