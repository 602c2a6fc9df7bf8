"""A kernel in memory: virtual servers, IP sets, addresses and rules, with the kernel's errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kubeproxy.backends.ipvs.desired import ActualServer
from kubeproxy.backends.ipvs.layout import Addresses, IpsetId, Rules
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.ipset import SetCounts
from kubeproxy.kernel.ipvs import ServerChange, Verb, VirtualServer
from kubeproxy.model.addresses import Family

NODE = bytes((192, 0, 2, 1))
Picture = tuple[dict[bytes, tuple[int, frozenset[bytes]]], dict[IpsetId, frozenset[bytes]], frozenset[bytes]]


def names(set_id: IpsetId) -> list[str]:
    return [f"--match-set {set_id.named(family)} " for family in Family]


class FakeKernel:
    family = Family.IPV4

    def __init__(self, own: frozenset[bytes] = frozenset({NODE})) -> None:
        self.virtual: dict[bytes, tuple[int, dict[bytes, int]]] = {}  # key: affinity, {destination: weight}
        self.sets: dict[IpsetId, set[bytes]] = {}
        self.bound: set[bytes] = set()
        self.own = own
        self.news = False
        self.tables: dict[str, dict[str, Sequence[str]]] = {}
        self.busy: dict[tuple[bytes, bytes], int] = {}  # (key, destination): connections
        self.operations: list[ServerChange] = []
        self.written: dict[bytes, VirtualServer] = {}
        self.closed = False

    def prepare(self) -> None:
        for set_id in IpsetId:
            self.sets.setdefault(set_id, set())

    def servers(self) -> dict[bytes, ActualServer]:
        return self.survey(self.virtual)[1]

    def survey(self, keys: Iterable[bytes]) -> tuple[set[bytes], dict[bytes, ActualServer]]:
        found = {}
        for key in (key for key in keys if key in self.virtual):
            affinity, servers = self.virtual[key]
            server = self.written.get(key, VirtualServer(key))
            found[key] = ActualServer(server._replace(timeout=affinity), dict(servers))
        return set(self.virtual), found

    def connections(self, keys: Iterable[bytes]) -> dict[bytes, dict[bytes, int]]:
        return {k: {d: self.busy.get((k, d), 0) for d in self.virtual[k][1]} for k in keys if k in self.virtual}

    def operate(self, operations: Iterable[ServerChange]) -> None:
        for operation in operations:
            self.operations.append(operation)
            self._one(operation)

    def _one(self, o: ServerChange) -> None:
        key = o.server.key
        known = key in self.virtual
        if o.command is Verb.ADD_SERVICE:
            self._check(not known, o)
            self.virtual[key], self.written[key] = (o.server.timeout, {}), o.server
            return
        self._check(known, o)
        servers = self.virtual[key][1]
        if o.command is Verb.SET_SERVICE:
            self.virtual[key], self.written[key] = (o.server.timeout, servers), o.server
        elif o.command is Verb.DELETE_SERVICE:
            del self.virtual[key]
        elif o.real is not None:
            self._check((o.real.key in servers) == (o.command is not Verb.ADD_SERVER), o)
            servers[o.real.key] = o.real.weight
            if o.command is Verb.DELETE_SERVER:
                del servers[o.real.key]

    def _check(self, fine: bool, operation: ServerChange) -> None:
        if not fine:
            raise ApplyError(f"refused: {operation}")

    def entries(self, set_id: IpsetId) -> set[bytes]:
        return set(self.sets[set_id])

    def counts(self) -> dict[IpsetId, SetCounts]:
        rules = [rule for chains in self.tables.values() for rules in chains.values() for rule in rules]
        return {
            set_id: SetCounts(len(entries), 0, sum(any(name in r for name in names(set_id)) for r in rules))
            for set_id, entries in self.sets.items()
        }

    def add_entries(self, entries: Mapping[IpsetId, Iterable[tuple[bytes, bool]]]) -> None:
        for set_id, items in entries.items():
            self.sets[set_id].update(entry for entry, _ in items)

    def remove_entries(self, entries: Mapping[IpsetId, Iterable[bytes]]) -> None:
        for set_id, items in entries.items():
            self.sets[set_id].difference_update(items)

    def addresses(self) -> Addresses:
        return Addresses(frozenset(self.bound), self.own)

    def addresses_changed(self) -> bool:
        news, self.news = self.news, False
        return news

    def bind(self, addresses: Iterable[bytes]) -> None:
        self.bound.update(addresses)

    def unbind(self, addresses: Iterable[bytes]) -> None:
        self.bound.difference_update(addresses)

    def missing_jumps(self, rules: Rules) -> tuple[()]:
        return ()

    def write_rules(self, rules: Rules, tables: Iterable[str], missing: object) -> None:
        for table in tables:
            self.tables[table] = dict(rules.tables[table])

    def rules(self, rules: Rules) -> dict[tuple[str, str, str], tuple[str, ...]]:
        placed = ((table, chain, lines) for table, chains in self.tables.items() for chain, lines in chains.items())
        return {(table, chain, ""): tuple(f"-A {chain} {rule}" for rule in its) for table, chain, its in placed if its}

    def printed(self, rules: Rules) -> dict[tuple[str, str, str], tuple[str, ...]]:
        fresh = FakeKernel()
        fresh.write_rules(rules, rules.tables, ())
        return fresh.rules(rules)

    def close(self) -> None:
        self.closed = True

    def picture(self) -> Picture:
        """Return the destinations of a packet: draining real servers are left out."""
        virtual = {
            key: (affinity, frozenset(d for d, weight in servers.items() if weight))
            for key, (affinity, servers) in self.virtual.items()
        }
        return virtual, {s: frozenset(e) for s, e in self.sets.items()}, frozenset(self.bound)
