"""Makes the API objects of a lab: nodes, the EndpointSlice of the API server, and pods for experiments. Pure."""

from __future__ import annotations

import platform
import uuid
from typing import Any

from lab.apiserver.rest import timestamp
from lab.topology import NodeNet

Json = dict[str, Any]
API_PORT = 6443


def node(net: NodeNet) -> Json:
    """Return a ready Node, as a kubelet would write it."""
    now = timestamp()
    labels = {
        "kubernetes.io/hostname": net.name,
        "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": net.zone,
    }
    addresses = [{"type": "InternalIP", "address": a} for a in net.addresses]
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "the lab posts ready status",
    }
    release = platform.release()
    info = {"kernelVersion": release, "osImage": "lab", "kubeletVersion": "v1.36.0+lab"}
    info |= {"operatingSystem": "linux", "architecture": "amd64", "containerRuntimeVersion": "netns://1"}
    room = {"cpu": "2", "memory": "4Gi", "pods": "110"}
    empty = dict.fromkeys(("machineID", "systemUUID", "bootID", "kubeProxyVersion"), "")
    return {
        "metadata": {"name": net.name, "uid": str(uuid.uuid4()), "creationTimestamp": now, "labels": labels},
        "spec": {"podCIDR": net.pod_cidr, "podCIDRs": [net.pod_cidr, net.pod_cidr6]},
        "status": {
            "capacity": room,
            "allocatable": room,
            "addresses": [*addresses, {"type": "Hostname", "address": net.name}],
            "conditions": [ready | {"lastHeartbeatTime": now, "lastTransitionTime": now}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "nodeInfo": info | empty,
        },
    }


def api_slice(address: str) -> Json:
    """Return the EndpointSlice of default/kubernetes: the address at which pods reach the API server."""
    return {
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": API_PORT, "protocol": "TCP"}],
    }


def whoami_rc(name: str, replicas: int, port: int = 3000, labels: dict[str, str] | None = None) -> Json:
    """Return a ReplicationController of whoami pods that answer on a TCP and a UDP port."""
    labels = labels or {"app": name}
    ports = [{"name": proto.lower(), "containerPort": port, "protocol": proto} for proto in ("TCP", "UDP")]
    container = {"name": "whoami", "image": "whoami", "ports": ports}
    return {
        "apiVersion": "v1",
        "kind": "ReplicationController",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": labels,
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def service(name: str, selector: dict[str, str], ports: list[Json], **spec: Any) -> Json:
    """Return a Service; `spec` are further fields of its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": ports} | spec,
    }
