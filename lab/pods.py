"""The kubelets of all nodes: run each assigned pod as a namespace with addresses that answer, and remove it at its end.

The pod's status in the API changes as with a real kubelet: Pending, Running and Ready; after its deletion Terminating
until its containers have ended, then the object is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lab.answers import AnswerError, Answers
from lab.apiserver.resources import by_plural
from lab.apiserver.rest import Rest, timestamp
from lab.apiserver.status import ApiError
from lab.apiserver.store import Change, Key
from lab.controllers.scheduling import condition
from lab.controllers.slices import lasting_containers
from lab.iproute import LinkError
from lab.topology import NODES, PodNet, Topology

log = logging.getLogger("lab.pods")

Json = dict[str, Any]
_PODS = by_plural("pods")
READY_ANNOTATION = "lab.kubeproxy/ready"
"""Annotation of a pod; the value "false" makes its readiness probe fail."""
DRAIN_ANNOTATION = "lab.kubeproxy/drain-seconds"
"""Annotation of a pod: the seconds that its containers take to end after a deletion, at most its grace period."""
DEFAULT_PORTS = [("TCP", 3000), ("UDP", 3000)]
_BY_NAME = {n.name: n for n in NODES}


def ports_of(pod: Json) -> list[tuple[str, int]]:
    """Return the (protocol, port) pairs on which a pod's containers answer. SCTP is not supported."""
    ports = [
        (p.get("protocol", "TCP"), int(p["containerPort"]))
        for c in lasting_containers(pod)
        for p in c.get("ports") or ()
        if p.get("protocol", "TCP") in {"TCP", "UDP"}
    ]
    return list(dict.fromkeys(ports)) or DEFAULT_PORTS


def drain_seconds(pod: Json, default: float) -> float:
    """Return the seconds for which a deleted pod continues to answer."""
    grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    text = (pod["metadata"].get("annotations") or {}).get(DRAIN_ANNOTATION)
    try:
        wanted = default if text is None else float(text)
    except ValueError:
        wanted = default
    return max(0.0, min(wanted, grace))


def is_probed_ready(pod: Json) -> bool:
    """Return whether a pod's readiness probe succeeds."""
    return (pod["metadata"].get("annotations") or {}).get(READY_ANNOTATION) != "false"


def is_ready(pod: Json) -> bool:
    """Return whether a running pod is ready: its probe succeeds and the condition of every readiness gate is True."""
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    return is_probed_ready(pod) and all(condition(pod, gate) == "True" for gate in gates)


def _condition(kind: str, holds: bool) -> Json:
    return {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": timestamp()}


def running_status(pod: Json, net: PodNet) -> Json:
    """Return the status of a running pod."""
    old = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or ()}
    probed = is_probed_ready(pod)
    states = {"PodScheduled": True, "Initialized": True, "ContainersReady": probed, "Ready": is_ready(pod)}
    conditions = [of_others for kind, of_others in old.items() if kind not in states]
    for kind, holds in states.items():
        fresh = _condition(kind, holds)
        was = old.get(kind)
        conditions.append(was if was and was["status"] == fresh["status"] else fresh)
    containers = [
        {
            "name": c["name"],
            "image": c.get("image", ""),
            "imageID": "",
            "ready": probed,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}},
            "lastState": {},
        }
        for c in pod["spec"].get("containers") or ()
    ]
    return {
        "phase": "Running",
        "qosClass": "BestEffort",
        "startTime": pod["metadata"]["creationTimestamp"],
        "conditions": conditions,
        "hostIP": net.node.ip,
        "hostIPs": [{"ip": a} for a in net.node.addresses],
        "podIP": net.ip,
        "podIPs": [{"ip": net.ip}, {"ip": net.ip6}],
        "containerStatuses": containers,
    }


def _key(pod: Json) -> Key:
    return (pod["metadata"]["namespace"], pod["metadata"]["name"])


