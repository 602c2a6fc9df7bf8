"""Assigns pods to nodes: selects the ready and suitable node with the fewest pods of the same owner, then with the
fewest pods."""

from __future__ import annotations

from typing import Any

from lab.apiserver.rest import timestamp
from lab.apiserver.store import Key
from lab.controllers.base import Controller

Json = dict[str, Any]


def owner_of(pod: Json) -> str:
    """Return the uid of a pod's controller, or ''."""
    for owner in pod["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return ""


def condition(obj: Json, kind: str) -> str:
    """The status of a condition: True, False or Unknown."""
    for entry in (obj.get("status") or {}).get("conditions") or ():
        if entry["type"] == kind:
            return str(entry["status"])
    return "Unknown"


def choose_node(pod: Json, nodes: list[Json], pods: list[Json]) -> str | None:
    """The name of the node for a pod; None when none fits."""
    wanted = (pod["spec"].get("nodeSelector") or {}).items()
    fitting: list[str] = [
        str(n["metadata"]["name"])
        for n in nodes
        if condition(n, "Ready") == "True"
        and not n["spec"].get("unschedulable")
        and wanted <= (n["metadata"].get("labels") or {}).items()
    ]
    if not fitting:
        return None
    living = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
    owner = owner_of(pod)

    def crowding(name: str) -> tuple[int, int, str]:
        there = [p for p in living if p["spec"].get("nodeName") == name]
        return sum(owner_of(p) == owner for p in there), len(there), name

    return min(fitting, key=crowding)


class Scheduler(Controller):
    """Writes spec.nodeName."""

    def start(self) -> None:
        """Subscribe to pods, and to nodes, because a new node may fit a waiting pod."""
        self.follow("pods", self.mark)
        self.follow("nodes", lambda _key: self._mark_waiting())

    def _mark_waiting(self) -> None:
        for record in self.store.records("pods"):
            if not record.fields["spec.nodeName"]:
                self.mark(record.key)

    def sync(self, key: Key) -> None:
        """Bind one pod."""
        record = self.store.get("pods", key)
        if record is None or record.fields["spec.nodeName"]:
            return
        pod = record.decode()
        nodes = [r.decode() for r in self.store.records("nodes")]
        name = choose_node(pod, nodes, [r.decode() for r in self.store.records("pods")])
        if name is None:
            return
        pod["spec"]["nodeName"] = name
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
        pod["status"].setdefault("conditions", []).append(scheduled)
        self.store.put("pods", pod)
