"""Invalid objects that no API server should send, and the expected result of each. Data only."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = dict[str, Any]


class Bad(NamedTuple):
    """The replacement, the text that its event must contain ('' for none), and whether other parts work."""

    part: Any
    named: str
    works: bool


GOOD_PORT = {"name": "web", "port": 80, "protocol": "TCP", "targetPort": 3000}


def ports(*more: Any) -> list[Any]:
    return [GOOD_PORT, *more]


SPECS: dict[str, Bad] = {
    "port-0": Bad({"ports": ports({"name": "x", "port": 0})}, "spec.ports[1]", True),
    "port-70000": Bad({"ports": ports({"name": "x", "port": 70000})}, "spec.ports[1]", True),
    "port-negative": Bad({"ports": ports({"name": "x", "port": -1})}, "spec.ports[1]", True),
    "port-huge": Bad({"ports": ports({"name": "x", "port": 10**30})}, "spec.ports[1]", True),
    "port-text": Bad({"ports": ports({"name": "x", "port": "http"})}, "spec.ports[1]", True),
    "port-null": Bad({"ports": ports({"name": "x", "port": None})}, "spec.ports[1]", True),
    "port-missing": Bad({"ports": ports({"name": "x"})}, "spec.ports[1]", True),
    "port-is-null": Bad({"ports": ports(None)}, "spec.ports[1]", True),
    "port-is-a-list": Bad({"ports": ports([1, 2])}, "spec.ports[1]", True),
    "port-twice": Bad({"ports": ports(GOOD_PORT)}, "spec.ports[1]", True),
    "port-fraction": Bad({"ports": ports({"name": "x", "port": 80.5})}, "spec.ports[1]", True),
    "protocol-unknown": Bad({"ports": ports({"name": "x", "port": 81, "protocol": "ICMP"})}, "spec.ports[1]", True),
    "protocol-number": Bad({"ports": ports({"name": "x", "port": 81, "protocol": 6})}, "spec.ports[1]", True),
    "node-port-99999": Bad({"ports": [GOOD_PORT | {"nodePort": 99999}]}, "spec.ports[0]", True),
    "node-port-text": Bad({"ports": ports({"name": "x", "port": 81, "nodePort": "x"})}, "spec.ports[1]", True),
    "ports-text": Bad({"ports": "80"}, "spec.ports", False),
    "ports-object": Bad({"ports": GOOD_PORT}, "spec.ports", False),
    "ports-null": Bad({"ports": None}, "", False),
    "external-ips-none": Bad({"externalIPs": ["999.1.1.1", "", "fe80::1%eth0", "0.0.0.0"]}, "spec.externalIPs", True),
    "external-ips-mixed": Bad({"externalIPs": [7, None, {"a": 1}]}, "spec.externalIPs", True),
    "external-ips-text": Bad({"externalIPs": "198.51.100.9"}, "spec.externalIPs", False),
    "source-ranges": Bad({"loadBalancerSourceRanges": ["everybody"]}, "spec.loadBalancerSourceRanges", True),
    "policy-unknown": Bad({"externalTrafficPolicy": "Nearest"}, "spec.externalTrafficPolicy", True),
    "policy-number": Bad({"internalTrafficPolicy": 5}, "spec.internalTrafficPolicy", False),
    "affinity-unknown": Bad({"sessionAffinity": "Cookie"}, "spec.sessionAffinity", True),
    "affinity-timeout": Bad(
        {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": -3}}},
        "timeoutSeconds",
        True,
    ),
    "affinity-config-text": Bad(
        {"sessionAffinity": "ClientIP", "sessionAffinityConfig": "long"}, "spec.sessionAffinityConfig", False
    ),
    "cluster-ip-none": Bad({"clusterIP": "10.96.300.1", "clusterIPs": ["10.96.300.1"]}, "spec.clusterIP", False),
    "cluster-ips-number": Bad({"clusterIPs": [10]}, "spec.clusterIPs", True),
    "cluster-ips-null": Bad({"clusterIPs": None}, "", True),
    "health-port-70000": Bad(
        {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 70000},
        "spec.healthCheckNodePort",
        True,
    ),
    "nulls-everywhere": Bad(
        dict.fromkeys(("type", "externalIPs", "selector", "sessionAffinity", "loadBalancerSourceRanges", "ipFamilies")),
        "",
        True,
    ),
    "unknown-fields": Bad({"future": {"of": ["kubernetes"]}, "ports": [GOOD_PORT | {"more": 1}]}, "", True),
}
"""Replacements in the spec of a valid Service."""

SERVICES: dict[str, Bad] = {
    "spec-null": Bad({"spec": None}, "spec", False),
    "spec-list": Bad({"spec": [1]}, "spec", False),
    "spec-empty": Bad({"spec": {}}, "", False),
    "status-text": Bad({"status": "fine"}, "status", True),
    "status-null": Bad({"status": None}, "", True),
    "ingress-none": Bad({"status": {"loadBalancer": {"ingress": [{"ip": "x"}, None, 5]}}}, "status.loadBalancer", True),
}
"""Replacements in a valid Service."""

ENDPOINTS: dict[str, Bad] = {
    "address-none": Bad({"addresses": ["10.244.0"]}, "endpoints[1]", True),
    "address-empty": Bad({"addresses": [""]}, "endpoints[1]", True),
    "address-of-the-other-family": Bad({"addresses": ["fd00::1"]}, "endpoints[1]", True),
    "addresses-none": Bad({"addresses": []}, "endpoints[1]", True),
    "addresses-null": Bad({"addresses": None}, "endpoints[1]", True),
    "addresses-text": Bad({"addresses": "10.244.0.10"}, "endpoints[1]", True),
    "addresses-numbers": Bad({"addresses": [10]}, "endpoints[1]", True),
    "conditions-text": Bad({"addresses": ["10.244.3.3"], "conditions": "ready"}, "endpoints[1]", True),
    "ready-text": Bad({"addresses": ["10.244.3.3"], "conditions": {"ready": "true"}}, "endpoints[1]", True),
    "node-name-number": Bad({"addresses": ["10.244.3.3"], "nodeName": 5}, "endpoints[1]", True),
    "hints-text": Bad({"addresses": ["10.244.3.3"], "hints": "near"}, "endpoints[1]", True),
    "empty": Bad({}, "endpoints[1]", True),
}
"""A second endpoint of a valid slice; the test adds None and other values that are not objects."""

SLICES: dict[str, Bad] = {
    "endpoints-null": Bad({"endpoints": None}, "", False),
    "endpoints-text": Bad({"endpoints": "a1"}, "endpoints", False),
    "endpoints-nulls": Bad({"endpoints": [None, None]}, "endpoints[0]", False),
    "ports-null": Bad({"ports": None}, "", False),
    "ports-text": Bad({"ports": "80"}, "ports", False),
    "ports-nulls": Bad({"ports": [None]}, "ports[0]", False),
    "port-0": Bad({"ports": [{"name": "web", "port": 0, "protocol": "TCP"}]}, "", False),
    "port-70000": Bad({"ports": [{"name": "web", "port": 70000, "protocol": "TCP"}]}, "ports[0]", False),
    "port-text": Bad({"ports": [{"name": "web", "port": "x", "protocol": "TCP"}]}, "ports[0]", False),
    "type-unknown": Bad({"addressType": "MAC"}, "addressType", False),
    "type-null": Bad({"addressType": None}, "addressType", False),
    "type-fqdn": Bad({"addressType": "FQDN"}, "", False),
}
"""Replacements in a valid slice."""

OTHERS: dict[str, tuple[str, Json]] = {
    "node-status-null": ("nodes", {"status": None}),
    "node-addresses": ("nodes", {"status": {"addresses": [None, {"type": "InternalIP", "address": "x"}, 5]}}),
    "node-spec": ("nodes", {"spec": {"podCIDRs": ["x", None], "taints": "many"}}),
    "cidr-spec-null": ("servicecidrs", {"spec": None}),
    "cidr-none": ("servicecidrs", {"spec": {"cidrs": ["10.96.0.0/99", 5, None, ""]}}),
}
"""Replacements in the Node and the ServiceCIDR."""

VALUES: list[Any] = [None, True, -1, 0, 70000, 10**40, 1.5, "", "x", "10.96.0.1", [], [None], {}, {"a": None}, "\u0000"]
"""Values that may replace a field."""
