"""Validates Services. Pure; allocation conflicts are found elsewhere.

Source: ValidateService and ValidateServiceUpdate of Kubernetes 1.36, with the recorded messages.
"""

from __future__ import annotations

import ipaddress
import re

from lab.apiserver.names import DNS_LABEL_MESSAGE, dns_label, dns_subdomain, port_name_error
from lab.apiserver.service_fields import (
    EXTERNAL_NAME,
    LOAD_BALANCER,
    NODE_PORT,
    externally_accessible,
    is_headless,
    needs_cluster_ip,
    needs_health_port,
)
from lab.apiserver.status import FieldErrors, Json

PROTOCOLS = ("SCTP", "TCP", "UDP")
TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
POLICIES = ("Cluster", "Local")
FAMILY_POLICIES = ("PreferDualStack", "RequireDualStack", "SingleStack")
DISTRIBUTIONS = ("PreferClose", "PreferSameNode", "PreferSameZone")
PORT_RANGE = "must be between 1 and 65535, inclusive"
BAD_IP = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"


def check_port(path: str, value: object, errors: FieldErrors) -> None:
    """Check a port number, or (for targetPort) a port's name."""
    if isinstance(value, str):
        why = port_name_error(value)
        if why:
            errors.invalid(path, value, why)
    elif not isinstance(value, int) or not 1 <= value <= 65535:
        errors.invalid(path, value, PORT_RANGE)


