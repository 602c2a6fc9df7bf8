"""Deletes the content of terminating namespaces, then the namespaces."""

from __future__ import annotations

from lab.apiserver.resources import RESOURCES
from lab.apiserver.store import Key
from lab.controllers.base import Controller

_CONTENTS = tuple(r for r in RESOURCES if r.namespaced and r.group != "events.k8s.io")


class NamespaceController(Controller):
    """Keys are namespaces, as ("", name)."""

    def start(self) -> None:
        """Follow namespaces, and the deletions inside them."""
        self.follow("namespaces", self.mark)
        for resource in _CONTENTS:
            self._unsubscribe.append(self.store.subscribe(resource.storage, lambda c: self._on_change(c.new.key[0])))

    def _on_change(self, namespace: str) -> None:
        if self._is_ending(("", namespace)):
            self.mark(("", namespace))

    def _is_ending(self, key: Key) -> bool:
        record = self.store.get("namespaces", key)
        return record is not None and record.fields["status.phase"] == "Terminating"

    def sync(self, key: Key) -> None:
        """Delete the remaining content of a terminating namespace."""
        if not self._is_ending(key):
            return
        left = 0
        for resource in _CONTENTS:
            for record in self.store.records(resource.storage, key[1]):
                left += 1
                if not record.decode()["metadata"].get("deletionTimestamp"):
                    self.rest.delete(resource, record.key)
        if left:
            self.mark_if_empty(key)
        else:
            self.store.remove("namespaces", key)

    def mark_if_empty(self, key: Key) -> None:
        """Sync once more if no further deletion will mark the namespace."""
        if not any(self.store.records(r.storage, key[1]) for r in _CONTENTS):
            self.mark(key)
