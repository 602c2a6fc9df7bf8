"""Completes a Service's fields before validation: defaults, IP families, and values that an update keeps. Pure.

Source: SetDefaults_Service, the service REST storage's initIPFamilyFields, patchAllocatedValues and
dropTypeDependentFields (KEP-563 dual-stack), and the recordings.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from lab.apiserver.status import FieldErrors, Json

EXTERNAL_NAME, NODE_PORT, LOAD_BALANCER = "ExternalName", "NodePort", "LoadBalancer"
DUAL_POLICIES = ("PreferDualStack", "RequireDualStack")


def needs_cluster_ip(spec: Json) -> bool:
    """Return whether a Service has cluster IPs: all types except ExternalName do."""
    return spec.get("type") != EXTERNAL_NAME


def is_headless(spec: Json) -> bool:
    """Return whether clusterIP is None (a headless Service)."""
    return spec.get("clusterIP") == "None" or spec.get("clusterIPs") == ["None"]


def needs_node_ports(spec: Json) -> bool:
    """Return whether a Service has node ports: type NodePort, and LoadBalancer unless it disables them."""
    if spec.get("type") == NODE_PORT:
        return True
    return spec.get("type") == LOAD_BALANCER and spec.get("allocateLoadBalancerNodePorts") is not False


def needs_health_port(spec: Json) -> bool:
    """Return whether the type is LoadBalancer, with externalTrafficPolicy Local."""
    return spec.get("type") == LOAD_BALANCER and spec.get("externalTrafficPolicy") == "Local"


def externally_accessible(spec: Json) -> bool:
    """Return whether externalTrafficPolicy has an effect."""
    return spec.get("type") in {NODE_PORT, LOAD_BALANCER} or bool(spec.get("externalIPs"))


def set_defaults(service: Json) -> None:
    """Set the API's defaults in place; given values are not changed."""
    spec = service.setdefault("spec", {})
    for name in [k for k, v in spec.items() if v is None or v in ("", [])]:
        del spec[name]
    service["status"] = service.get("status") or {"loadBalancer": {}}
    service["status"].setdefault("loadBalancer", {})
    spec.setdefault("sessionAffinity", "None")
    if spec["sessionAffinity"] == "ClientIP":
        config = spec.setdefault("sessionAffinityConfig", {})
        client = config["clientIP"] = config.get("clientIP") or {}
        if client.get("timeoutSeconds") is None:
            client["timeoutSeconds"] = 10800
    elif spec["sessionAffinity"] == "None":
        spec.pop("sessionAffinityConfig", None)
    spec.setdefault("type", "ClusterIP")
    for port in spec.get("ports") or ():
        port["protocol"] = port.get("protocol") or "TCP"
        if port.get("targetPort") in {None, 0, ""}:
            port["targetPort"] = port.get("port", 0)
        for name in [k for k, v in port.items() if v is None or (v in ("", 0) and k != "port")]:
            del port[name]
    if externally_accessible(spec):
        spec.setdefault("externalTrafficPolicy", "Cluster")
    if needs_cluster_ip(spec):
        spec.setdefault("internalTrafficPolicy", "Cluster")
    if spec["type"] == LOAD_BALANCER:
        spec.setdefault("allocateLoadBalancerNodePorts", True)
    for name in ("healthCheckNodePort", "publishNotReadyAddresses"):
        if not spec.get(name):
            spec.pop(name, None)


def sync_cluster_ips(spec: Json, old: Json | None) -> None:
    """Make clusterIP and clusterIPs equal if only one of them was given or changed."""
    first, all_ = spec.get("clusterIP"), spec.get("clusterIPs")
    if old is not None and all_ == old.get("clusterIPs") and first != old.get("clusterIP"):
        all_ = [first] if first else None
    elif old is not None and first == old.get("clusterIP") and all_ and all_[0] != first:
        first = all_[0]
    if first and not all_:
        all_ = [first]
    _set(spec, "clusterIP", first)
    _set(spec, "clusterIPs", all_)


def _set(spec: Json, name: str, value: Any) -> None:
    if value:
        spec[name] = value
    else:
        spec.pop(name, None)


def family_of(address: str) -> str:
    """Return IPv4 or IPv6, or '' if the text is not an address."""
    try:
        return f"IPv{ipaddress.ip_address(address).version}"
    except ValueError:
        return ""