def _is_ip(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return "%" not in value


def check_service(service: Json, errors: FieldErrors) -> None:
    """Return the errors of all rules that need only the Service itself."""
    spec = service["spec"]
    if spec["type"] not in TYPES:
        errors.unsupported("spec.type", spec["type"], TYPES)
    if not spec.get("ports") and needs_cluster_ip(spec) and not is_headless(spec):
        errors.required("spec.ports")
    _check_ports(spec, errors)
    _check_cluster_ips(spec, errors)
    if spec["type"] == EXTERNAL_NAME:
        _check_external_name(spec, errors)
    if spec["sessionAffinity"] not in {"None", "ClientIP"}:
        errors.unsupported("spec.sessionAffinity", spec["sessionAffinity"], ("ClientIP", "None"))
    timeout = ((spec.get("sessionAffinityConfig") or {}).get("clientIP") or {}).get("timeoutSeconds")
    if timeout is not None and not 0 < timeout <= 86400:
        path = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
        errors.invalid(path, timeout, "must be greater than 0 and less than or equal to 86400")
    for i, ip in enumerate(spec.get("externalIPs") or ()):
        if not _is_ip(ip):
            errors.invalid(f"spec.externalIPs[{i}]", ip, BAD_IP)
        elif ipaddress.ip_address(ip).is_loopback or ipaddress.ip_address(ip).is_unspecified:
            errors.invalid(f"spec.externalIPs[{i}]", ip, "may not be in the loopback range or unspecified")
    _check_policies(spec, errors)
    _check_load_balancer(spec, errors)


def _check_ports(spec: Json, errors: FieldErrors) -> None:
    ports = spec.get("ports") or []
    names: set[str] = set()
    seen: set[tuple[object, object]] = set()
    node_ports: set[tuple[object, object]] = set()
    for i, port in enumerate(ports):
        path = f"spec.ports[{i}]"
        name = port.get("name", "")
        if not name and len(ports) > 1:
            errors.required(f"{path}.name")
        elif name and not dns_label(name):
            errors.invalid(f"{path}.name", name, DNS_LABEL_MESSAGE)
        elif name in names:
            errors.duplicate(f"{path}.name", name)
        names.add(name)
        check_port(f"{path}.port", port.get("port", 0), errors)
        if port["protocol"] not in PROTOCOLS:
            errors.unsupported(f"{path}.protocol", port["protocol"], PROTOCOLS)
        check_port(f"{path}.targetPort", port.get("targetPort", 0), errors)
        key = (port["protocol"], port.get("port"))
        if key in seen:
            errors.duplicate(path, {"protocol": key[0], "port": key[1]})
        seen.add(key)
        if port.get("nodePort"):
            if spec["type"] not in {NODE_PORT, LOAD_BALANCER}:
                errors.forbidden(f"{path}.nodePort", f"may not be used when `type` is '{spec['type']}'")
            node_key = (port["protocol"], port["nodePort"])
            if node_key in node_ports:
                errors.duplicate(f"{path}.nodePort", port["nodePort"])
            node_ports.add(node_key)


def _check_cluster_ips(spec: Json, errors: FieldErrors) -> None:
    ips = spec.get("clusterIPs") or []
    if not needs_cluster_ip(spec):
        if ips:
            errors.forbidden("spec.clusterIPs", "may not be set when `type` is 'ExternalName'")
        return
    if len(ips) > 2:
        errors.invalid("spec.clusterIPs", ips, "may only hold up to 2 values")
    if ips and spec.get("clusterIP") != ips[0]:
        errors.invalid("spec.clusterIPs", ips, "first value must match `clusterIP`")
    if "None" in ips and len(ips) > 1:
        errors.invalid("spec.clusterIPs[1]", ips[1], "may not be used with `None`")
    for i, ip in enumerate(ips):
        if ip != "None" and not _is_ip(ip):
            errors.invalid(f"spec.clusterIPs[{i}]", ip, BAD_IP)
    families = [ipaddress.ip_address(ip).version for ip in ips if _is_ip(ip)]
    if len(families) == 2 and families[0] == families[1]:
        errors.invalid("spec.clusterIPs", ips, "may specify no more than one IP for each IP family")
    if is_headless(spec) and spec["type"] in {NODE_PORT, LOAD_BALANCER}:
        errors.invalid("spec.clusterIPs[0]", "None", f"may not be set to 'None' for {spec['type']} services")


def _check_external_name(spec: Json, errors: FieldErrors) -> None:
    name = spec.get("externalName", "").removesuffix(".")
    if not name:
        errors.required("spec.externalName")
    elif not dns_subdomain(name):
        errors.invalid("spec.externalName", spec["externalName"], "a lowercase RFC 1123 subdomain is expected")


def _check_policies(spec: Json, errors: FieldErrors) -> None:
    policy = spec.get("externalTrafficPolicy")
    if policy and not externally_accessible(spec):
        why = "may only be set for externally-accessible services"
        errors.invalid("spec.externalTrafficPolicy", policy, why)
    elif policy and policy not in POLICIES:
        errors.unsupported("spec.externalTrafficPolicy", policy, POLICIES)
    internal = spec.get("internalTrafficPolicy")
    if internal and internal not in POLICIES:
        errors.unsupported("spec.internalTrafficPolicy", internal, POLICIES)
    if spec.get("ipFamilyPolicy") and spec["ipFamilyPolicy"] not in FAMILY_POLICIES:
        errors.unsupported("spec.ipFamilyPolicy", spec["ipFamilyPolicy"], FAMILY_POLICIES)
    distribution = spec.get("trafficDistribution")
    if distribution and distribution not in DISTRIBUTIONS:
        errors.unsupported("spec.trafficDistribution", distribution, DISTRIBUTIONS)


def _check_load_balancer(spec: Json, errors: FieldErrors) -> None:
    health = spec.get("healthCheckNodePort")
    if health and not needs_health_port(spec):
        why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"
        errors.invalid("spec.healthCheckNodePort", health, why)
    ranges = spec.get("loadBalancerSourceRanges") or []
    if ranges and spec["type"] != LOAD_BALANCER:
        errors.forbidden("spec.loadBalancerSourceRanges", "may only be used when `type` is 'LoadBalancer'")
    for i, text in enumerate(ranges):
        try:
            ipaddress.ip_network(text.strip(), strict=False)
        except ValueError:
            valid = False
        else:
            valid = bool(re.search(r"/\d+$", text.strip()))
        if not valid:
            why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            errors.invalid(f"spec.loadBalancerSourceRanges[{i}]", text, why)


def check_update(new: Json, old: Json, errors: FieldErrors) -> None:
    """Check an update. Cluster IPs cannot change, except in a change to or from type ExternalName."""
    spec, before = new["spec"], old["spec"]
    if not needs_cluster_ip(spec) or not needs_cluster_ip(before):
        return
    ips, were = spec.get("clusterIPs") or [], before.get("clusterIPs") or []
    for i, was in enumerate(were):
        now = ips[i] if i < len(ips) else None
        may_drop = i == 1 and spec.get("ipFamilyPolicy") == "SingleStack" and now is None
        if now != was and not may_drop:
            errors.invalid(f"spec.clusterIPs[{i}]", ips, "may not change once set")
            break
    health, was_health = spec.get("healthCheckNodePort"), before.get("healthCheckNodePort")
    if needs_health_port(spec) and needs_health_port(before) and health != was_health:
        errors.invalid("spec.healthCheckNodePort", health, "field is immutable")
