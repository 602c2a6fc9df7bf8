"""A kernel in memory: virtual servers, IP sets, addresses and rules, with the kernel's errors."""

from __future__ import annotations

from kubeproxy.backends.ipvs.desired import ActualServer, Verb
from kubeproxy.backends.ipvs.layout import Addresses, IpsetId
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.ipset import SetCounts
from kubeproxy.model.addresses import Family

NODE = bytes((192, 0, 2, 1))


def names(set_id):
    return [f"--match-set {set_id.named(family)} " for family in Family]


class FakeKernel:
    family = Family.IPV4

    def __init__(self, own=frozenset({NODE})):
        self.virtual = {}  # key: [affinity, {destination: weight}]
        self.sets = {}
        self.bound = set()
        self.own = own
        self.news = False
        self.tables = {}
        self.busy = {}  # (key, destination): connections
        self.operations = []
        self.closed = False

    def prepare(self):
        for set_id in IpsetId:
            self.sets.setdefault(set_id, set())

    def servers(self):
        return self.survey(self.virtual)[1]

    def survey(self, keys):
        found = {k: ActualServer(self.virtual[k][0], True, dict(self.virtual[k][1])) for k in keys if k in self.virtual}
        return set(self.virtual), found

    def connections(self, keys):
        return {k: {d: self.busy.get((k, d), 0) for d in self.virtual[k][1]} for k in keys if k in self.virtual}

    def operate(self, operations):
        for operation in operations:
            self.operations.append(operation)
            self._one(operation)

    def _one(self, o):
        known = o.key in self.virtual
        if o.verb is Verb.ADD_SERVICE:
            self._check(not known, o)
            self.virtual[o.key] = [o.affinity, {}]
            return
        self._check(known, o)
        servers = self.virtual[o.key][1]
        if o.verb is Verb.SET_SERVICE:
            self.virtual[o.key][0] = o.affinity
        elif o.verb is Verb.DELETE_SERVICE:
            del self.virtual[o.key]
        elif o.verb is Verb.DELETE_SERVER:
            self._check(o.destination in servers, o)
            del servers[o.destination]
        else:
            self._check((o.destination in servers) == (o.verb is Verb.SET_SERVER), o)
            servers[o.destination] = o.weight

    def _check(self, fine, operation):
        if not fine:
            raise ApplyError(f"refused: {operation}")

    def entries(self, set_id):
        return set(self.sets[set_id])

    def counts(self):
        rules = [rule for chains in self.tables.values() for rules in chains.values() for rule in rules]
        return {
            set_id: SetCounts(len(entries), 0, sum(any(name in r for name in names(set_id)) for r in rules))
            for set_id, entries in self.sets.items()
        }

    def add_entries(self, entries):
        for set_id, items in entries.items():
            self.sets[set_id].update(items)

    def remove_entries(self, entries):
        for set_id, items in entries.items():
            self.sets[set_id].difference_update(items)

    def addresses(self):
        return Addresses(frozenset(self.bound), self.own)

    def addresses_changed(self):
        news, self.news = self.news, False
        return news

    def bind(self, addresses):
        self.bound.update(addresses)

    def unbind(self, addresses):
        self.bound.difference_update(addresses)

    def missing_jumps(self):
        return ()

    def write_rules(self, rules, tables, missing):
        for table in tables:
            self.tables[table] = dict(rules.tables[table])

    def rules(self, rules):
        placed = ((table, chain, lines) for table, chains in self.tables.items() for chain, lines in chains.items())
        return [f"{table} -A {chain} {rule}" for table, chain, lines in placed for rule in lines]

    def close(self):
        self.closed = True

    def picture(self):
        """Return the destinations of a packet: draining real servers are left out."""
        virtual = {
            key: (affinity, frozenset(d for d, weight in servers.items() if weight))
            for key, (affinity, servers) in self.virtual.items()
        }
        return virtual, {s: frozenset(e) for s, e in self.sets.items()}, frozenset(self.bound)
