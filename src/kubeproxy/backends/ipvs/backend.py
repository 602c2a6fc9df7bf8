"""The ipvs backend of one family: converts changed plans to changes of virtual servers, sets and addresses. The desired
state is in memory (desired.py); the kernel is read at the start, after a failure and by inspections. IPVS, ipsets and
the interface have no transactions, so writes have an order that is safe after each step: first a Service's set entries,
then the virtual servers, then the addresses. A deletion has the reverse order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from kubeproxy.backends.ipvs.desired import (
    NOTHING_DESIRED,
    ActualServer,
    Desired,
    Draining,
    NodeAddresses,
    render,
)
from kubeproxy.backends.ipvs.layout import Addresses, IpsetId, Rules, Scheduler
from kubeproxy.backends.ipvs.wire import NodeKernel, RuleState
from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.state import Difference, NamedPlans, Plans, diff
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.kernel.ipvs import ServerChange, Verb
from kubeproxy.model.addresses import Family, Range, within
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan

log = logging.getLogger("kubeproxy.ipvs")

BATCH: Final = 2000
"""Maximum number of changes per batch; a full batch takes about 50 ms."""

EXAMINED: Final = 500
"""A thorough inspection compares the real servers of this many virtual servers; the next inspection continues."""


class IpvsBackend:
    """Programs one family. `sync` is incremental, `resync` compares everything with the kernel's state."""

    abilities = Abilities()

    def __init__(
        self,
        family: Family,
        world: Globals,
        kernel: NodeKernel,
        scheduler: Scheduler,
        excluded: Sequence[Range] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family = family
        self._ours = world.of(family) or FamilyGlobals()
        self._rules = Rules(family, world)
        self._kernel = kernel
        self._excluded = excluded
        self._clock = clock
        self._draining = Draining(scheduler)
        self._desired = Desired()
        self._plans: dict[ServiceName, tuple[ServicePlan, ...]] = {}
        self._node = NodeAddresses()
        self._there = Addresses(frozenset(), frozenset())
        self._misbound = False  # kube-ipvs0 had other addresses than desired when they were last read
        self._written: RuleState = {}
        self._examined = 0

    def close(self) -> None:
        """Close the sockets; the rules are not removed."""
        self._kernel.close()

    def set_world(self, world: Globals) -> bool:
        """Set the globals; return whether a resync is needed because rules or addresses change."""
        rules, ours = Rules(self.family, world), world.of(self.family) or FamilyGlobals()
        moved = (ours.nodeport_ips, ours.node_ips) != (self._ours.nodeport_ips, self._ours.node_ips)
        changed = moved or rules.tables != self._rules.tables
        self._ours, self._rules = ours, rules
        return changed

    # -- incremental ----------------------------------------------------------------------------------------------

    def sync(self, changes: Iterable[NamedPlans]) -> Iterator[int]:
        """Program changed Services; yield the number of changes after each batch. Raises ApplyError."""
        for name, plans in changes:
            if plans:
                self._plans[name] = plans
            else:
                self._plans.pop(name, None)
            self._desired.change(name, render(plans, self._node) if plans else NOTHING_DESIRED)
            if self._desired.touched >= BATCH:
                yield self._apply()
        yield self._apply()

    def _apply(self) -> int:
        now = self._clock()
        servers, (removed, added) = self._desired.take()
        operations = [
            operation
            for key, before in servers.items()
            for operation in self._draining.change(
                key, self._draining.expected(key, before), self._desired.servers.get(key), now
            )
        ]
        self._kernel.add_entries(added)
        self._kernel.operate(operations)
        if come := added.get(IpsetId.IPVS_IPS):
            self._kernel.bind([entry.ip for entry, _ in come])
        if gone := removed.get(IpsetId.IPVS_IPS):
            self._kernel.unbind([entry.ip for entry in gone])
        self._kernel.remove_entries(removed)
        return sum(map(len, added.values())) + sum(map(len, removed.values())) + len(operations)

    # -- everything -----------------------------------------------------------------------------------------------

    def resync(self, wanted: Plans) -> Iterator[int]:
        """Make the kernel's state equal to these plans; yield the number of changes after each batch. Raises
        ApplyError. Correct objects are not written again; surplus objects are removed last."""
        kernel = self._kernel
        kernel.prepare()
        kernel.addresses_changed()
        self._there = there = kernel.addresses()
        self._misbound = False
        self._node = node_of(self._ours, there)
        self._plans = {name: plans for name, plans in wanted.items() if plans}
        self._desired = Desired()  # frees memory before the next line
        self._desired = desired = Desired((name, render(its, self._node)) for name, its in self._plans.items())
        surplus, lacking = self._compare_entries()
        kernel.add_entries(lacking)
        yield sum(map(len, lacking.values()))
        # Rules that reject packets are written before the addresses that they protect. If all our jumps exist in nat,
        # the jumps may lead to chains of iptables mode, which serve Services; our nat chains are then written last.
        jumps = kernel.missing_jumps(self._rules)
        first, last = (("filter", "nat"), ()) if any(jump.table == "nat" for jump in jumps) else (("filter",), ("nat",))
        kernel.write_rules(self._rules, first, jumps)
        found = kernel.servers()
        yield from self._adopt(found)
        addresses = frozenset(desired.addresses)
        come = sorted(addresses - there.bound)
        kernel.bind(come)
        yield len(come)
        kernel.write_rules(self._rules, last, jumps)
        gone = sorted(there.bound - addresses)
        kernel.unbind(gone)
        foreign = [key for key in found if key not in desired.servers and not self._is_excluded(key)]
        kernel.operate([ServerChange(Verb.DELETE_SERVICE, found[key].server) for key in foreign])
        kernel.remove_entries(surplus)
        self._written = kernel.rules(self._rules)
        yield len(gone) + len(foreign) + sum(map(len, surplus.values()))

    def _adopt(self, found: Mapping[bytes, ActualServer]) -> Iterator[int]:
        self._draining.retain(found)
        operations: list[ServerChange] = []
        for key, virtual in self._desired.servers.items():
            operations += self._draining.change(key, found.get(key), virtual, self._clock())
            if len(operations) >= BATCH:
                self._kernel.operate(operations)
                yield len(operations)
                operations = []
        self._kernel.operate(operations)
        yield len(operations)

    def _compare_entries(self) -> Difference[IpsetId, SetEntry, bool]:
        return diff(
            {set_id: dict.fromkeys(self._kernel.entries(set_id), True) for set_id in IpsetId},
            {set_id: self._desired.entries(set_id) for set_id in IpsetId},
        )

    def _is_excluded(self, key: bytes) -> bool:
        return within(key[:-3], self._excluded)

    # -- periodic work, and changes by other programs -------------------------------------------------------------

    def upkeep(self) -> None:
        """Remove drained real servers; update NodePorts after a change of the node's addresses."""
        self._read_addresses()
        node = node_of(self._ours, self._there)
        if node != self._node:
            log.info("The addresses of the node changed family=%s count=%d", self.family.label, len(node.own))
            self._node = node
            for name, plans in self._plans.items():
                self._desired.change(name, render(plans, node))
            self._apply()
        now = self._clock()
        if due := self._draining.due(now):
            self._kernel.operate(list(self._draining.finished(self._kernel.connections(due), now)))

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """See backends.mode.Backend. Each inspection reads the number of entries of each set, and one virtual server,
        because the kernel does not announce changes. A thorough inspection reads all objects, except most real
        servers."""
        self._read_addresses()
        addresses = "addresses of kube-ipvs0 were changed" if self._misbound else ""
        if what := addresses or self._changed_counts() or self._missing_sample():
            return ForeignChange(f"{what} by another program")
        if depth is Depth.THOROUGH and (what := self._changed_contents()):
            return ForeignChange(f"{what} by another program", certain=False)
        return None

    def _read_addresses(self) -> None:
        if self._kernel.addresses_changed():
            self._there = self._kernel.addresses()
            self._misbound = self._there.bound != frozenset(self._desired.addresses)

    def _changed_counts(self) -> str:
        counts = self._kernel.counts()
        for set_id in IpsetId:
            found = counts.get(set_id)
            wanted = self._desired.count(set_id)
            name = set_id.named(self.family)
            if found is None or found.entries != wanted:
                return f"ipset {name} was changed"
            if found.references < self._rules.references(set_id):
                return f"iptables rules with ipset {name} were removed"
        return ""

    def _missing_sample(self) -> str:
        """Return a text if a sampled virtual server is missing; in most such cases all virtual servers are missing."""
        sample = next((key for key, virtual in self._desired.servers.items() if virtual.pool), None)
        if sample is not None and not self._kernel.connections([sample]).get(sample):
            return "virtual servers were removed"
        return ""

    def _changed_contents(self) -> str:
        wanted = self._desired.servers
        keys = list(islice(wanted, self._examined, self._examined + EXAMINED))
        self._examined = self._examined + EXAMINED if len(keys) == EXAMINED else 0
        present, found = self._kernel.survey(keys)
        if any(not self._is_excluded(key) for key in present ^ wanted.keys()):
            return "virtual servers were changed"
        if any(found.get(key) != self._draining.expected(key, wanted[key]) for key in keys):
            return "real servers were changed"
        if differing := set().union(*self._compare_entries()):
            return f"ipset {min(differing).named(self.family)} was changed"
        if self._kernel.rules(self._rules) != self._written:
            return "iptables rules were changed"
        return ""


def node_of(ours: FamilyGlobals, there: Addresses) -> NodeAddresses:
    """Return the node's addresses that affect the objects of Services."""
    if ours.nodeport_ips is None:
        nodeports = tuple(sorted(there.own))
    else:
        # The kernel lists Services' addresses on kube-ipvs0 as local addresses, but they are not addresses of the node.
        nodeports = tuple(address for address in ours.nodeport_ips if address not in there.bound)
    return NodeAddresses(there.own, nodeports, ours.node_ips)
