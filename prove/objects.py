"""Services and their slices in a history: creates, changes and deletes them.

They pass Kubernetes' validation, and each address has one owner, except external IPs, which users write themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from prove.steps import Json, Step, copied

BORDERS = (0, 1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 255, 256, 257)
"""Numbers of endpoints near the limits of the classes of 1, 4, 16, 64 and 256."""
PODS = ("a1", "a2", "a3", "a4", "b1", "b2", "b3")
FAMILIES = (("IPv4",), ("IPv4",), ("IPv6",), ("IPv4", "IPv6"), ("IPv6", "IPv4"))
SERVICE_IPS = {"IPv4": "10.96.200.{}", "IPv6": "fd00:10:96::c8{:02x}"}
EXTERNAL_IPS = ("198.51.100.1", "198.51.100.2", "198.51.100.3", "2001:db8:1::1", "2001:db8:1::2")
INGRESS_IPS = {"IPv4": "203.0.113.{}", "IPv6": "2001:db8:2::{:x}"}
RANGES = (
    "192.168.100.0/24",
    "192.168.100.50/32",
    "10.244.0.0/16",
    "172.16.0.0/12",
    "0.0.0.0/0",
    "fd00:100::/64",
    "::/0",
)
UNREADABLE = ("10.0.0.0/99",)
"""Source ranges that no API server accepts."""
WEIGHTS = ("node-a=0", "node-b=0", "node-a=50", "node-a=50,node-b=25", "node-a=1,node-b=100", "=", "node-a=101")
PORT_RANGES = (
    *("2990-3010/tcp", "3000-3001/udp", "3001-4000/tcp,70-90/udp", "2990-3000/tcp, 3001-3010/tcp,3000-3000/udp"),
    *("81-3000/tcp,81-3000/udp", "1-79/sctp,x/tcp,3010-3000/udp", "1-65535/tcp,3000/udp"),
)
"""Ranges of ports about those on which pods answer; several Services have them at one external IP."""
ROOM = 60
"""Limits of addresses, and of simultaneous Services."""
_STATES: tuple[Json, ...] = (
    {"ready": True},
    {"ready": True},
    {"ready": True},
    {"ready": False, "serving": True, "terminating": True},
    {"ready": False, "serving": False, "terminating": True},
    {"ready": False},
    {},
)


class Objects:
    """The existing objects of a history, which later steps change. `made` are the steps so far."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.services: dict[tuple[str, str], Json] = {}
        self.slices: dict[tuple[str, str], Json] = {}
        self.made: list[Step] = []
        self._serial = 0
        self._shared = self.random.random() < 0.4
        self.ranges = RANGES + UNREADABLE

    # -- Services -----------------------------------------------------------------------------------------------------

    def _new(self) -> None:
        if len(self.services) < ROOM // 2:
            name = (self.random.choice(("default", "default", "other")), f"s{self._next()}")
            self._put_service(name, self._service(name))
            if self.random.random() < 0.8:
                self._slices_of(name)

    def _service(self, name: tuple[str, str]) -> Json:
        families = list(self.random.choice(FAMILIES))
        kind = self.random.choice(("ClusterIP", "ClusterIP", "NodePort", "LoadBalancer"))
        spec: Json = {"type": kind, "ipFamilies": families, "clusterIPs": [self._cluster_ip(f) for f in families]}
        spec["clusterIP"] = spec["clusterIPs"][0]
        spec["ports"] = self._ports(kind)
        service = {"metadata": self._metadata(*name), "spec": spec, "status": {"loadBalancer": {}}}
        for change in self.random.sample(self._changes(), self.random.choice((0, 0, 1, 3))):
            change(service)
        if self._shared:  # several Services claim each external IP
            self._other_external_ips(service)
        self._complete(service)
        return service

    def _metadata(self, namespace: str, name: str) -> Json:
        number = self._next()
        stamp = f"2024-01-{1 + number // 1440 % 28:02}T{number // 60 % 24:02}:{number % 60:02}:00Z"
        return {"namespace": namespace, "name": name, "uid": f"uid-{number}", "creationTimestamp": stamp}

    def _ports(self, kind: str) -> list[Json]:
        protocols = ["TCP", "UDP", "TCP", "SCTP"] if self.random.random() < 0.1 else ["TCP", "UDP", "TCP"]
        ports: list[Json] = []
        for number, protocol in enumerate(protocols[: self.random.choice((1, 2, 2, 3, 4))]):
            port = {"name": f"p{number}", "port": 80 + (number > 1), "protocol": protocol, "targetPort": 3000}
            ports.append(port | ({"nodePort": self._node_port(ports)} if kind != "ClusterIP" else {}))
        return ports

    def _complete(self, service: Json) -> None:
        """Keep the fields of a Service that its type allows, and add those that the API server would add."""
        spec = service["spec"]
        for port in spec["ports"]:
            if spec["type"] == "ClusterIP":
                port.pop("nodePort", None)
            elif "nodePort" not in port:
                port["nodePort"] = self._node_port(spec["ports"])
        if spec["type"] != "LoadBalancer":
            service["status"] = {"loadBalancer": {}}
            for field in ("loadBalancerSourceRanges", "healthCheckNodePort"):
                spec.pop(field, None)
        elif spec.get("externalTrafficPolicy") == "Local":
            spec.setdefault("healthCheckNodePort", self._node_port(spec["ports"]))
        if spec["type"] == "ClusterIP" and not spec.get("externalIPs"):
            spec.pop("externalTrafficPolicy", None)

    def _changes(self) -> list[Callable[[Json], None]]:
        return [
            self._toggle_type,
            self._toggle_families,
            self._toggle_policies,
            self._toggle_affinity,
            self._other_ports,
            self._other_external_ips,
            self._other_ingress,
            self._other_ranges,
            self._other_weights,
            self._other_port_ranges,
            self._other_labels,
        ]

    def _change(self) -> None:
        if self.services:
            name = self.random.choice(list(self.services))
            service = copied(self.services[name])
            self.random.choice(self._changes())(service)
            self._complete(service)
            self._put_service(name, service)

    def _toggle_type(self, service: Json) -> None:
        service["spec"]["type"] = self.random.choice(("ClusterIP", "NodePort", "LoadBalancer"))

    def _toggle_families(self, service: Json) -> None:
        spec = service["spec"]
        if len(spec["ipFamilies"]) == 2:
            del spec["ipFamilies"][1], spec["clusterIPs"][1]
        else:
            other = "IPv6" if spec["ipFamilies"][0] == "IPv4" else "IPv4"
            spec["ipFamilies"].append(other)
            spec["clusterIPs"].append(self._cluster_ip(other))

    def _toggle_policies(self, service: Json) -> None:
        field = self.random.choice(("externalTrafficPolicy", "internalTrafficPolicy"))
        service["spec"][field] = self.random.choice(("Cluster", "Local", "Local"))
        if self.random.random() < 0.2:
            service["spec"]["publishNotReadyAddresses"] = True

    def _toggle_affinity(self, service: Json) -> None:
        timeout = self.random.choice((0, 0, 1, 30, 10800))
        service["spec"]["sessionAffinity"] = "ClientIP" if timeout else "None"
        service["spec"]["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": timeout}} if timeout else None

    def _other_ports(self, service: Json) -> None:
        service["spec"]["ports"] = self._ports(service["spec"]["type"])

    def _other_external_ips(self, service: Json) -> None:
        service["spec"]["externalIPs"] = self.random.sample(EXTERNAL_IPS, self.random.choice((0, 1, 2)))

    def _other_ingress(self, service: Json) -> None:
        number = self._free(1, 100, {self._last_number(a) for s in self.services.values() for a in _ingress(s)})
        found = [{"ip": INGRESS_IPS[f].format(number)} for f in service["spec"]["ipFamilies"]]
        if self.random.random() < 0.2:
            found[0]["ipMode"] = self.random.choice(("VIP", "Proxy"))
        service["status"] = {"loadBalancer": {"ingress": found} if self.random.random() < 0.8 else {}}

    def _other_ranges(self, service: Json) -> None:
        service["spec"]["loadBalancerSourceRanges"] = self.random.sample(self.ranges, self.random.choice((0, 1, 2)))

    def _other_weights(self, service: Json) -> None:
        self._annotate(service, "kube-proxy-py/weights", self.random.choice((None, *WEIGHTS)))

    def _other_port_ranges(self, service: Json) -> None:
        self._annotate(service, "kube-proxy-py/port-ranges", self.random.choice((None, *PORT_RANGES)))

    @staticmethod
    def _annotate(service: Json, name: str, text: str | None) -> None:
        annotations = service["metadata"].pop("annotations", {}) | {name: text}
        service["metadata"]["annotations"] = {key: value for key, value in annotations.items() if value}

    def _other_labels(self, service: Json) -> None:
        foreign = self.random.random() < 0.5
        service["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "other"} if foreign else {}

    def _swap(self) -> None:
        """Exchange addresses and ports of two existing Services, for a watcher that missed the steps in between."""
        if len(self.services) < 2:
            return
        first, second = self._two()
        one, two = copied(self.services[first]), copied(self.services[second])
        what = self.random.choice(("addresses", "externalIPs", "ports", "ingress", "endpoints", "endpoints"))
        if what == "endpoints":
            self._swap_slices(first, second)
            return
        if what == "addresses":
            fields: tuple[str, ...] = ("clusterIP", "clusterIPs", "ipFamilies")
        else:
            fields = ("externalIPs",) if what == "externalIPs" else ("ports", "type") if what == "ports" else ()
        for field in fields:
            a, b = one["spec"].get(field), two["spec"].get(field)
            one["spec"][field], two["spec"][field] = b, a
        if what == "ingress":
            one["status"], two["status"] = two["status"], one["status"]
        for name, service in ((first, one), (second, two)):
            self._complete(service)
            self._put_service(name, service)

    def _two(self) -> list[tuple[str, str]]:
        """Return two existing Services, if possible in one namespace: a slice can change its Service only there."""
        near = [name for name in self.services if name[0] == "default"]
        return self.random.sample(near if len(near) > 1 else list(self.services), 2)

    def _swap_slices(self, first: tuple[str, str], second: tuple[str, str]) -> None:
        if first[0] != second[0]:
            return
        for key, piece in list(self.slices.items()):
            owner = (key[0], piece["metadata"]["labels"]["kubernetes.io/service-name"])
            if owner in (first, second):
                moved = copied(piece)
                moved["metadata"]["labels"] = {"kubernetes.io/service-name": (second if owner == first else first)[1]}
                self._put_slice(key, moved)

    def _remove(self) -> None:
        if self.services:
            name = self.random.choice(list(self.services))
            del self.services[name]
            self.made.append(("remove", "services", *name))
            if self.random.random() < 0.7:
                self._remove_slices_of(name)

    def _move(self) -> None:
        """Delete a Service, and create it again under another name or namespace with the same addresses."""
        if self.services:
            name = self.random.choice(list(self.services))
            service = copied(self.services.pop(name))
            other = ("other" if name[0] == "default" else "default", name[1])
            if other in self.services:
                other = (name[0], f"s{self._next()}")
            service["metadata"] = self._metadata(*other)
            steps: list[Step] = [("remove", "services", *name), ("put", "services", service)]
            self.services[other] = service
            self.random.shuffle(steps)
            self.made.extend(steps)
            self._slices_of(other)

    def _put_service(self, name: tuple[str, str], service: Json) -> None:
        self.services[name] = service
        self.made.append(("put", "services", copied(service)))

    # -- slices -------------------------------------------------------------------------------------------------------

    def _endpoints(self) -> None:
        if self.services:
            self._slices_of(self.random.choice(list(self.services)))

    def _slices_of(self, name: tuple[str, str]) -> None:
        """Write a Service's slices again; superfluous slices are deleted, or remain unchanged."""
        service = self.services[name]
        kept: set[tuple[str, str]] = set()
        for family in service["spec"]["ipFamilies"]:
            for number, piece in enumerate(self._pieces(service, family)):
                key = (name[0], f"{name[1]}-{family.lower()}-{number}")
                labels = {"kubernetes.io/service-name": name[1]}
                piece["metadata"] = {"namespace": key[0], "name": key[1], "uid": f"uid-{key[1]}", "labels": labels}
                if self.random.random() < 0.1:
                    weight = self.random.choice(("0", "10", "50", "100", "101"))
                    piece["metadata"]["annotations"] = {"kube-proxy-py/weight": weight}
                self._put_slice(key, piece)
                kept.add(key)
        if self.random.random() < 0.9:
            self._remove_slices_of(name, kept)

    def _pieces(self, service: Json, family: str) -> list[Json]:
        small = self.random.random() < 0.9
        count = self.random.choice([n for n in BORDERS if (n < 8) == small])
        found = [self._endpoint(number, count) for number in range(count)]
        if self.random.random() < 0.15:  # as when all endpoints are removed at once
            state = self.random.choice(_STATES)
            found = [one | {"conditions": state} for one in found]
        cut = self.random.choice((1, 1, 1, 2, 3))
        pieces = [found[at::cut] for at in range(cut)]
        if self.random.random() < 0.1 and found:
            pieces[-1].append(self.random.choice(found))  # listed twice
        port = self.random.choice((3000, 3000, 3001))
        ports = [
            {"name": p["name"], "port": port, "protocol": p["protocol"]}
            for p in service["spec"]["ports"]
            if self.random.random() < 0.97
        ]
        return [{"addressType": family, "endpoints": list(piece), "ports": ports} for piece in pieces]

    def _endpoint(self, number: int, count: int) -> Json:
        chosen = self.random.choice(PODS) if count < 3 else PODS[number] if number < len(PODS) else f"+{number}"
        node = "node-a" if chosen.startswith("a") or (chosen[0] == "+" and number % 2) else "node-b"
        state = self.random.choice(_STATES) if self.random.random() < 0.3 else _STATES[0]
        made: Json = {"addresses": [chosen], "nodeName": node, "conditions": state}
        if self.random.random() < 0.1:
            made["hints"] = {"forZones": [{"name": self.random.choice(("zone-a", "zone-b"))}]}
        if self.random.random() < 0.05:
            made["hints"] = {"forNodes": [{"name": self.random.choice(("node-a", "node-b"))}]}
        return made

    def _put_slice(self, key: tuple[str, str], piece: Json) -> None:
        self.slices[key] = piece
        self.made.append(("put", "endpointslices", copied(piece)))

    def _remove_slices(self) -> None:
        if self.services:
            self._remove_slices_of(self.random.choice(list(self.services)))

    def _remove_slices_of(self, name: tuple[str, str], but: set[tuple[str, str]] | None = None) -> None:
        for key, piece in list(self.slices.items()):
            mine = key[0] == name[0] and piece["metadata"]["labels"]["kubernetes.io/service-name"] == name[1]
            if mine and key not in (but or ()):
                del self.slices[key]
                self.made.append(("remove", "endpointslices", *key))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _cluster_ip(self, family: str) -> str:
        taken = {address for service in self.services.values() for address in service["spec"]["clusterIPs"]}
        pool = [a for n in range(1, 2 * ROOM) if (a := SERVICE_IPS[family].format(n)) not in taken]
        return self.random.choice(pool)

    def _node_port(self, also: list[Json]) -> int:
        """Return a port that neither an existing Service nor these ports of the new Service use."""
        specs = [service["spec"] for service in self.services.values()]
        taken = {port.get("nodePort") for ports in (also, *(s["ports"] for s in specs)) for port in ports}
        return self._free(31000, 31400, taken | {spec.get("healthCheckNodePort") for spec in specs})

    def _free(self, first: int, last: int, taken: set[Any]) -> int:
        while (number := self.random.randrange(first, last)) in taken:
            pass
        return number

    @staticmethod
    def _last_number(address: str) -> int:
        return int(address.rpartition(".")[2]) if "." in address else int(address.rpartition(":")[2], 16)


def _ingress(service: Json) -> list[str]:
    return [entry["ip"] for entry in service["status"]["loadBalancer"].get("ingress", ())]
