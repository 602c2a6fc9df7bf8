"""The base of all controllers: each dirty key is synced once, in the next turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lab.apiserver.rest import Rest
from lab.apiserver.status import ApiError
from lab.apiserver.store import Key

log = logging.getLogger("lab.controllers")


class Controller:
    """Subclasses subscribe in start() and implement sync(). Everything runs in the thread of the event loop."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self.store = rest.store
        self._dirty: dict[Key, None] = {}
        self._is_scheduled = False
        self._unsubscribe: list[Callable[[], None]] = []

    def start(self) -> None:
        """Subscribe, and mark everything that exists."""
        raise AssertionError("subclasses subscribe to their storages")

    def sync(self, key: Key) -> None:
        """Bring the objects of one key into the desired state."""
        raise AssertionError(f"subclasses sync {key}")

    def stop(self) -> None:
        """Unsubscribe from all storages."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()
        self._dirty.clear()

    def follow(self, storage: str, mark: Callable[[Key], None]) -> None:
        """Call `mark` with the key of every change of a storage, and of every object that exists."""
        self._unsubscribe.append(self.store.subscribe(storage, lambda change: mark(change.new.key)))
        for record in self.store.records(storage):
            mark(record.key)

    def mark(self, key: Key) -> None:
        """Sync this key in the next turn."""
        self._dirty[key] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.run_pending)

    def run_pending(self) -> None:
        """Sync every dirty key now."""
        self._is_scheduled = False
        dirty, self._dirty = self._dirty, {}
        for key in dirty:
            try:
                self.sync(key)
            except ApiError as e:
                # When the cause of the failure changes (such as a terminating namespace), the key is marked again.
                log.warning("sync failed controller=%s key=%s/%s err=%s", type(self).__name__, *key, e)
