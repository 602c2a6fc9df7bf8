"""Prepares a Service for the store: completes fields, checks rules, allocates addresses and ports."""

from __future__ import annotations

from lab.apiserver import service_fields as fields
from lab.apiserver.allocation import Allocations, NodePort, canonical
from lab.apiserver.service_rules import check_service, check_update
from lab.apiserver.status import ApiError, FieldErrors, Json


class ServiceStrategy:
    """Creates and updates Services: completes the object in place, or raises ApiError 422."""

    def __init__(self, allocations: Allocations) -> None:
        self._allocations = allocations

    def create(self, service: Json) -> None:
        """Finish a new Service."""
        fields.set_defaults(service)
        spec = service["spec"]
        fields.sync_cluster_ips(spec, None)
        errors = FieldErrors()
        fields.init_families(spec, self._allocations.families, errors)
        check_service(service, errors)
        self._raise(service, errors)
        self._allocate(service, {}, errors)
        self._raise(service, errors)

    def update(self, service: Json, old: Json) -> None:
        """Finish a changed Service; `old` is the stored object."""
        fields.set_defaults(service)
        spec, before = service["spec"], old["spec"]
        fields.carry_over(spec, before)
        fields.sync_cluster_ips(spec, before)
        fields.drop_dependents(spec, before)
        fields.resize_families(spec, before)
        errors = FieldErrors()
        fields.init_families(spec, self._allocations.families, errors)
        check_service(service, errors)
        check_update(service, old, errors)
        self._raise(service, errors)
        self._allocate(service, before, errors)
        self._raise(service, errors)
        if spec["type"] != fields.LOAD_BALANCER and before["type"] == fields.LOAD_BALANCER:
            service["status"] = {"loadBalancer": {}}

    @staticmethod
    def _raise(service: Json, errors: FieldErrors) -> None:
        errors.raise_if_any("Service", "", service["metadata"].get("name", ""))

    def _allocate(self, service: Json, before: Json, errors: FieldErrors) -> None:
        spec = service["spec"]
        if fields.needs_cluster_ip(spec) and not fields.is_headless(spec):
            self._allocate_addresses(spec, before.get("clusterIPs") or [], errors)
        elif fields.is_headless(spec):
            spec["clusterIP"], spec["clusterIPs"] = "None", ["None"]
        held = {
            (p["protocol"], p["nodePort"]) for p in before.get("ports") or () if p.get("nodePort")
        }  # the Service keeps its own addresses and ports
        if before.get("healthCheckNodePort"):
            held.add(("TCP", before["healthCheckNodePort"]))
        self._allocate_ports(spec, held, errors)

    def _allocate_addresses(self, spec: Json, held: list[str], errors: FieldErrors) -> None:
        ips = [canonical(ip) for ip in spec.get("clusterIPs") or ()]
        for i, ip in enumerate(ips):
            why = "" if ip in held else self._allocations.why_not_address(ip)
            if why:
                errors.invalid("spec.clusterIPs", spec["clusterIPs"][i:], why)
                return
        for family in spec["ipFamilies"][len(ips) :]:
            ip = self._allocations.next_address(family) or ""
            if not ip:
                raise ApiError(
                    500, "InternalError", "Internal error occurred: failed to allocate a serviceIP: range is full"
                )
            ips.append(ip)
        spec["clusterIP"], spec["clusterIPs"] = ips[0], ips

    def _allocate_ports(self, spec: Json, held: set[NodePort], errors: FieldErrors) -> None:
        ports = spec.get("ports") or []
        mine: set[NodePort] = {(p["protocol"], p["nodePort"]) for p in ports if p.get("nodePort")}
        for i, port in enumerate(ports):
            wanted = port.get("nodePort")
            if wanted and (port["protocol"], wanted) not in held:
                why = self._allocations.why_not_port(port["protocol"], wanted)
                if why:
                    errors.invalid(f"spec.ports[{i}].nodePort", wanted, why)
        if errors.causes:
            return
        if fields.needs_node_ports(spec):
            for port in ports:
                if not port.get("nodePort"):
                    port["nodePort"] = self._shared_port(port, ports, mine) or self._new_port(mine)
                    mine.add((port["protocol"], port["nodePort"]))
        if fields.needs_health_port(spec):
            self._allocate_health_port(spec, held, mine, errors)

    def _allocate_health_port(self, spec: Json, held: set[NodePort], mine: set[NodePort], errors: FieldErrors) -> None:
        wanted = spec.get("healthCheckNodePort")
        if not wanted:
            spec["healthCheckNodePort"] = self._new_port(mine)
        elif ("TCP", wanted) not in held and (why := self._allocations.why_not_port("TCP", wanted)):
            errors.invalid("spec.healthCheckNodePort", wanted, why)

    def _shared_port(self, port: Json, ports: list[Json], mine: set[NodePort]) -> int:
        """Ports with the same number and different protocols get the same node port (DNS: 53 UDP and TCP)."""
        for other in ports:
            shared = other.get("nodePort")
            if shared and other["port"] == port["port"] and (port["protocol"], shared) not in mine:
                free = not self._allocations.why_not_port(port["protocol"], shared)
                return int(shared) if free else 0
        return 0

    def _new_port(self, mine: set[NodePort]) -> int:
        port = self._allocations.next_port(mine)
        if port is None:
            raise ApiError(
                500, "InternalError", "Internal error occurred: failed to allocate a nodePort: range is full"
            )
        return port
