"""Sequences of steps that trigger faults which random steps rarely trigger. Their objects have separate names and
addresses, so no random step changes them.

Every second history of a world begins with one of these sequences, in turn. Only the steps of the sequence check the
result, because a quiet moment costs several times as much.
"""

from __future__ import annotations

import re

from prove.objects import UNREADABLE, Objects
from prove.steps import Json, Step
from support.live import slice_of

NODE_ADDRESS = "192.168.100.77"
"""An address that the node gets while the proxy runs, in the first of NODEPORT_NETWORKS."""
NODEPORT_NETWORKS = ["192.168.0.0/16", "fd00:100::/64"]
_IPS = {"IPv4": "10.96.201.{}", "IPv6": "fd00:10:96::c9{:02x}"}
_AFFINITY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}}}
_PODS = "a1", "a2", "a3", "b1", "b2", "b3"
"""Endpoints in the order of their addresses: when the first endpoints are removed, the last move to other slots."""
_SETTLED: Step = ("settled",)


class Aimed(Objects):
    """Adds such sequences to the steps so far."""

    def _aim(self, seed: str) -> None:
        """Add the next sequence; a seed ends with the numbers of world and history."""
        world, history = [0, 0, *map(int, re.findall(r"\d+", seed))][-2:]
        sequences = self._clients, self._late_flows, self._node_address, self._balancers, self._exchange
        if history % 2 == 0:
            sequences[(world + history // 2) % len(sequences)]()

    def _clients(self) -> None:
        """Clients with session affinity send requests while endpoints are removed, the proxy restarts and another
        Service is added."""
        first, second = f"sticky{self._next()}", f"sticky{self._next()}"
        ask: Step = ("ask", first)
        self.made += [*self._aimed(first, "TCP", _AFFINITY), *_endpoints(first, "TCP", *_PODS), _SETTLED, ask]
        self.made += [*_endpoints(first, "TCP", *_PODS[3:]), _SETTLED, ask]
        self.made += [*_endpoints(first, "TCP", *_PODS[3:5]), _SETTLED, (self.random.choice(("kill", "restart")),)]
        self.made += [*self._aimed(second, "TCP", _AFFINITY), *_endpoints(second, "TCP", "a3"), _SETTLED, ask]
        self.made.append(("ask", second))

    def _late_flows(self) -> None:
        """UDP requests have no answer yet when their endpoint is removed."""
        name = f"late{self._next()}"
        service, *_ = made = self._aimed(name, "UDP", {})
        self.made += [*made, *_endpoints(name, "UDP", "a1", "a2", "a3"), _SETTLED]
        for pods in (("a1", "a2"), ("a1",)):
            fewer, _ = _endpoints(name, "UDP", *pods)
            self.made.append(("late", fewer[2], service[2]["spec"]["clusterIP"], "a3" if "a2" in pods else "a2"))
        self.made.append((*_SETTLED, "stale flows"))

    def _node_address(self) -> None:
        """The node gets an address on which NodePorts answer."""
        self.made += [("configure", {"nodePortAddresses": NODEPORT_NETWORKS}, []), _SETTLED]
        self.made += [("node_address", NODE_ADDRESS, True), _SETTLED]
        self.made += [("node_address", NODE_ADDRESS, False)] if self.random.random() < 0.5 else []

    def _balancers(self) -> None:
        """A health check port answers with the number of ready endpoints. Another Service's load balancer, whose only
        source range is invalid, admits no client.
        """
        ready, port = f"health{self._next()}", 31900 + self._next() % 90
        closed, address = f"closed{self._next()}", f"203.0.113.{101 + self._next() % 150}"
        fields = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port}
        self.made += self._aimed(ready, "TCP", fields)
        for step in _endpoints(ready, "TCP", "a1", "a2", "b1"):
            step[2]["endpoints"][1]["conditions"] = {"ready": False}
            self.made.append(step)
        fields = {"type": "LoadBalancer", "loadBalancerSourceRanges": list(UNREADABLE)}
        (service,) = self._aimed(closed, "TCP", fields)
        service[2]["status"] = {"loadBalancer": {"ingress": [{"ip": address}]}}
        self.made += [service, *_endpoints(closed, "TCP", "a1", "b1"), _SETTLED]
        self.made += [("health", port, 1), ("closed", closed, address)]

    def _exchange(self) -> None:
        """Two Services with the same endpoints, or without endpoints, exchange their addresses in one sync."""
        names = f"twin{self._next()}", f"twin{self._next()}"
        endpoints = self.random.choice(((), ("a1",), ("a1", "b1")))
        (one,), (two,) = twins = [self._aimed(name, "TCP", {}) for name in names]
        self.made += [step for twin in twins for step in twin]
        self.made += [step for name in names for step in _endpoints(name, "TCP", *endpoints)]
        fields = ("clusterIP", "clusterIPs")
        exchanged = [
            mine[2] | {"spec": mine[2]["spec"] | {field: other[2]["spec"][field] for field in fields}}
            for mine, other in ((one, two), (two, one))
        ]
        self.made += [_SETTLED, ("away", False), *(("put", "services", each) for each in exchanged), ("back",)]
        self.made.append((*_SETTLED, "verify"))

    def _aimed(self, name: str, protocol: str, fields: Json) -> list[Step]:
        """Return the step that creates a Service in both families."""
        number = self._next() % 250
        ips = [ip.format(number) for ip in _IPS.values()]
        spec: Json = {"type": "ClusterIP", "ipFamilies": list(_IPS), "clusterIP": ips[0], "clusterIPs": ips}
        spec["ports"] = [{"name": "p", "port": 80, "protocol": protocol, "targetPort": 3000}]
        return [("put", "services", {"metadata": self._metadata("default", name), "spec": spec | fields, "status": {}})]


def _endpoints(name: str, protocol: str, *pods: str) -> list[Step]:
    """Return the steps that write a Service's slices, one per family."""
    ports = [{"name": "p", "port": 3000, "protocol": protocol}]
    endpoints = [{"addresses": [pod], "nodeName": f"node-{pod[0]}", "conditions": {"ready": True}} for pod in pods]
    return [("put", "endpointslices", slice_of(name, family, endpoints, ports)) for family in _IPS]
