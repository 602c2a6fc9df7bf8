"""The access of ipvs mode to the kernel, for one family: IPVS, ipsets and addresses over netlink, rules with iptables.
backend.py decides which objects to write."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, Self

from msgspec import Struct

from kubeproxy.backends.ipvs import INTERFACE
from kubeproxy.backends.ipvs.desired import ActualServer
from kubeproxy.backends.ipvs.layout import JUMPS, MAX_ELEMENTS, Addresses, IpsetId, Rules, kind_of
from kubeproxy.backends.rules import Jump
from kubeproxy.errors import ApplyError
from kubeproxy.kernel import ipvs, route
from kubeproxy.kernel.ipset import Ipsets, SetCounts, SetEntry
from kubeproxy.kernel.proc.capability import in_empty_network
from kubeproxy.kernel.route import AddressMonitor, local_addresses
from kubeproxy.kernel.xtables import nft_compat, xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.kernel.xtables.xtables_lock import nobodys_lock
from kubeproxy.model.addresses import Family, is_link_local, is_loopback
from kubeproxy.registry import CounterMetric

log = logging.getLogger("kubeproxy.ipvs")

RuleState = Mapping[tuple[str, str, str], tuple[str, ...]]
"""Key: table, chain and ''; value: the rules of one of our chains. Key: table, chain and target; value: the jump from a
chain of another program to one of our chains."""

_SPARE: Final = "KUBE-SPARE"  # name of a temporary set, which is swapped with the set that it replaces


class NodeView(Struct, eq=False):
    """Read access to the kernel of one network namespace, with iptables commands and two sockets."""

    _commands: Commands
    _ipvs: ipvs.Ipvs
    _sets: Ipsets

    @classmethod
    def look(cls, commands: Commands) -> NodeView:
        """Open the kernel of the caller's network namespace. Raises NetlinkError, and Unsupported without IPVS."""
        with ExitStack() as opened:
            servers = opened.enter_context(ipvs.Ipvs.open())
            view = NodeView(commands, servers, opened.enter_context(Ipsets.open()))
            opened.pop_all()
        return view

    @property
    def family(self) -> Family:
        """Return the family of the iptables commands."""
        return self._commands.family

    def close(self) -> None:
        """Close the sockets."""
        self._ipvs.close()
        self._sets.close()

    def addresses(self) -> Addresses:
        """Return the node's addresses that other hosts can reach: all except loopback and IPv6 link-local addresses."""
        bound, own = set(), set()
        for address in local_addresses(self.family):
            if address.interface == INTERFACE:
                bound.add(address.ip)
            elif not is_loopback(address.ip) and (self.family is Family.IPV4 or not is_link_local(address.ip)):
                own.add(address.ip)
        return Addresses(frozenset(bound), frozenset(own))

    def servers(self) -> Mapping[bytes, ActualServer]:
        """Return all virtual servers with their real servers."""
        return dict(self._with_weights(self._listed()))

    def survey(self, keys: Iterable[bytes]) -> tuple[set[bytes], Mapping[bytes, ActualServer]]:
        """Return two values: the keys of all virtual servers, and the given virtual servers with their real servers."""
        listed = {server.key: server for server in self._listed()}
        return set(listed), dict(self._with_weights(listed[key] for key in keys if key in listed))

    def entries(self, set_id: IpsetId) -> set[SetEntry]:
        """Return a set's entries."""
        return self._sets.entries(set_id.named(self.family))

    def counts(self) -> Mapping[IpsetId, SetCounts]:
        """Return the number of entries of each set that exists."""
        found = self._sets.counts()
        named = {set_id: found.get(set_id.named(self.family)) for set_id in IpsetId}
        return {set_id: counts for set_id, counts in named.items() if counts is not None}

    def rules(self, rules: Rules) -> RuleState:
        """Return the rules in our chains, and the jumps to them."""
        return _grouped(_saved(self._commands), rules)

    def printed(self, rules: Rules) -> RuleState:
        """Write our rules in an empty network namespace; return the rules, and the jumps to them, as iptables prints
        them. Raises Unsupported if no network namespace can be created, and ApplyError."""

        def write() -> RuleState:
            with Ipsets.open() as sets:
                for set_id in IpsetId:
                    sets.create(set_id.named(self.family), kind_of(set_id, self.family))
            self._commands.restore([rules.text(list(rules.tables), JUMPS)])
            return _grouped(_saved(self._commands), rules)

        with nobodys_lock():
            return in_empty_network(write)

    def _listed(self) -> Iterator[ipvs.VirtualServer]:
        return (server for server in self._ipvs.servers() if len(server.key) == self.family.address_size + 3)

    def _with_weights(self, servers: Iterable[ipvs.VirtualServer]) -> Iterator[tuple[bytes, ActualServer]]:
        for server in servers:
            # If persistence is off, the timeout of a virtual server has no effect, so it is not compared.
            compared = server if server.flags & ipvs.PERSISTENT else server._replace(timeout=0)
            reals = self._ipvs.destinations(server.key).values()
            yield server.key, ActualServer(compared, {real.key: real.weight for real in reals})