def init_families(spec: Json, families: tuple[str, ...], errors: FieldErrors) -> None:
    """Set ipFamilies and ipFamilyPolicy from the given values and the cluster's `families`."""
    if not needs_cluster_ip(spec):
        return
    ips = [ip for ip in spec.get("clusterIPs") or () if ip != "None"]
    given: list[str] = list(spec.get("ipFamilies") or ())
    for i, ip in enumerate(ips):
        family = family_of(ip)
        if i >= len(given) and family:
            given.append(family)
        elif family and given[i] != family:
            errors.invalid(
                f"spec.clusterIPs[{i}]", ip, f"expected an {given[i]} value as indicated by `ipFamilies[{i}]`"
            )
    policy = spec.get("ipFamilyPolicy")
    bare_headless = is_headless(spec) and not spec.get("selector")
    if policy is None and (len(given) == 2 or bare_headless):
        policy = "RequireDualStack"
    policy = policy or "SingleStack"
    if not given:
        given = [families[0]]
    wants_two = policy in DUAL_POLICIES and len(given) == 1
    others = [f for f in ("IPv4", "IPv6") if f != given[0]]
    if wants_two and (len(families) == 2 or bare_headless):
        given += others
    if policy == "RequireDualStack" and len(families) < 2 and not bare_headless:
        errors.invalid("spec.ipFamilyPolicy", policy, "this cluster is not configured for dual-stack services")
    if policy == "SingleStack" and len(given) == 2:
        errors.invalid("spec.ipFamilyPolicy", policy, "must be RequireDualStack or PreferDualStack when "
                       "multiple `ipFamilies` are specified")  # fmt: skip
    for i, family in enumerate(given):
        if family not in {"IPv4", "IPv6"}:
            errors.unsupported(f"spec.ipFamilies[{i}]", family, ("IPv4", "IPv6"))
        elif family not in families and not bare_headless:
            errors.invalid(f"spec.ipFamilies[{i}]", family, "not configured on this cluster")
    spec["ipFamilies"], spec["ipFamilyPolicy"] = given, policy


def carry_over(spec: Json, old: Json) -> None:
    """Keep allocated values that an update omits (a manual PUT, kubectl replace)."""
    if needs_cluster_ip(spec) and needs_cluster_ip(old):
        if not spec.get("clusterIP") and not spec.get("clusterIPs"):
            _set(spec, "clusterIP", old.get("clusterIP"))
        if not spec.get("clusterIPs") and spec.get("clusterIP") == old.get("clusterIP"):
            _set(spec, "clusterIPs", list(old.get("clusterIPs") or ()))
        same_ips = spec.get("clusterIPs") == old.get("clusterIPs")
        if same_ips and not spec.get("ipFamilies"):
            _set(spec, "ipFamilies", list(old.get("ipFamilies") or ()))
        if same_ips and not spec.get("ipFamilyPolicy"):
            _set(spec, "ipFamilyPolicy", old.get("ipFamilyPolicy"))
    if needs_node_ports(spec) and needs_node_ports(old):
        used = {p.get("nodePort") for p in spec.get("ports") or ()}
        known = {(p.get("protocol"), p.get("port")): p.get("nodePort") for p in old.get("ports") or ()}
        for port in spec.get("ports") or ():
            was = known.get((port.get("protocol"), port.get("port")))
            if not port.get("nodePort") and was and was not in used:
                port["nodePort"] = was
    if needs_health_port(spec) and needs_health_port(old) and not spec.get("healthCheckNodePort"):
        _set(spec, "healthCheckNodePort", old.get("healthCheckNodePort"))


def drop_dependents(spec: Json, old: Json) -> None:
    """After a change of type, remove fields that only the old type has, if the writer did not change them."""
    if needs_cluster_ip(old) and not needs_cluster_ip(spec):
        for name in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"):
            if spec.get(name) == old.get(name):
                spec.pop(name, None)
    old_ports = {p.get("nodePort") for p in old.get("ports") or () if p.get("nodePort")}
    if needs_node_ports(old) and spec.get("type") not in {NODE_PORT, LOAD_BALANCER}:
        for port in spec.get("ports") or ():
            if port.get("nodePort") in old_ports:
                del port["nodePort"]
    if needs_health_port(old) and not needs_health_port(spec):
        _drop_if_same(spec, old, "healthCheckNodePort")
    if old.get("type") == LOAD_BALANCER and spec.get("type") != LOAD_BALANCER:
        _drop_if_same(spec, old, "allocateLoadBalancerNodePorts")
        _drop_if_same(spec, old, "loadBalancerClass")
    if externally_accessible(old) and not externally_accessible(spec):
        _drop_if_same(spec, old, "externalTrafficPolicy")


def _drop_if_same(spec: Json, old: Json, name: str) -> None:
    if spec.get(name) == old.get(name):
        spec.pop(name, None)


def resize_families(spec: Json, old: Json) -> None:
    """If the policy changed to single-stack, release the second address; if it changed to dual-stack, request one
    (KEP-563)."""
    if not needs_cluster_ip(spec) or spec.get("ipFamilyPolicy") == old.get("ipFamilyPolicy"):
        return
    if spec.get("ipFamilyPolicy") == "SingleStack":
        for name in ("clusterIPs", "ipFamilies"):
            if spec.get(name) == old.get(name) and spec.get(name):
                spec[name] = spec[name][:1]
