"""ReplicationControllers: creates and deletes pods until their number is as specified, and deletes the pods of deleted
ones."""

from __future__ import annotations

import copy
from typing import Any

from lab.apiserver.resources import by_plural
from lab.apiserver.store import Change, Key
from lab.controllers.base import Controller
from lab.controllers.scheduling import condition, owner_of

Json = dict[str, Any]
_PODS = by_plural("pods")
_RCS = by_plural("replicationcontrollers")


def pod_of(controller: Json) -> Json:
    """Return a new pod from the template."""
    metadata = controller["metadata"]
    template = copy.deepcopy(controller["spec"]["template"])
    owner = {
        "apiVersion": "v1",
        "kind": "ReplicationController",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    given = template.get("metadata") or {}
    wanted = {k: given[k] for k in ("labels", "annotations") if given.get(k)}
    wanted |= {"generateName": f"{metadata['name']}-", "ownerReferences": [owner]}
    return {"metadata": wanted, "spec": template.get("spec") or {}}


def surplus(pods: list[Json], count: int) -> list[Json]:
    """Return the pods to delete: first pods that are not ready, then pods of the node with more pods, then the
    youngest."""
    left = list(pods)
    chosen: list[Json] = []
    for _ in range(count):
        crowd: dict[str, int] = {}
        for pod in left:
            node = pod["spec"].get("nodeName", "")
            crowd[node] = crowd.get(node, 0) + 1
        worst = max(
            left,
            key=lambda p: (
                condition(p, "Ready") != "True",
                crowd[p["spec"].get("nodeName", "")],
                p["metadata"]["creationTimestamp"],
                int(p["metadata"]["resourceVersion"]),
            ),
        )
        left.remove(worst)
        chosen.append(worst)
    return chosen


class ReplicationManager(Controller):
    """Creates and deletes pods, and keeps the status."""

    def start(self) -> None:
        """Follow ReplicationControllers and the pods that they own."""
        self.follow("replicationcontrollers", self.mark)
        self._unsubscribe.append(self.store.subscribe("pods", self._on_pod))

    def _on_pod(self, change: Change) -> None:
        for record in (change.new, change.old):
            for owner in record.decode()["metadata"].get("ownerReferences") or () if record else ():
                if owner.get("kind") == "ReplicationController":
                    self.mark((change.new.key[0], owner["name"]))

    def sync(self, key: Key) -> None:
        """Compare one ReplicationController with its pods."""
        record = self.store.get("replicationcontrollers", key)
        controller = record.decode() if record else None
        pods = [r.decode() for r in self.store.records("pods", key[0])]
        if controller is None:
            self._collect(key, pods)
            return
        mine = [p for p in pods if owner_of(p) == controller["metadata"]["uid"]]
        active = [p for p in mine if not p["metadata"].get("deletionTimestamp")]
        missing = controller["spec"]["replicas"] - len(active)
        active += [self.rest.create(_PODS, pod_of(controller), key[0]).decode() for _ in range(missing)]
        for pod in surplus(active, -missing):
            self.rest.delete(_PODS, (key[0], pod["metadata"]["name"]))
        self._write_status(key, controller, active)

    def _collect(self, key: Key, pods: list[Json]) -> None:
        """Delete the pods of a deleted ReplicationController, unless they were orphaned."""
        for pod in pods:
            owners = pod["metadata"].get("ownerReferences") or ()
            owned = any(o.get("kind") == "ReplicationController" and o.get("name") == key[1] for o in owners)
            if owned and not pod["metadata"].get("deletionTimestamp"):
                self.rest.delete(_PODS, (key[0], pod["metadata"]["name"]))

    def _write_status(self, key: Key, controller: Json, active: list[Json]) -> None:
        ready = sum(condition(p, "Ready") == "True" for p in active)
        status = {"replicas": len(active), "fullyLabeledReplicas": len(active)}
        status["observedGeneration"] = controller["metadata"].get("generation", 1)
        if ready:
            status |= {"readyReplicas": ready, "availableReplicas": ready}
        if controller.get("status") != status:
            self.rest.update(_RCS, {"metadata": {}, "status": status}, key, "status")
