"""Examination of userspace mode in a separate process: differences between table and plans, and missing listeners. The
desired port of a listener is its most frequent port in the table, because the proxy picks a listener's port at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kubeproxy.backends.state import (
    Examiner,
    Finding,
    Kind,
    Plans,
    State,
    Wording,
    findings,
    front_text,
    meanings,
    of_family,
)
from kubeproxy.backends.table_view import CHAINS, TableView, TableWords, complete
from kubeproxy.backends.userspace.listeners import KINDS, ListenerName, PoolKind, assignments
from kubeproxy.backends.userspace.ruleset import (
    FIREWALL_ALLOW,
    FIREWALL_IPS,
    LISTENERS,
    NODEPORT_IPS,
    ORIGINS,
    UserspaceRuleset,
    carrying_map,
    element_key,
    elements,
    merged,
    unpack_port,
)
from kubeproxy.kernel.nftables.elements import Entries
from kubeproxy.kernel.proc.processes import listening
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FrontendKind, ServiceName, ServicePlan

_SOCKETS: Final = "sockets"
"""Place of listeners in a state; a value is the listener's port. A desired port is 0 if the table contains no port."""
_MEANINGS: Final = {
    LISTENERS: "a listener",
    FIREWALL_IPS: "closed to all but its source ranges",
    FIREWALL_ALLOW: "open for a range",
}
_ORIGINS: Final = {"pod": "a pod", "node": "this node", "outside": "outside"}


