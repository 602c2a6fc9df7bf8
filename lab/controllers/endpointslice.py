"""The EndpointSlice controller: watches Services, pods and nodes, and writes the slices that slices.py plans."""

from __future__ import annotations

import datetime as dt

from lab.apiserver.resources import by_plural
from lab.apiserver.rest import Rest
from lab.apiserver.selection import Selector, from_map
from lab.apiserver.store import Change, Key, Record
from lab.controllers.base import Controller
from lab.controllers.slices import (
    MANAGED_BY,
    MANAGED_BY_LABEL,
    SERVICE_NAME,
    TRIGGER_TIME,
    Json,
    plan_writes,
    wanted_endpoints,
)

_SLICES = by_plural("endpointslices")


def trigger_time() -> str:
    """Return the present time in the format of the trigger time annotation."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class EndpointSliceController(Controller):
    """Keys are Services."""

    def __init__(self, rest: Rest) -> None:
        super().__init__(rest)
        self._selectors: dict[Key, Selector] = {}
        self._slices: dict[Key, set[str]] = {}

    def start(self) -> None:
        """Follow Services, pods, nodes' zones and its own slices."""
        for record in self.store.records("endpointslices"):
            self._index(record, present=True)
        for record in self.store.records("services"):
            self._note_service(record, present=True)
        subscribe = self.store.subscribe
        self._unsubscribe += [
            subscribe("services", lambda c: self._note_service(c.new, present=c.type != "DELETED")),
            subscribe("pods", self._on_pod),
            subscribe("endpointslices", self._on_slice),
            subscribe("nodes", lambda _change: self._mark_all()),
        ]

    def _note_service(self, record: Record, *, present: bool) -> None:
        spec = record.decode()["spec"] if present else {}
        selects = bool(spec.get("selector")) and spec.get("type") != "ExternalName"
        if selects:
            self._selectors[record.key] = from_map(spec["selector"])
        else:
            self._selectors.pop(record.key, None)
        if selects or record.key in self._slices:
            self.mark(record.key)

    def _on_pod(self, change: Change) -> None:
        namespace = change.new.key[0]
        for key, selector in self._selectors.items():
            if key[0] == namespace and (
                selector.matches(change.new.labels) or (change.old is not None and selector.matches(change.old.labels))
            ):
                self.mark(key)

    def _on_slice(self, change: Change) -> None:
        self._index(change.new, present=change.type != "DELETED")
        if change.new.labels.get(MANAGED_BY_LABEL) == MANAGED_BY:
            self.mark((change.new.key[0], change.new.labels.get(SERVICE_NAME, "")))

    def _mark_all(self) -> None:
        for key in self._selectors:
            self.mark(key)

    def _index(self, record: Record, *, present: bool) -> None:
        if record.labels.get(MANAGED_BY_LABEL) != MANAGED_BY:
            return
        service = (record.key[0], record.labels.get(SERVICE_NAME, ""))
        names = self._slices.setdefault(service, set())
        if present:
            names.add(record.key[1])
        else:
            names.discard(record.key[1])
            if not names:
                del self._slices[service]

    def sync(self, key: Key) -> None:
        """Bring one Service's slices up to date."""
        existing = self._existing(key)
        selector = self._selectors.get(key)
        record = self.store.get("services", key)
        if record is None or selector is None:
            for slice_ in existing:
                self.rest.delete(_SLICES, (key[0], slice_["metadata"]["name"]))
            return
        service = record.decode()
        pods = [r.decode() for r in self.store.records("pods", key[0]) if selector.matches(r.labels)]
        writes = plan_writes(service, existing, wanted_endpoints(service, pods, self._zones()))
        for slice_ in writes.delete:
            self.rest.delete(_SLICES, (key[0], slice_["metadata"]["name"]))
        for slice_ in writes.update:
            self.rest.update(_SLICES, _stamped(slice_), (key[0], slice_["metadata"]["name"]))
        for slice_ in writes.create:
            self.rest.create(_SLICES, _stamped(slice_), key[0])

    def _existing(self, key: Key) -> list[Json]:
        records = (self.store.get("endpointslices", (key[0], name)) for name in sorted(self._slices.get(key, ())))
        return [r.decode() for r in records if r is not None]

    def _zones(self) -> dict[str, str]:
        label = "topology.kubernetes.io/zone"
        return {r.key[1]: r.labels.get(label, "") for r in self.store.records("nodes")}


def _stamped(slice_: Json) -> Json:
    annotations = dict(slice_["metadata"].get("annotations") or {})
    annotations[TRIGGER_TIME] = trigger_time()
    return slice_ | {"metadata": slice_["metadata"] | {"annotations": annotations}}
