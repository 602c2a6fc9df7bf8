"""The examiner of ipvs mode: compares virtual servers, sets, addresses and rules with plans, in a separate process. If
a Service's address and a NodePort need the same virtual server, the address takes precedence. Only a comparison of all
Services considers such conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kubeproxy.backends.ipvs import INTERFACE
from kubeproxy.backends.ipvs.backend import node_of
from kubeproxy.backends.ipvs.desired import WEIGHT, ActualServer, Desired, DesiredObjects, NodeAddresses, render
from kubeproxy.backends.ipvs.layout import TYPES, Addresses, IpsetId, Rules, Scheduler
from kubeproxy.backends.ipvs.wire import NodeView, RuleState
from kubeproxy.backends.state import Examiner, Finding, Plans, Wording, findings, front_text, meanings, of_family
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.ipset import BITMAP_PORT, SetEntry
from kubeproxy.kernel.ipvs import VirtualServer, server_key
from kubeproxy.model.addresses import Family, Range, destination_text, unpack, within
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName

_SERVERS: Final = "virtual servers"
_RULES: Final = "rules"
"""Names of places in the kernel, in addition to the interface, the sets, and each virtual server."""

_MEANINGS: Final = {
    IpsetId.LOOP_BACK: "masqueraded when it connects to itself",
    IpsetId.LOAD_BALANCER_FW: "closed to all but its source ranges",
    IpsetId.LOAD_BALANCER_SOURCE_IP: "open to a source address",
    IpsetId.LOAD_BALANCER_SOURCE_CIDR: "open to a source range",
    IpsetId.HEALTH_CHECK_NODE_PORT: "a health check port",
    IpsetId.DROP: "dropped, as no endpoint is on this node",
    IpsetId.DROP_OUTSIDE: "dropped for clients from outside, as no endpoint is on this node",
    IpsetId.IPVS_IPS: "an address of a Service",
}


class IpvsExaminer(Examiner):
    """See backends.state.Examiner."""

    def __init__(self, view: NodeView, world: Globals, scheduler: Scheduler, excluded: Sequence[Range]) -> None:
        super().__init__(view.family, view.close)
        self._view = view
        self._ours = world.of(self.family) or FamilyGlobals()
        self._rules = Rules(self.family, world)
        self._scheduler = scheduler
        self._excluded = excluded

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner."""
        there = self._view.addresses()
        objects = self._desired_objects(plans, there)
        owners = _owners(objects)
        found, desired = self._states(objects, owners, self._view.survey(owners)[1])
        for place, entries in self._shared(there).items():
            by_front = TYPES.get(place) != BITMAP_PORT and place not in {INTERFACE, IpsetId.LOOP_BACK}
            wanted = set().union(*(state.get(place, ()) for state in desired.values()))
            found[place] = {
                key: True for key in entries if key in wanted or (by_front and server_key(*key[:3]) in owners)
            }
        yield from findings(found, desired, _Words(self.family, self._scheduler, owners))

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        there = self._view.addresses()
        objects = self._desired_objects(wanted, there)
        owners, servers = _owners(objects), self._view.servers()
        found, desired = self._states(objects, owners, servers)
        for key, actual in servers.items():
            if not within(key[:-3], self._excluded):
                found[_SERVERS].setdefault(key, actual.server)
        found |= self._shared(there)
        if (rules := self._printed_rules()) is not None:
            found[_RULES] = {key: its for key, its in self._view.rules(self._rules).items() if key in rules}
            desired[None] = {_RULES: rules}
        yield from findings(found, desired, _Words(self.family, self._scheduler, owners))

    def _desired_objects(self, plans: Plans, there: Addresses) -> dict[ServiceName, DesiredObjects]:
        node: NodeAddresses = node_of(self._ours, there)
        return {name: render(its, node) for name, its in of_family(plans, self.family).items()}

    def _states(
        self,
        objects: Mapping[ServiceName, DesiredObjects],
        owners: Mapping[bytes, ServiceName],
        servers: Mapping[bytes, ActualServer],
    ) -> tuple[dict[Any, Any], dict[ServiceName | None, dict[Any, Any]]]:
        """Return the found and the desired virtual servers with their real servers. Draining real servers, and real
        servers of a missing virtual server, are omitted."""
        found: dict[Any, Any] = {_SERVERS: {}}
        desired: dict[ServiceName | None, dict[Any, Any]] = {name: {_SERVERS: {}} for name in objects}
        for key, name in owners.items():
            virtual, actual = objects[name].servers[key], servers.get(key)
            desired[name][_SERVERS][key] = self._scheduler.server(key, virtual.affinity)
            if actual is not None:
                found[_SERVERS][key] = actual.server
                desired[name][key] = dict.fromkeys(virtual.pool, WEIGHT)
                weights, drains = actual.weights.items(), self._scheduler.skips_draining
                found[key] = {d: w for d, w in weights if w or d in virtual.pool or not drains}
        for name, mine in objects.items():
            desired[name][INTERFACE] = dict.fromkeys(sorted(mine.addresses), True)
            desired[name] |= {set_id: dict.fromkeys(sorted(each), True) for set_id, each in mine.entries.items()}
        return found, desired

    def _shared(self, there: Addresses) -> dict[Any, dict[Any, bool]]:
        """Return the found addresses of the interface, and the found entries of sets; a missing set has no entries."""
        sets = self._view.counts()
        found = {s: dict.fromkeys(self._view.entries(s) if s in sets else (), True) for s in sorted(IpsetId)}
        return {INTERFACE: dict.fromkeys(there.bound, True), **found}

    def _printed_rules(self) -> RuleState | None:
        try:
            return self._view.printed(self._rules)
        except (Unsupported, ApplyError) as error:
            self.caveats.append(f"the {self.family.label} rules of iptables were not compared: {error}")
            return None