class Kubelets:
    """Follows the store's pods. Call start() before stop(); all calls are in the event loop's thread."""

    def __init__(self, rest: Rest, topology: Topology, answers: Answers, drain: float) -> None:
        self._rest = rest
        self._topology = topology
        self._answers = answers
        self._drain = drain
        self._nets: dict[str, PodNet] = {}
        self._waiting: dict[Key, None] = {}
        self._starter: asyncio.Task[None] | None = None
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._forced: dict[str, asyncio.Event] = {}
        """Events of draining pods by uid; an event is set when its pod is deleted by force."""
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Run the existing pods, and all later pods."""
        self._unsubscribe = self._rest.store.subscribe("pods", self._on_change)
        for record in self._rest.store.records("pods"):
            self._look_at(record.decode())

    async def stop(self) -> None:
        """Unsubscribe from the store. The namespaces of the pods are removed with the topology."""
        self._unsubscribe()
        tasks = [t for t in (self._starter, *self._ending.values()) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def net_of(self, uid: str) -> PodNet | None:
        """Return the namespace and addresses of a running pod."""
        return self._nets.get(uid)

    def _on_change(self, change: Change) -> None:
        pod = change.new.decode()
        uid = pod["metadata"]["uid"]
        if change.type != "DELETED":
            self._look_at(pod)
        elif uid in self._forced:
            self._forced[uid].set()
        elif uid in self._nets and uid not in self._ending:
            # Deleted by force, without the kubelet: its remains are removed at once.
            self._end(pod, 0.0)

    def _look_at(self, pod: Json) -> None:
        metadata = pod["metadata"]
        if pod["spec"].get("nodeName") not in _BY_NAME:
            return
        uid = metadata["uid"]
        is_deleted = bool(metadata.get("deletionTimestamp"))
        if is_deleted and uid not in self._ending:
            self._end(pod, drain_seconds(pod, self._drain))
        if uid in self._nets:
            self._update_readiness(pod)  # The readiness probes continue while the pod terminates.
        elif not is_deleted:
            self._waiting[_key(pod)] = None
            if self._starter is None or self._starter.done():
                self._starter = asyncio.create_task(self._start_waiting())

    def _update_readiness(self, pod: Json) -> None:
        status = pod.get("status") or {}
        if status.get("phase") == "Running" and is_ready(pod) != (condition(pod, "Ready") == "True"):
            self._write_status(pod, self._nets[pod["metadata"]["uid"]])

    def _write_status(self, pod: Json, net: PodNet) -> None:
        status = running_status(pod, net)
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        self._rest.update(_PODS, body, _key(pod), "status")

    async def _start_waiting(self) -> None:
        """Start all new pods together: the commands for many pods take hardly longer than those for one pod."""
        while self._waiting:
            keys, self._waiting = list(self._waiting), {}
            records = [self._rest.store.get("pods", key) for key in keys]
            pods = [r.decode() for r in records if r is not None]
            pods = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
            planned = [(p, net) for p in pods if (net := self._plan(p)) is not None]
            try:
                await asyncio.to_thread(self._topology.add_pods, [net for _, net in planned])
            except LinkError as e:
                log.error("pods cannot be started err=%s", e)
                continue
            self._nets.update({pod["metadata"]["uid"]: net for pod, net in planned})
            await asyncio.gather(*(self._open(pod, net) for pod, net in planned))

    def _plan(self, pod: Json) -> PodNet | None:
        node = _BY_NAME[pod["spec"]["nodeName"]]
        if pod["spec"].get("hostNetwork"):
            return self._topology.host_pod(node)
        try:
            return self._topology.plan_pod(node)
        except LinkError as e:
            log.error("pod cannot be started pod=%s/%s err=%s", *_key(pod), e)
            return None

    async def _open(self, pod: Json, net: PodNet) -> None:
        try:
            metadata = pod["metadata"]
            await self._answers.open(metadata["uid"], net.namespace, metadata["name"], net.node.name, ports_of(pod))
            record = self._rest.store.get("pods", _key(pod))
            now = record.decode() if record else None
            if now is not None and now["metadata"]["uid"] == metadata["uid"]:
                self._write_status(now, net)
            elif metadata["uid"] not in self._ending:
                # The pod was deleted while it was being started.
                self._end(pod, 0.0)
        except (AnswerError, ApiError) as e:
            log.error("pod cannot run pod=%s/%s err=%s", *_key(pod), e)

    def _end(self, pod: Json, after: float) -> None:
        uid = pod["metadata"]["uid"]
        self._ending[uid] = asyncio.create_task(self._finish(pod, after))

    async def _finish(self, pod: Json, after: float) -> None:
        metadata = pod["metadata"]
        key = _key(pod)
        if after:
            forced = self._forced[metadata["uid"]] = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(forced.wait(), after)
            del self._forced[metadata["uid"]]
        net = self._nets.pop(metadata["uid"], None)
        try:
            if net is not None:
                await self._answers.close_pod(metadata["uid"])
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
            if self._rest.store.get("pods", key) is not None:
                self._rest.delete(_PODS, key, options)
        except (AnswerError, ApiError) as e:
            log.warning("pod did not end in order pod=%s/%s err=%s", *key, e)
        if net is not None:
            await asyncio.to_thread(self._topology.remove_pods, [net])
        self._ending.pop(metadata["uid"], None)
