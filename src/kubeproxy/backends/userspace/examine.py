"""userspace mode beside the proxy: in what the table differs from plans, and whether somebody listens for them.

Which port a listener has is the proxy's affair: it is what the table says of it most often, if somebody listens there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from kubeproxy.backends.examination import Finding, Kind, Plans, front_text
from kubeproxy.backends.table_view import (
    ElementsView,
    Rules,
    TableView,
    complete,
    nodeport_findings,
    rule_findings,
)
from kubeproxy.backends.userspace.layout import (
    FIREWALL_ALLOW,
    FIREWALL_IPS,
    LISTENERS,
    ORIGINS,
    TABLE,
    carrying_map,
    element_key,
    elements,
    unpack_port,
)
from kubeproxy.backends.userspace.listeners import KINDS, ListenerName, PoolKind, assignments
from kubeproxy.backends.userspace.ruleset import NODEPORT_IPS, Ruleset
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.lookup import Entries
from kubeproxy.kernel.proc.listening import Listening
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FrontendKind, ServiceName, ServicePlan

_MEANINGS: Final = {
    LISTENERS: "a listener",
    FIREWALL_IPS: "closed to all but its source ranges",
    FIREWALL_ALLOW: "open for a range",
}
_ORIGINS: Final = {"pod": "a pod", "node": "this node", "outside": "outside"}


class View(ElementsView, Protocol):
    """One family's table, to be read, and who listens. All calls raise ApplyError."""

    def is_there(self) -> bool:
        """Return whether there is such a table, and it does something."""

    def rules(self) -> Rules:
        """Return the rules by chain."""

    def listening(self, protocol: int) -> frozenset[Listening]:
        """Return where somebody listens."""


class KernelView(TableView):
    """Our table, and who listens in the network namespace of the caller."""

    def __init__(self, family: Family, link: Netlink, ports: Callable[[Family, int], frozenset[Listening]]) -> None:
        super().__init__(family, TABLE, {FIREWALL_ALLOW}, link)
        self._ports = ports

    def is_there(self) -> bool:
        """See View."""
        header = self.header()
        return header is not None and not header.dormant

    def listening(self, protocol: int) -> frozenset[Listening]:
        """See View."""
        return self._ports(self.family, protocol)