class _Words:
    """The texts about objects in the kernel; `owners` are Services by virtual server."""

    def __init__(self, family: Family, scheduler: Scheduler, owners: Mapping[bytes, ServiceName]) -> None:
        self._family = family
        self._scheduler = scheduler
        self._owners = owners

    def owner(self, place: Any, key: Any) -> ServiceName | None:
        if isinstance(place, bytes):
            return self._owners.get(place)
        return self._owners.get(server_key(*key[:3])) if isinstance(key, SetEntry) and key.ip and key.protocol else None

    def wording(self, place: Any, key: Any, wanted: Any, present: Any) -> Wording:
        if place == _RULES:
            return self._rules(key, wanted or (), present or ())
        if place == _SERVERS:
            return Wording(_front(key), "virtual servers", *meanings(self._picking, wanted, present))
        if place == INTERFACE:
            return Wording(f"address {unpack(key)}", f"interface {INTERFACE}")
        if isinstance(place, IpsetId):
            values = meanings(lambda _: _MEANINGS.get(place, "an entry of this set"), wanted, present)
            return Wording(_entry_text(place, key), f"ipset {place.named(self._family)}", *values)
        values = meanings(lambda weight: f"weight {weight}", wanted, present)
        return Wording(f"endpoint {destination_text(key)}", f"real servers of {_front(place)}", *values)

    def _picking(self, server: VirtualServer) -> str:
        ours = server == self._scheduler.server(server.key, server.timeout)
        return f"{server.scheduler if ours else 'another scheduler or other flags'}, affinity of {server.timeout} s"

    def _rules(self, key: tuple[str, str, str], wanted: Sequence[str], present: Sequence[str]) -> Wording:
        table, chain, target = key
        where = f"chain {chain} of table {table} ({self._family.label})"
        if target:
            return Wording(f"the jump to {target}", where)
        lacking = [rule for rule in wanted if rule not in present] or wanted
        surplus = [rule for rule in present if rule not in wanted] or present
        return Wording(f"the rules of chain {chain}", where, *(map("; ".join, (lacking, surplus)) if present else ()))


def _owners(objects: Mapping[ServiceName, DesiredObjects]) -> dict[bytes, ServiceName]:
    desired = Desired(objects.items())
    return {key: owner for key in desired.servers if (owner := desired.owner(key)) is not None}


def _front(key: bytes) -> str:
    return front_text(key[:-3], key[-3], int.from_bytes(key[-2:], "big"))


def _entry_text(set_id: IpsetId, entry: SetEntry) -> str:
    if entry.ip and entry.protocol:
        text = front_text(entry.ip, entry.protocol, entry.port)
        source = f" for {unpack(entry.ip2)}" if entry.ip2 and set_id is not IpsetId.LOOP_BACK else ""
        return f"{text}{source}{f'/{entry.prefixlen}' if entry.prefixlen else ''}"
    return f"address {unpack(entry.ip)}" if entry.ip else f"NodePort {entry.port}"
