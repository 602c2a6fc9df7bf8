"""A table that executes changes as strictly as the kernel, and does with a packet what our chains would do.

Knows the elements and what each chain of a name means (docs/nftables.md "Reading it"), nothing of how they are made.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kubeproxy.backends.elements import Delta, Elements
from kubeproxy.backends.nftables.layout import CLASSES, Layout, SetId, class_set, parse_chain_name
from kubeproxy.model.plan import FamilyGlobals, Globals

Origin = Literal["pod", "node", "outside"]


class Packet(NamedTuple):
    """The first packet of a connection, addresses packed. `nodeport`: NodePorts answer on the destination."""

    origin: Origin
    source: bytes
    destination: bytes
    protocol: int
    port: int
    nodeport: bool = False


class Forwarded(NamedTuple):
    """Every endpoint that may get it, whether its source is hidden, and how long its client stays (seconds)."""

    endpoints: tuple[bytes, ...]
    masqueraded: bool
    affinity: int


Outcome = Forwarded | Literal["reject", "drop", "pass"]


class Treated(NamedTuple):
    """What a frontend's connections meet with; `endpoints` and `affinity` only where a verdict names them, else 0."""

    treatment: str
    endpoints: int = 0
    affinity: int = 0


SERVICES = {
    SetId.CLUSTER_SERVICES: "cluster",
    SetId.EXTERNAL_SERVICES: "external",
    SetId.POLICY_LOCAL_SERVICES: "policy-local",
}
NODEPORTS = {SetId.EXTERNAL_NODEPORTS: "external", SetId.POLICY_LOCAL_NODEPORTS: "policy-local"}