class UserspaceExaminer(Examiner):
    """See backends.state.Examiner. Reads the listening sockets of the caller's network namespace."""

    def __init__(self, view: TableView, ruleset: UserspaceRuleset) -> None:
        super().__init__(view.family, view.close)
        self._view = view
        self._ruleset = ruleset
        self._sets = ruleset.shapes

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner."""
        if (gone := self._gone()) is not None:
            yield gone
            return
        ours = of_family(plans, self.family)
        found: dict[str, Any] = {name: {} for name in self._sets}
        complete(found, _possible(ours), self._view.lookup)
        found[LISTENERS] = self._view.elements(LISTENERS)
        found[FIREWALL_ALLOW] = self._view.elements(FIREWALL_ALLOW) if found[FIREWALL_IPS] else {}
        yield from self._compared(ours, found, {})

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        if (gone := self._gone()) is not None:
            yield gone
            return
        ours = of_family(wanted, self.family)
        found: dict[str, Any] = {name: self._view.elements(name) for name in self._sets}
        complete(found, _possible(ours), self._view.lookup)
        shared: dict[str, Any] = {CHAINS: self._ruleset.definition().chains}
        found[CHAINS] = self._view.contents().chains
        if (inside := self._ruleset.nodeport_ips) is not None:
            found[NODEPORT_IPS] = self._view.elements(NODEPORT_IPS)
            shared[NODEPORT_IPS] = dict.fromkeys(inside, b"")
        yield from self._compared(ours, found, shared)

    def _gone(self) -> Finding | None:
        header = self._view.header()
        if header is not None and not header.dormant:
            return None
        return Finding(None, Kind.MISSING, "the whole table: no Service is served", f"table {self._ruleset.name}")

    def _compared(self, ours: Plans, found: dict[str, Any], shared: State[str, Any, Any]) -> Iterator[Finding]:
        owners = {element_key(f): name for name, plans in ours.items() for plan in plans for f in plan.frontends}
        ports = {
            listener: _port_of(plan, listener, found)
            for plans in ours.values()
            for plan in plans
            for listener in assignments(plan)
        }
        desired: dict[ServiceName | None, State[str, Any, Any]] = {
            name: merged(elements(plan, ports) for plan in plans)
            | {_SOCKETS: {listener: ports[listener] or 0 for plan in plans for listener in assignments(plan)}}
            for name, plans in ours.items()
        }
        open_ports = {protocol: {one.port for one in listening(self.family, protocol)} for protocol in KINDS}
        found[_SOCKETS] = {name: port for name, port in ports.items() if port in open_ports[name.key.protocol]}
        # Listeners that these plans do not need, and source ranges of other frontends, are not compared.
        asked = {key for state in desired.values() for key in state.get(LISTENERS, ())}
        found[LISTENERS] = {key: value for key, value in found[LISTENERS].items() if key in asked}
        found[FIREWALL_ALLOW] = {k: b"" for k in found[FIREWALL_ALLOW] if _front_of(k, self.family) in owners}
        yield from findings(found, desired | {None: shared}, _Words(self._ruleset, self.family, owners))


class _Words(TableWords):
    def __init__(self, ruleset: UserspaceRuleset, family: Family, owners: Mapping[bytes, ServiceName]) -> None:
        super().__init__(f"table {ruleset.name}")
        self._sets = ruleset.shapes
        self._family = family
        self._owners = owners

    def owner(self, place: str, key: Any) -> ServiceName | None:
        """See state.StateWords."""
        return self._owners.get(_front_of(key, self._family)) if place in self._sets else None

    def wording(self, place: str, key: Any, wanted: Any, present: Any) -> Wording:
        """See state.StateWords."""
        if place == _SOCKETS:
            text = front_text(b"", key.key.protocol, wanted).removeprefix("NodePort ")
            at = (f"sockets that listen on {text}",) if wanted else ("the proxy", "forwarded", "refused")
            return Wording(_listener(key), *at)
        if place not in self._sets:
            where = f"set {place} of {self._where}" if place == NODEPORT_IPS else self._where
            return TableWords(where).wording(place, key, wanted, present)
        size = self._family.address_size if len(key) > 8 else 0
        front = front_text(key[:size], key[size], int.from_bytes(key[size + 4 : size + 6], "big"))
        differs = wanted is not None and present is not None
        values = meanings(lambda data: f"port {unpack_port(data)}" if differs else _meaning(place), wanted, present)
        return Wording(front, f"{self._sets[place].keyword} {place} of {self._where}", *values)


def _port_of(plan: ServicePlan, listener: ListenerName, found: Mapping[str, Entries]) -> int | None:
    votes: Counter[int] = Counter()
    for frontend in plan.frontends:
        for origin, action in zip(ORIGINS, plan.traffic(frontend), strict=True):
            if action.forwards and action.picks_local == (listener.kind is PoolKind.LOCAL):
                data = found[carrying_map(origin, frontend)].get(element_key(frontend))
                if data is not None:
                    votes[unpack_port(data)] += 1
    return votes.most_common(1)[0][0] if votes else None


def _possible(ours: Mapping[ServiceName, Iterable[ServicePlan]]) -> Iterator[tuple[str, bytes]]:
    """Yield the sets and keys of all elements that these plans' frontends may have, except source ranges."""
    for plan in (plan for plans in ours.values() for plan in plans):
        for frontend in plan.frontends:
            key = element_key(frontend)
            for origin in ORIGINS:
                for outcome in ("", "-dropped", "-rejected"):
                    yield carrying_map(origin, frontend) + outcome, key
            if frontend.kind is not FrontendKind.NODEPORT:
                yield FIREWALL_IPS, key


def _front_of(key: bytes, family: Family) -> bytes:
    return key[: family.address_size + 8]


def _meaning(set_id: str) -> str:
    if set_id in _MEANINGS:
        return _MEANINGS[set_id]
    origin, _, rest = set_id.partition("-")
    outcome = "dropped" if rest.endswith("-dropped") else "refused" if rest.endswith("-rejected") else "forwarded"
    return f"{outcome} when it comes from {_ORIGINS[origin]}"


def _listener(name: ListenerName) -> str:
    port = f" of port {name.key.port_name}" if name.key.port_name else ""
    return f"the listener{port} for {'all endpoints' if name.kind is PoolKind.CLUSTER else 'those of this node'}"
