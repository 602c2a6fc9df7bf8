"""Recorded cases for iptables mode: their objects as plans, and the output of iptables-save under the Go kube-proxy.

The objects are those of the conformance cases; the rules are recorded for the first of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from socket import inet_pton
from typing import Any

from kubeproxy.api.decode import decode_object
from kubeproxy.config.load import load_text
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import Object, Resource
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Surroundings, build
from kubeproxy.setup import host
from support.places import CASES, RECORDINGS

Json = dict[str, Any]

SAVED = RECORDINGS / "iptables-save"
NUMBERS = sorted({path.name.partition("-")[0] for path in SAVED.iterdir()})
LOCAL = ("127.0.0.1", "192.168.100.2", "172.31.0.2", "192.168.102.1", "::1", "fd00:100::2", "fd00:102::1")
HIDDEN = {"services": "service.kubernetes.io/service-proxy-name", "endpointslices": "service.kubernetes.io/headless"}


def case(number: str) -> Json:
    """A conformance case: its configuration, and its steps with their objects."""
    found: Json = json.loads((CASES / f"{number}.json").read_text())
    return found


def saved(number: str, step: int, family: Family) -> list[str]:
    """Return the lines of iptables-save after a step of a case."""
    return (SAVED / f"{number}-{step}.{family.label[-1]}").read_text().splitlines()


def go_rules(family: Family) -> str:
    """Return the input for iptables-restore: all rules of the Go kube-proxy for a case, without its packet counters.

    The counters are separate kernel objects (nfacct), which a kernel may lack.
    """
    return "".join(f"{line}\n" for line in saved("0006", 0, family) if "nfacct" not in line)


def planner_of(config: Json, objects: Mapping[Resource, list[Json]]) -> Planner:
    """Return the plans of a case's objects, for a proxy with the case's configuration."""
    node = "node-a"
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clusterCIDR": "10.244.0.0/16,fd00:244::/32",
        **config,
    }
    settings = host.settings(load_text(json.dumps(config)))
    local = {
        family: [inet_pton(family, a) for a in LOCAL if (":" in a) == (family is Family.IPV6)] for family in Family
    }
    found: dict[Resource, list[Any]] = {
        kind: [_object(kind, body) for body in bodies if _seen(kind, body)] for kind, bodies in objects.items()
    }
    cidrs = [cidr for each in found["servicecidrs"] for cidr in each.spec.cidrs]
    planner = Planner(build(settings, Surroundings(found["nodes"][0], cidrs, local)))
    planner.apply([Replaced(kind, bodies) for kind, bodies in found.items()])
    planner.take()
    return planner


def _seen(kind: Resource, body: Json) -> bool:
    return HIDDEN.get(kind) not in (body["metadata"].get("labels") or {})


def _object(kind: Resource, body: Json) -> Object:
    decoded, rejected = decode_object(kind, json.dumps(body).encode())
    assert decoded is not None, rejected
    return decoded