class FakeTable:
    def __init__(self, globals_: Globals) -> None:
        (family,) = globals_.families
        ours = globals_.of(family)
        assert ours is not None
        self._globals = globals_
        self._ours: FamilyGlobals = ours
        self._address_size = family.address_size
        self.elements: Elements = {name: {} for name in Layout(family).shapes}

    def execute(self, delta: Delta) -> None:
        """Refuse, as the kernel does, to remove what is missing and to add what is there."""
        for set_id, keys in delta.removed.items():
            for key in keys:
                del self.elements[set_id][key]
        for set_id, entries in delta.added.items():
            for key, data in entries:
                assert key not in self.elements[set_id], "File exists"
                self.elements[set_id][key] = data

    def send(self, packet: Packet) -> Outcome:
        """What becomes of a packet, hook by hook."""
        key = packet.destination + self._transport(packet)
        if key in self.elements[SetId.FIREWALL_IPS] and not self._admitted(key, packet.source):
            return "drop"
        found = self._nat(packet, key)
        return found if found is not None else self._filter(packet, key)

    @staticmethod
    def _transport(packet: Packet) -> bytes:
        return bytes((packet.protocol, 0, 0, 0)) + packet.port.to_bytes(2, "big") + b"\0\0"

    def _admitted(self, key: bytes, source: bytes) -> bool:
        """A concatenation with intervals matches field by field."""
        for entry in self.elements[SetId.FIREWALL_ALLOW]:
            half = len(entry) // 2
            first, last = entry[:half], entry[half:]
            assert first[: len(key)] == last[: len(key)], "only the source is a range"
            if first[: len(key)] == key and first[len(key) :] <= source <= last[len(key) :]:
                return True
        return False

    def _nat(self, packet: Packet, key: bytes) -> Forwarded | None:
        treated = self._treated(SERVICES, SetId.AFFINITY_SERVICES, key)
        if treated is None and packet.nodeport:
            key = self._transport(packet)
            treated = self._treated(NODEPORTS, SetId.AFFINITY_NODEPORTS, key)
        return self._forward(treated, packet, key) if treated is not None else None

    def _treated(self, sets: dict[SetId, str], affinity_map: SetId, key: bytes) -> Treated | None:
        """A frontend is in one set of treatments, or in the verdict map of those with affinity."""
        found = [Treated(treatment) for set_id, treatment in sets.items() if key in self.elements[set_id]]
        if key in self.elements[affinity_map]:
            found.append(self._verdict(affinity_map, key))
        assert len(found) <= 1, f"{key!r} is treated as {found}"
        return found[0] if found else None

    def _verdict(self, affinity_map: SetId, key: bytes) -> Treated:
        chain = self.elements[affinity_map][key]
        name = parse_chain_name(chain.decode())
        assert name is not None, chain
        assert name.nodeport is (len(key) == 8), "NodePort chains look up keys without an address"
        return Treated(name.treatment, name.endpoints, name.affinity)

    def _forward(self, treated: Treated, packet: Packet, key: bytes) -> Forwarded | None:
        detector = self._ours.detector.implemented
        if treated.treatment == "cluster":
            hidden = self._globals.masquerade_all or (detector and packet.origin != "pod")
            return self._cluster(treated, key, hidden)
        if treated.treatment == "external":
            return self._cluster(treated, key, True)
        assert treated.treatment == "policy-local", treated
        if packet.origin == "pod" and detector:
            return self._cluster(treated, key, False)
        if packet.origin == "node":
            return self._cluster(treated, key, True)
        return self._local(treated, key)

    def _cluster(self, treated: Treated, key: bytes, hidden: bool) -> Forwarded:
        endpoint_map = SetId.NODEPORT_ENDPOINTS if len(key) == 8 else SetId.ENDPOINTS
        pool = self._pick(endpoint_map, key, treated)
        assert pool, "a frontend that forwards has endpoints"
        return Forwarded(pool, hidden, treated.affinity)

    def _local(self, treated: Treated, key: bytes) -> Forwarded | None:
        nodeport = len(key) == 8
        endpoint_map = SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS
        if treated.affinity:
            affinity_map = SetId.LOCAL_AFFINITY_NODEPORTS if nodeport else SetId.LOCAL_AFFINITY_SERVICES
            if key not in self.elements[affinity_map]:
                return None
            found = self._verdict(affinity_map, key)
            assert (found.treatment, found.affinity) == ("local-pick", treated.affinity)
            treated = found
        pool = self._pick(endpoint_map, key, treated)
        return Forwarded(pool, False, treated.affinity) if pool else None

    def _pick(self, endpoint_map: SetId, key: bytes, treated: Treated) -> tuple[bytes, ...]:
        """Return the endpoints that may be picked, none when no rule matches.

        A slot that is never picked would be an endpoint without connections, and a number that numgen gives in the
        end without a slot a connection lost.
        """
        pool = self._pool(endpoint_map, key)
        classes = [size for size in CLASSES if key in self.elements[class_set(endpoint_map, size)]]
        if treated.affinity:
            assert not classes, "chains of affinity know the number of endpoints"
            assert treated.endpoints == len(pool)
            return pool
        if not classes:
            assert not pool, "endpoints of a frontend without a class are never picked"
            return ()
        (size,) = classes
        settled = ((0, *CLASSES)[CLASSES.index(size)]) + 1
        assert settled <= len(pool) <= size
        return pool

    def _pool(self, endpoint_map: SetId, key: bytes) -> tuple[bytes, ...]:
        entries = {k: data for k, data in self.elements[endpoint_map].items() if k[:-4] == key}
        slots = sorted(int.from_bytes(k[-4:], "little") for k in entries)
        assert slots == list(range(len(entries))), "slots are taken from 0 on, without a hole"
        assert all(data[-2:] == b"\0\0" for data in entries.values())
        return tuple(sorted(data[:-2] for data in entries.values()))

    def _filter(self, packet: Packet, key: bytes) -> Outcome:
        elements, transport = self.elements, self._transport(packet)
        if packet.nodeport and transport in elements[SetId.NO_LOCAL_ENDPOINT_NODEPORTS]:
            return "drop"
        if packet.nodeport and transport in elements[SetId.NO_ENDPOINT_NODEPORTS]:
            return "reject"
        if key in elements[SetId.NO_LOCAL_ENDPOINT_SERVICES]:
            return "drop"
        if key in elements[SetId.NO_ENDPOINT_SERVICES]:
            return "reject"
        if packet.destination in elements[SetId.CLUSTER_IPS]:
            return "reject"
        cidrs = self._ours.service_cidrs
        return "drop" if any(first <= packet.destination <= last for first, last in cidrs) else "pass"
