"""Gives Services of type LoadBalancer addresses from ranges that the host outside routes to node-a."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from lab.apiserver.resources import by_plural
from lab.apiserver.rest import Rest
from lab.apiserver.status import Json
from lab.apiserver.store import Key
from lab.controllers.base import Controller

_SERVICES = by_plural("services")


def ingress_of(service: Json) -> list[str]:
    """Return the load balancer addresses of a Service."""
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    return [i["ip"] for i in ingress if i.get("ip")]


def first_free(cidr: str, taken: Iterable[str]) -> str | None:
    """Return the lowest free address of a range, without the address of the network."""
    used = set(taken)
    network = ipaddress.ip_network(cidr)
    for offset in range(1, min(network.num_addresses - 1, 65536)):
        address = str(network[offset])
        if address not in used:
            return address
    return None


class LoadBalancers(Controller):
    """Writes status.loadBalancer. Other controllers handle Services with a loadBalancerClass."""

    def __init__(self, rest: Rest, ranges: dict[str, str]) -> None:
        super().__init__(rest)
        self._ranges = ranges
        self._assigned: dict[Key, list[str]] = {}

    def start(self) -> None:
        """Follow Services."""
        for record in self.store.records("services"):
            self._assigned[record.key] = ingress_of(record.decode())
        self.follow("services", self.mark)

    def sync(self, key: Key) -> None:
        """Give a Service one address for each of its IP families."""
        record = self.store.get("services", key)
        if record is None or record.fields["spec.type"] != "LoadBalancer":
            self._assigned.pop(key, None)
            return
        service = record.decode()
        if service["spec"].get("loadBalancerClass"):
            return
        have = ingress_of(service)
        wanted = [self._address(key, service, family, have) for family in service["spec"].get("ipFamilies") or ()]
        chosen = [ip for ip in wanted if ip]
        self._assigned[key] = chosen
        if chosen != have:
            ingress = [{"ip": ip, "ipMode": "VIP"} for ip in chosen]
            self.rest.update(
                _SERVICES, {"metadata": {}, "status": {"loadBalancer": {"ingress": ingress}}}, key, "status"
            )

    def _address(self, key: Key, service: Json, family: str, have: list[str]) -> str | None:
        for ip in have:
            if (":" in ip) == (family == "IPv6"):
                return ip
        taken = [ip for other, ips in self._assigned.items() if other != key for ip in ips]
        asked = service["spec"].get("loadBalancerIP")
        if asked and (":" in asked) == (family == "IPv6"):
            return None if asked in taken else str(asked)
        return first_free(self._ranges[family], taken)
