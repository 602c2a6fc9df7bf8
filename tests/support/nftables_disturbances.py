"""Changes that other programs make to the elements of the proxy's table, and a table with elements of all kinds."""

from __future__ import annotations

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import Layout
from kubeproxy.model.plan import ServiceName, ServicePlan
from support.nftables_ground import Ground, resync
from support.nftables_plans import V4, cluster, plans_of, sticky

DISTURBANCES = {
    "missing endpoint": ["delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }"],
    "missing service": ["delete element ip kube-proxy cluster-services { 10.96.0.1 . tcp . 80 }"],
    "missing verdict": ["delete element ip kube-proxy session-chains { 10.96.0.4 . tcp . 80 }"],
    "missing slot": ["delete element ip kube-proxy session-slots { 0.0.0.4 . 1 }"],
    "missing endpoint with affinity": ["delete element ip kube-proxy session-endpoints { 192.0.0.2 . tcp }"],
    "missing class of a pool": ["delete element ip kube-proxy session-classes { 0.0.0.4 }"],
    "missing cluster IP": ["delete element ip kube-proxy cluster-ips { 10.96.0.1 }"],
    "missing hairpin": ["delete element ip kube-proxy hairpin-endpoints { 10.244.0.1 . 10.244.0.1 }"],
    "missing node address": ["delete element ip kube-proxy nodeport-ips { 192.0.2.1 }"],
    "missing range": ["delete element ip kube-proxy firewall-allow { 0.0.0.2 . 172.16.0.0-172.16.0.255 }"],
    "stray endpoint": ["add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 3 : 10.9.9.9 . 99 }"],
    "stray service": ["add element ip kube-proxy cluster-services { 10.96.9.9 . tcp . 80 : 1 }"],
    "stray class": ["add element ip kube-proxy local-services { 10.96.0.1 . tcp . 80 : 1 }"],
    "stray treatment": ["add element ip kube-proxy external-services { 10.96.0.1 . tcp . 80 : 3 }"],
    "stray verdict": ["add element ip kube-proxy session-chains { 10.96.9.9 . tcp . 80 : goto cluster-30s }"],
    "stray slot": ["add element ip kube-proxy session-slots { 0.0.0.4 . 2 : 192.0.0.9 }"],
    "stray endpoint with affinity": ["add element ip kube-proxy session-endpoints { 192.0.0.9 . tcp : 10.9.9.9 . 99 }"],
    "stray cluster IP": ["add element ip kube-proxy cluster-ips { 10.96.9.9 }"],
    "stray refusal": ["add element ip kube-proxy unserved-services { 10.96.0.1 . tcp . 80 }"],
    "stray node address": ["add element ip kube-proxy nodeport-ips { 192.0.2.99 }"],
    "stray range": ["add element ip kube-proxy firewall-allow { 0.0.0.2 . 10.0.0.0-10.255.255.255 }"],
    "stray service CIDR": ["add element ip kube-proxy service-cidrs { 10.1.0.0/16 }"],
    "changed endpoint": [
        "delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }",
        "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 : 10.9.9.9 . 99 }",
    ],
    "changed verdict": [
        "delete element ip kube-proxy session-chains { 10.96.0.4 . tcp . 80 }",
        "add element ip kube-proxy session-chains { 10.96.0.4 . tcp . 80 : goto pick-30s }",
    ],
    "changed slot": [
        "delete element ip kube-proxy session-slots { 0.0.0.4 . 1 }",
        "add element ip kube-proxy session-slots { 0.0.0.4 . 1 : 192.0.0.1 }",
    ],
    "changed endpoint with affinity": [
        "delete element ip kube-proxy session-endpoints { 192.0.0.2 . tcp }",
        "add element ip kube-proxy session-endpoints { 192.0.0.2 . tcp : 10.9.9.9 . 99 }",
    ],
    "another class": [
        "delete element ip kube-proxy cluster-services { 10.96.0.1 . tcp . 80 }",
        "add element ip kube-proxy cluster-services { 10.96.0.1 . tcp . 80 : 16 }",
    ],
    "another treatment": [
        "delete element ip kube-proxy external-services { 198.51.100.1 . tcp . 80 }",
        "add element ip kube-proxy policy-local-services { 198.51.100.1 . tcp . 80 : 3 }",
    ],
    "wider range": [
        "delete element ip kube-proxy firewall-allow { 0.0.0.2 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 0.0.0.2 . 172.16.0.0-172.16.255.255 }",
    ],
    "narrower range": [
        "delete element ip kube-proxy firewall-allow { 0.0.0.2 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 0.0.0.2 . 172.16.0.1-172.16.0.2 }",
    ],
    "missing transport": ["delete element ip kube-proxy transports { udp }"],
    "stray transport": ["add element ip kube-proxy transports { icmp }"],
    "everything emptied": [f"flush {spec.keyword} ip kube-proxy {name}" for name, spec in Layout(V4).sets.items()],
}


def disturbed(ground: Ground) -> tuple[NftablesBackend, dict[ServiceName, tuple[ServicePlan, ...]]]:
    """Return a table with elements of all kinds, and the plans from which it was made."""
    more: dict[str, list[str]] = {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["172.16.0.0/24"]}
    plans = {**cluster("a", **more), ("default", "b"): plans_of("b", 2), ("default", "c"): plans_of("c", 3, 0)}
    plans["default", "d"] = sticky("d", 4, 2)
    backend = ground.start()
    resync(backend, plans)
    return backend, plans