class UserspaceExaminer:
    """See backends.examination.Examiner. `nodeport_ips` are those that NodePorts answer on, None for all."""

    remembered = None

    def __init__(self, view: View, ruleset: Ruleset, nodeport_ips: tuple[bytes, ...] | None) -> None:
        self.family = view.family
        self._view = view
        self._ruleset = ruleset
        self._nodeport_ips = nodeport_ips
        self._sets = ruleset.shapes

    def close(self) -> None:
        """Let go of the kernel."""
        self._view.close()

    def caveats(self) -> Iterable[str]:
        """Return what could not be compared, and why."""
        return ()

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner."""
        if not self._view.is_there():
            yield self._gone()
            return
        ours = self._ours(plans)
        keys: dict[str, set[bytes]] = {name: set() for name in self._sets}
        for its in ours.values():
            for set_id, key in _possible(its):
                keys[set_id].add(key)
        actual = {name: self._view.lookup(name, asked) for name, asked in keys.items()}
        actual[LISTENERS] = self._view.elements(LISTENERS)
        if actual[FIREWALL_IPS]:
            ranges = self._view.elements(FIREWALL_ALLOW)
            actual[FIREWALL_ALLOW] = {k: b"" for k in ranges if _front_of(k, self.family) in keys[FIREWALL_IPS]}
        yield from self._compared(ours, actual)

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        if not self._view.is_there():
            yield self._gone()
            return
        ours = self._ours(wanted)
        actual = {name: self._view.elements(name) for name in self._sets}
        known = {element for its in ours.values() for element in _possible(its)}
        complete(actual, known, self._view.lookup)
        yield from self._compared(ours, actual)
        for set_id, entries in actual.items():
            for key in sorted(entries) if set_id not in {LISTENERS, FIREWALL_ALLOW} else ():
                if (set_id, key) not in known:
                    yield Finding(None, Kind.EXTRA, self._front(key), self._where(set_id), present=_meaning(set_id))
        yield from self._nodeports()
        yield from rule_findings(self._ruleset.definition().chains, self._view.rules(), f"table {self._ruleset.name}")

    def _ours(self, plans: Plans) -> dict[ServiceName, tuple[ServicePlan, ...]]:
        return {name: tuple(p for p in its if p.key.family is self.family) for name, its in plans.items()}

    # -- Services ---------------------------------------------------------------------------------------------------

    def _compared(
        self, ours: Mapping[ServiceName, tuple[ServicePlan, ...]], actual: Mapping[str, Entries]
    ) -> Iterator[Finding]:
        listening = {protocol: {one.port for one in self._view.listening(protocol)} for protocol in KINDS}
        ranges: dict[bytes, set[bytes]] = {}
        for key in actual[FIREWALL_ALLOW]:
            ranges.setdefault(_front_of(key, self.family), set()).add(key)
        for name, plans in ours.items():
            for plan in plans:
                ports = {listener: self._port_of(plan, listener, actual) for listener in assignments(plan)}
                yield from self._plan(name, plan, ports, actual, ranges)
                for listener, port in ports.items():
                    if port is not None and port not in listening[listener.key.protocol]:
                        front = front_text(b"", listener.key.protocol, port).removeprefix("NodePort ")
                        what = _listener(listener)
                        yield Finding(name, Kind.MISSING, what, f"sockets that listen on {front}")

    def _port_of(self, plan: ServicePlan, listener: ListenerName, actual: Mapping[str, Entries]) -> int | None:
        """Return the port that most elements have for a listener."""
        votes: Counter[int] = Counter()
        for frontend in plan.frontends:
            for origin, action in zip(ORIGINS, plan.traffic(frontend), strict=True):
                if action.forwards and action.picks_local == (listener.kind is PoolKind.LOCAL):
                    data = actual[carrying_map(origin, frontend)].get(element_key(frontend))
                    if data is not None:
                        votes[unpack_port(data)] += 1
        return votes.most_common(1)[0][0] if votes else None

    def _plan(
        self,
        name: ServiceName,
        plan: ServicePlan,
        ports: Mapping[ListenerName, int | None],
        actual: Mapping[str, Entries],
        ranges: Mapping[bytes, set[bytes]],
    ) -> Iterator[Finding]:
        wanted = elements(plan, ports)
        for set_id, entries in wanted.items():
            for key, data in entries.items():
                present = actual[set_id].get(key)
                front, where = self._front(key), self._where(set_id)
                if present is None:
                    yield Finding(name, Kind.MISSING, front, where, _meaning(set_id))
                elif present != data:
                    ports_of_it = (f"port {unpack_port(packed)}" for packed in (data, present))
                    yield Finding(name, Kind.DIFFERENT, front, where, *ports_of_it)
        for set_id, key in _possible((plan,)):
            if key in actual[set_id] and key not in wanted.get(set_id, {}):
                yield Finding(name, Kind.EXTRA, self._front(key), self._where(set_id), present=_meaning(set_id))
        for key in _keys(plan):
            for span in sorted(ranges.get(key, set()) - wanted.get(FIREWALL_ALLOW, {}).keys()):
                yield Finding(name, Kind.EXTRA, self._front(span), self._where(FIREWALL_ALLOW))
        for listener, port in ports.items():
            if port is None:
                yield Finding(name, Kind.MISSING, _listener(listener), "the proxy", "forwarded", "refused")

    # -- the table itself -------------------------------------------------------------------------------------------

    def _gone(self) -> Finding:
        return Finding(None, Kind.MISSING, "the whole table: no Service is served", f"table {self._ruleset.name}")

    def _nodeports(self) -> Iterator[Finding]:
        if self._nodeport_ips is None:
            return
        where = f"set {NODEPORT_IPS} of table {self._ruleset.name}"
        yield from nodeport_findings(frozenset(self._nodeport_ips), self._view.elements(NODEPORT_IPS).keys(), where)

    def _front(self, key: bytes) -> str:
        size = self.family.address_size if len(key) > 8 else 0
        return front_text(key[:size], key[size], int.from_bytes(key[size + 4 : size + 6], "big"))

    def _where(self, set_id: str) -> str:
        return f"{self._sets[set_id].keyword} {set_id} of table {self._ruleset.name}"


def _possible(plans: Iterable[ServicePlan]) -> Iterator[tuple[str, bytes]]:
    """Yield what there might be of these plans' frontends, but for source ranges."""
    for plan in plans:
        for frontend in plan.frontends:
            key = element_key(frontend)
            for origin in ORIGINS:
                for outcome in ("", "-dropped", "-rejected"):
                    yield carrying_map(origin, frontend) + outcome, key
            if frontend.kind is not FrontendKind.NODEPORT:
                yield FIREWALL_IPS, key


def _keys(plan: ServicePlan) -> set[bytes]:
    return {element_key(frontend) for frontend in plan.frontends}


def _front_of(key: bytes, family: Family) -> bytes:
    """Return the key of the frontend that a source range is of."""
    return key[: family.address_size + 8]


def _meaning(set_id: str) -> str:
    """Return what an element of a set says."""
    if set_id in _MEANINGS:
        return _MEANINGS[set_id]
    origin, _, rest = set_id.partition("-")
    outcome = "dropped" if rest.endswith("-dropped") else "refused" if rest.endswith("-rejected") else "forwarded"
    return f"{outcome} when it comes from {_ORIGINS[origin]}"


def _listener(name: ListenerName) -> str:
    port = f" of port {name.key.port_name}" if name.key.port_name else ""
    return f"the listener{port} for {'all endpoints' if name.kind is PoolKind.CLUSTER else 'those of this node'}"
