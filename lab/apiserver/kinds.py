"""Defaults and validation of every kind except Service, applied to the body of a create or update in place.

Source: the recordings, and those strategies and validations of core/v1, discovery.k8s.io/v1 and networking.k8s.io/v1
that users of the lab need.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from lab.apiserver.names import DNS_LABEL_MESSAGE, dns_label, dns_subdomain, port_name_error
from lab.apiserver.service_rules import BAD_IP, PORT_RANGE, PROTOCOLS
from lab.apiserver.status import FieldErrors, Json

Check = Callable[[Json, Json | None, FieldErrors], None]
"""A function of the new object, the stored object (None on create), and the list to which it appends errors."""

NODE_INFO = (
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
    "kubeletVersion",
    "kubeProxyVersion",
    "operatingSystem",
    "architecture",
)
BAD_CONFIG_KEY = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name', or 'KEY_NAME', or "
    "'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)
MAX_ENDPOINTS, MAX_ADDRESSES, MAX_PORTS = 1000, 100, 20000


def _namespace(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    metadata = obj["metadata"]
    if not dns_label(metadata["name"]):
        errors.invalid("metadata.name", metadata["name"], DNS_LABEL_MESSAGE)
    metadata["labels"] = {**(metadata.get("labels") or {}), "kubernetes.io/metadata.name": metadata["name"]}
    if old is None:
        obj["spec"] = {"finalizers": ["kubernetes"]}
        obj["status"] = {"phase": "Active"}


def _node(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    spec = obj["spec"] = obj.get("spec") or {}
    for i, cidr in enumerate(spec.get("podCIDRs") or ()):
        try:
            ipaddress.ip_network(cidr)
        except ValueError:
            why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            errors.invalid(f"spec.podCIDRs[{i}]", cidr, why)
    if old is None:
        # The TaintNodesByCondition admission plugin: a node is not ready until its kubelet reports it as ready.
        taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
        taints = spec.setdefault("taints", [])
        if taint not in taints:
            taints.append(taint)
    elif old.get("spec", {}).get("podCIDRs") not in (None, [], spec.get("podCIDRs")):
        errors.forbidden("spec.podCIDRs", "node updates may not change podCIDR except from '' to valid")
    status = obj["status"] = obj.get("status") or {}
    status.setdefault("daemonEndpoints", {"kubeletEndpoint": {"Port": 0}})
    status.setdefault("nodeInfo", dict.fromkeys(NODE_INFO, ""))


def _containers(spec: Json, path: str, errors: FieldErrors) -> None:
    containers = spec.get("containers") or []
    if not containers:
        errors.required(f"{path}.containers")
    for i, container in enumerate(containers):
        where = f"{path}.containers[{i}]"
        if not container.get("name"):
            errors.required(f"{where}.name")
        elif not dns_label(container["name"]):
            errors.invalid(f"{where}.name", container["name"], DNS_LABEL_MESSAGE)
        for j, port in enumerate(container.get("ports") or ()):
            port["protocol"] = port.get("protocol") or "TCP"
            number = port.get("containerPort", 0)
            if not 1 <= number <= 65535:
                errors.invalid(f"{where}.ports[{j}].containerPort", number, PORT_RANGE)
            if port["protocol"] not in PROTOCOLS:
                errors.unsupported(f"{where}.ports[{j}].protocol", port["protocol"], PROTOCOLS)
            if port.get("name") and (why := port_name_error(port["name"])):
                errors.invalid(f"{where}.ports[{j}].name", port["name"], why)


def _pod_spec(spec: Json, path: str, errors: FieldErrors) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    _containers(spec, path, errors)


def _pod(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    spec = obj["spec"] = obj.get("spec") or {}
    _pod_spec(spec, "spec", errors)
    if old is None:
        obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif old["spec"].get("nodeName") and old["spec"]["nodeName"] != spec.get("nodeName"):
        errors.forbidden("spec", "pod updates may not change fields other than `spec.containers[*].image`")


def _replication_controller(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    spec = obj["spec"] = obj.get("spec") or {}
    if spec.get("replicas") is None:
        spec["replicas"] = 1
    elif spec["replicas"] < 0:
        errors.invalid("spec.replicas", spec["replicas"], "must be greater than or equal to 0")
    template = spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if labels:
        spec["selector"] = spec.get("selector") or dict(labels)
        obj["metadata"]["labels"] = obj["metadata"].get("labels") or dict(labels)
    selector = spec.get("selector") or {}
    if not selector:
        errors.required("spec.selector")
    if not template:
        errors.required("spec.template")
        return
    if not selector.items() <= labels.items():
        errors.invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    _pod_spec(template.setdefault("spec", {}), "spec.template.spec", errors)
    if old is None:
        obj["status"] = {"replicas": 0}


def _event(obj: Json, _old: Json | None, errors: FieldErrors) -> None:
    regarding = (obj.get("involvedObject") or {}).get("namespace") or "default"
    if obj["metadata"].get("namespace") != regarding:
        errors.invalid("involvedObject.namespace", regarding, "does not match event.namespace")
    obj.setdefault("source", {})
    obj.setdefault("firstTimestamp", None)
    obj.setdefault("lastTimestamp", None)
    obj.setdefault("eventTime", None)
    obj.setdefault("reportingComponent", "")
    obj.setdefault("reportingInstance", "")


def _config_map(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    parts = {name: obj.get(name) or {} for name in ("data", "binaryData")}
    for name, entries in parts.items():
        for key in entries:
            if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) or key in {".", ".."}:
                errors.invalid(f"{name}[{key}]", key, BAD_CONFIG_KEY)
    for key in parts["data"].keys() & parts["binaryData"].keys():
        errors.invalid(f"data[{key}]", key, "duplicate of key present in binaryData")
    if old is not None and old.get("immutable"):
        if not obj.get("immutable"):
            errors.forbidden("immutable", "field is immutable when `immutable` is set")
        for name, entries in parts.items():
            if entries != (old.get(name) or {}):
                errors.forbidden(name, "field is immutable when `immutable` is set")


def _endpoints(obj: Json, _old: Json | None, errors: FieldErrors) -> None:
    for i, subset in enumerate(obj.get("subsets") or ()):
        where = f"subsets[{i}]"
        if not subset.get("addresses") and not subset.get("notReadyAddresses"):
            errors.required(where, "must specify `addresses` or `notReadyAddresses`")
        for name in ("addresses", "notReadyAddresses"):
            for j, address in enumerate(subset.get(name) or ()):
                _usable_address(address.get("ip") or "", f"{where}.{name}[{j}].ip", errors)
        ports = subset.get("ports") or ()
        for j, port in enumerate(ports):
            port["protocol"] = port.get("protocol") or "TCP"
            if not port.get("name") and len(ports) > 1:
                errors.required(f"{where}.ports[{j}].name")
            if not 1 <= (port.get("port") or 0) <= 65535:
                errors.invalid(f"{where}.ports[{j}].port", port.get("port") or 0, PORT_RANGE)
            if port["protocol"] not in PROTOCOLS:
                errors.unsupported(f"{where}.ports[{j}].protocol", port["protocol"], PROTOCOLS)


def _lease(obj: Json, _old: Json | None, errors: FieldErrors) -> None:
    spec = obj["spec"] = obj.get("spec") or {}
    if spec.get("leaseDurationSeconds") is not None and spec["leaseDurationSeconds"] <= 0:
        errors.invalid("spec.leaseDurationSeconds", spec["leaseDurationSeconds"], "must be greater than 0")
    if (spec.get("leaseTransitions") or 0) < 0:
        errors.invalid("spec.leaseTransitions", spec["leaseTransitions"], "must be greater than or equal to 0")


def _usable_address(value: str, path: str, errors: FieldErrors) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(value)
    except ValueError:
        errors.invalid(path, value, BAD_IP)
        return None
    if ip.is_loopback or ip.is_unspecified or ip.is_link_local or ip.is_multicast:
        errors.invalid(path, value, "may not be unspecified, in the loopback, link-local or multicast range")
        return None
    return ip


def _slice_address(value: str, address_type: str, path: str, errors: FieldErrors) -> None:
    if address_type == "FQDN":
        if not dns_subdomain(value):
            errors.invalid(path, value, "a lowercase RFC 1123 subdomain is expected")
        return
    ip = _usable_address(value, path, errors)
    if ip is not None and f"IPv{ip.version}" != address_type:
        errors.invalid(path, value, f"must be an {address_type} address")


def _endpoint_slice(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    address_type = obj.get("addressType") or ""
    allowed = ("FQDN", "IPv4", "IPv6")
    if not address_type:
        errors.required("addressType")
    elif address_type not in allowed:
        errors.unsupported("addressType", address_type, allowed)
    endpoints = obj["endpoints"] = obj.get("endpoints") or None
    if endpoints and len(endpoints) > MAX_ENDPOINTS:
        errors.too_many("endpoints", len(endpoints), MAX_ENDPOINTS)
    for i, endpoint in enumerate(endpoints or ()):
        endpoint.setdefault("conditions", {})
        addresses = endpoint.get("addresses") or []
        if not addresses:
            errors.required(f"endpoints[{i}].addresses", "must contain at least 1 address")
        if len(addresses) > MAX_ADDRESSES:
            errors.too_many(f"endpoints[{i}].addresses", len(addresses), MAX_ADDRESSES)
        for j, address in enumerate(addresses):
            _slice_address(address, address_type, f"endpoints[{i}].addresses[{j}]", errors)
    _slice_ports(obj, errors)
    if old is not None and old.get("addressType") != address_type:
        errors.invalid("addressType", address_type, "field is immutable")


def _slice_ports(obj: Json, errors: FieldErrors) -> None:
    ports = obj["ports"] = obj.get("ports") or None
    if ports and len(ports) > MAX_PORTS:
        errors.too_many("ports", len(ports), MAX_PORTS)
    names: set[str] = set()
    for i, port in enumerate(ports or ()):
        port["name"] = port.get("name") or ""
        port["protocol"] = port.get("protocol") or "TCP"
        if port["name"] in names:
            errors.duplicate(f"ports[{i}].name", port["name"])
        elif port["name"] and not dns_label(port["name"]):
            errors.invalid(f"ports[{i}].name", port["name"], DNS_LABEL_MESSAGE)
        names.add(port["name"])
        if port["protocol"] not in PROTOCOLS:
            errors.unsupported(f"ports[{i}].protocol", port["protocol"], PROTOCOLS)


def _service_cidr(obj: Json, old: Json | None, errors: FieldErrors) -> None:
    cidrs = (obj.get("spec") or {}).get("cidrs") or []
    if not cidrs:
        errors.required("spec.cidrs", "at least one CIDR required")
    for i, cidr in enumerate(cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError:
            why = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            errors.invalid(f"spec.cidrs[{i}]", cidr, why)
    if old is not None and (old.get("spec") or {}).get("cidrs") != cidrs:
        errors.invalid("spec.cidrs", cidrs, "field is immutable")
    if old is None:
        obj["status"] = {}


def _nothing(_obj: Json, _old: Json | None, _errors: FieldErrors) -> None:
    """A kind without rules."""


CHECKS: dict[str, Check] = {
    "ConfigMap": _config_map,
    "Endpoints": _endpoints,
    "Lease": _lease,
    "Namespace": _namespace,
    "Node": _node,
    "Pod": _pod,
    "ReplicationController": _replication_controller,
    "ServiceAccount": _nothing,
    "Event": _event,
    "EndpointSlice": _endpoint_slice,
    "ServiceCIDR": _service_cidr,
}