class NodeKernel(NodeView, eq=False):
    """Read and write access to the kernel of one network namespace. As in the Go kube-proxy, `_restore_failures` counts
    only refused rules of iptables, not refused sets and virtual servers."""

    _monitor: AddressMonitor
    _restore_failures: CounterMetric
    _interface: int = 0

    @classmethod
    def open(cls, commands: Commands, restore_failures: CounterMetric) -> Self:
        """Open the kernel of the caller's network namespace. Raises NetlinkError, and Unsupported without IPVS."""
        with ExitStack() as opened:
            servers = opened.enter_context(ipvs.Ipvs.open())
            sets = opened.enter_context(Ipsets.open())
            kernel = cls(commands, servers, sets, AddressMonitor.listen(), restore_failures)
            opened.pop_all()
        return kernel

    def close(self) -> None:
        """Close the sockets."""
        super().close()
        self._monitor.close()

    # -- interface and addresses ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the interface and the sets if they are missing."""
        self._interface = route.ensure_dummy(INTERFACE)
        counts = self._sets.counts()
        for set_id in IpsetId:
            self._prepare_set(set_id.named(self.family), set_id, counts.get(set_id.named(self.family)))

    def addresses_changed(self) -> bool:
        """Return whether any address was added or removed since the last call."""
        return self._monitor.drain()

    def bind(self, addresses: Iterable[bytes]) -> None:
        """Add addresses to kube-ipvs0."""
        route.add_addresses(self._interface, list(addresses))

    def unbind(self, addresses: Iterable[bytes]) -> None:
        """Remove addresses from kube-ipvs0."""
        route.remove_addresses(self._interface, list(addresses))

    # -- virtual servers ------------------------------------------------------------------------------------------

    def connections(self, keys: Iterable[bytes]) -> Mapping[bytes, Mapping[bytes, int]]:
        """Return the number of connections of each real server, by virtual server and real server."""
        return {
            key: {real.key: real.active + real.inactive for real in self._ipvs.destinations(key).values()}
            for key in keys
        }

    def operate(self, operations: Sequence[ipvs.ServerChange]) -> None:
        """Execute the operations on virtual servers and real servers, in the given order."""
        self._ipvs.apply(operations)

    # -- sets -----------------------------------------------------------------------------------------------------

    def add_entries(self, added: Mapping[IpsetId, Sequence[tuple[SetEntry, bool]]]) -> None:
        """Add the entries of a Difference to sets; existing entries are no error."""
        for set_id, entries in added.items():
            self._sets.add(set_id.named(self.family), [entry for entry, _ in entries])

    def remove_entries(self, removed: Mapping[IpsetId, Sequence[SetEntry]]) -> None:
        """Remove the entries of a Difference from sets; missing entries are no error."""
        for set_id, entries in removed.items():
            self._sets.remove(set_id.named(self.family), entries)

    def _prepare_set(self, name: str, set_id: IpsetId, counts: SetCounts | None) -> None:
        kind = kind_of(set_id, self.family)
        if counts is None:
            self._sets.create(name, kind, maxelem=MAX_ELEMENTS)
        elif counts.kind != kind:
            # The kernel refuses to delete a set that a rule uses. A refusal is an error, because only our rules use
            # these sets.
            self._sets.destroy(name)
            self._sets.create(name, kind, maxelem=MAX_ELEMENTS)
        elif 0 < counts.maxelem < MAX_ELEMENTS:
            log.info("Increasing the capacity of an ipset name=%s from=%d to=%d", name, counts.maxelem, MAX_ELEMENTS)
            self._sets.destroy(_SPARE)  # an interrupted attempt may have left this set
            self._sets.create(_SPARE, kind, maxelem=MAX_ELEMENTS)
            self._sets.add(_SPARE, self._sets.entries(name))
            self._sets.swap(_SPARE, name)
            self._sets.destroy(_SPARE)

    # -- rules ----------------------------------------------------------------------------------------------------

    def rules(self, rules: Rules) -> RuleState:
        """See NodeView. Rules of iptables-nft are read over netlink, without a command, as texts only to compare."""
        return _grouped(self._fetched(rules), rules) if self._commands.uses_nft else super().rules(rules)

    def _fetched(self, rules: Rules) -> Iterator[tuple[str, str, str, str]]:
        for table, ours in rules.tables.items():
            for chain in (*ours, *{jump.chain: None for jump in JUMPS if jump.table == table}):
                for rule in nft_compat.expressions(self.family, table, chain):
                    target = next((target for target in ours if nft_compat.leads_to(rule, target)), "")
                    if chain in ours or target:
                        yield table, chain, target, str(nft_compat.uncounted(rule))

    def missing_jumps(self, rules: Rules) -> Sequence[Jump]:
        """Return the missing jumps to our chains."""
        found = self.rules(rules)
        return [jump for jump in JUMPS if (jump.table, jump.chain, jump.target) not in found]

    def write_rules(self, rules: Rules, tables: Sequence[str], missing: Sequence[Jump]) -> None:
        """Create our chains in the tables, and add the missing jumps."""
        if not tables:
            return
        try:
            self._commands.restore([rules.text(tables, missing)])
        except ApplyError:
            self._restore_failures.inc()
            raise


def _saved(commands: Commands) -> Iterator[tuple[str, str, str, str]]:
    for table in xtables.tables(commands.name):
        yield from ((table.name, xtables.chain_of(rule), xtables.target_of(rule), rule) for rule in table.rules)


def _grouped(listed: Iterable[tuple[str, str, str, str]], rules: Rules) -> RuleState:
    """Return the state of these rules, each given as table, chain, target and text."""
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for table, chain, target, rule in listed:
        ours = rules.tables.get(table, {})
        if chain in ours:
            found[table, chain, ""] = (*found.get((table, chain, ""), ()), rule)
        elif target in ours:
            found[table, chain, target] = (rule,)
    return found
