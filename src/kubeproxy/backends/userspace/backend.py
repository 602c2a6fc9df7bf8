"""The userspace backend of one family: keeps listeners and rules consistent. A listener is opened before rules redirect
connections to it, and closed after the last such rule is removed. Calls block briefly. A start adopts no rules, because
relayed connections end with the proxy: one transaction replaces the table with a table for the new listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple, Self

from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.relay.datapath import DataPath
from kubeproxy.backends.state import Elements, NamedPlans, Plans, diff
from kubeproxy.backends.table_view import inspected
from kubeproxy.backends.userspace.listeners import KINDS, Assignment, ListenerName, Listeners, assignments
from kubeproxy.backends.userspace.ruleset import TABLE, UserspaceRuleset, elements, merged, packed
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.elements import element_messages
from kubeproxy.kernel.nftables.messages import table_message, table_removal
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.route import SCOPE_UNIVERSE, local_addresses
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan, ServicePortKey

log = logging.getLogger("kubeproxy.userspace")


class _Served(NamedTuple):
    elements: Elements
    listeners: Collection[ListenerName]


Addresses = Callable[[], Sequence[bytes]]
"""Returns the node's packed addresses of one family that other hosts can reach. Raises NetlinkError."""

AGAIN: Final = 100
"""Maximum number of Services per second for which listeners are opened after a lack of descriptors. Each of these
Services takes one transaction."""


class UserspaceBackend:
    """See backends.mode.Backend."""

    def __init__(
        self,
        family: Family,
        world: Globals,
        path: DataPath,
        listeners: Listeners,
        transactions: nfnetlink.Transactions,
        addresses: Addresses,
    ) -> None:
        self.family = family
        self.abilities = Abilities(ports_of=self.ports_of)
        self._path = path
        self._listeners = listeners
        self._world = world
        self._transactions = transactions
        self._addresses = addresses
        self._ruleset = UserspaceRuleset(family, world, None)
        self._served: dict[ServiceName, _Served] = {}
        self._waiting: dict[ServiceName, tuple[ServicePlan, ...]] = {}  # Services without a free port for a listener
        self._header: nfnetlink.TableHeader | None = None  # of the committed table
        self._generation = 0

    @classmethod
    def open(cls, family: Family, world: Globals, path: DataPath, listeners: Listeners) -> Self:
        """Return a backend for the network namespace of the caller. Raises NetlinkError."""
        return cls(family, world, path, listeners, nfnetlink.Transactions.open(), partial(reachable_addresses, family))

    def close(self) -> None:
        """End all connections and close the sockets; the rules are not removed."""
        self._path.stop()
        self._transactions.close()

    def ports_of(self, key: ServicePortKey) -> Collection[int]:
        """See backends.mode.Abilities."""
        return [port for port in self._listeners.ports(key).values() if port is not None]

    def set_world(self, world: Globals) -> bool:
        """Set the globals; return whether a resync is needed because rules change."""
        self._world = world
        ruleset = UserspaceRuleset(self.family, world, self._find_landing())
        changed = not ruleset.is_like(self._ruleset)
        self._ruleset = ruleset
        return changed

    def _find_landing(self) -> bytes | None:
        return landing_of(self._world, self.family, self._addresses())

    # -- incremental ------------------------------------------------------------------------------------------------

    def sync(self, changes: Sequence[NamedPlans]) -> Iterator[int]:
        """Program changed Services in one transaction; yield its size. Raises ApplyError. If the changes free ports,
        Services without a port are tried again."""
        freed, size = self._program(changes)
        yield size
        while freed and self._waiting:
            freed, size = self._program(list(islice(self._waiting.items(), freed)))
            yield size

    def _program(self, changes: Sequence[NamedPlans], creation: Sequence[bytes] = ()) -> tuple[int, int]:
        """Commit changed Services; return the number of freed ports and of elements. `creation` are the messages that
        replace the table with an empty table: then these Services replace all Services, in the same transaction."""
        after = self._opened(changes)
        before = [] if creation else [served for name in after if (served := self._served.get(name)) is not None]
        removed, added = diff(*(merged(served.elements for served in each) for each in (before, after.values())))
        gone_elements = {name: [(key, b"") for key in keys] for name, keys in removed.items()}
        messages = [
            *creation,
            *self._messages(nfnetlink.DELETE_ELEMENT, gone_elements),
            *self._messages(nfnetlink.NEW_ELEMENT, added),
        ]
        if messages:
            self._transactions.commit(messages)
            self._generation += 1
        gone = set(self._listeners.names()) if creation else {name for served in before for name in served.listeners}
        if creation:
            self._served, self._waiting = {}, {}
        self._note(after, changes)
        gone.difference_update(*(served.listeners for served in after.values()))
        freed = sum(self._listeners.port(name) is not None for name in gone)
        self._listeners.drop(gone)
        return freed, _count(removed) + _count(added)

    def _opened(self, wanted: Sequence[NamedPlans]) -> dict[ServiceName, _Served]:
        needed = {name: _assignments(plans) for name, plans in wanted}
        self._listeners.take({name: assignment for part in needed.values() for name, assignment in part.items()})
        return {
            name: _Served(
                merged(elements(plan, self._listeners.ports(plan.key)) for plan in plans), needed[name].keys()
            )
            for name, plans in wanted
        }

    def _messages(self, kind: int, part: Mapping[str, Sequence[tuple[bytes, bytes]]]) -> Iterator[bytes]:
        for name, entries in part.items():
            data = [packed(self._ruleset.shapes[name], key, value) for key, value in entries]
            yield from element_messages(kind, self.family, TABLE, name, data)

    def _note(self, after: Mapping[ServiceName, _Served], wanted: Iterable[NamedPlans]) -> None:
        for name, plans in wanted:
            served = after[name]
            self._served.pop(name, None)
            self._waiting.pop(name, None)
            if served.elements:
                self._served[name] = served
            if any(self._listeners.port(listener) is None for listener in served.listeners):
                self._waiting[name] = plans

    # -- the whole table --------------------------------------------------------------------------------------------

    def resync(self, wanted: Plans) -> Iterator[int]:
        """Replace the whole table, if any; yield its size. Raises ApplyError."""
        self.set_world(self._world)  # the node's addresses may have changed
        self._path.mark = self._world.masquerade_mark
        # If the kernel refused an earlier attempt, there may be listeners to which no rule redirects.
        needed = {listener for plans in wanted.values() for plan in plans for listener in assignments(plan)}
        used = {listener for served in self._served.values() for listener in served.listeners}
        self._listeners.drop(set(self._listeners.names()) - needed - used)
        expected = self._transactions.generation() + 1
        removal = table_message(self.family, TABLE), table_removal(self.family, TABLE)
        freed, size = self._program(list(wanted.items()), [*removal, *self._ruleset.creation()])
        with self._reader() as table:
            self._header, self._generation = table.header(), expected
        yield size
        if freed and self._waiting:
            yield from self.sync(list(islice(self._waiting.items(), freed)))

    # -- changes by other programs -------------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Open listeners that could not be opened for lack of descriptors, if descriptors are free."""
        if not (self._waiting and self._listeners.recovered()):
            return
        again = list(islice(self._waiting.items(), AGAIN))
        self._listeners.exhausted = False
        for change in again:
            self._program([change])
            if self._listeners.exhausted:
                return
        served = any(name not in self._waiting for name, _ in again)
        self._listeners.exhausted = served and len(again) == AGAIN  # the next Services follow in a second

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """See backends.mode.Backend. The inspection needs only two short requests, unless another program committed to
        nf_tables."""
        if self._find_landing() != self._ruleset.landing:
            return ForeignChange(
                "the node's addresses changed; rules redirect connections from outside to one of the node's addresses"
            )
        generation = self._transactions.generation()
        if generation == self._generation:
            return None
        seen = inspected(self._ruleset.name, depth, self._is_altered(), self._changed_elements)
        if seen is None and depth is Depth.THOROUGH:
            self._generation = generation
        return seen

    def _changed_elements(self) -> str:
        total = merged(served.elements for served in self._served.values())
        with self._reader() as table:
            for name in self._ruleset.shapes:
                if dict(chain.from_iterable(table.pairs(name))) != total.get(name, {}):
                    return name
        return ""

    def _is_altered(self) -> bool:
        with self._reader() as table:
            header = table.header()
            return header != self._header or table.contents() != self._ruleset.definition().contents

    def _reader(self) -> TableReader:
        return TableReader(self.family, TABLE, Netlink.open())


def landing_of(world: Globals, family: Family, local: Sequence[bytes]) -> bytes | None:
    """Return the local address to which connections from outside are redirected: an address of the Node object if it is
    local, else the lowest local address; None if there is none."""
    ours = world.of(family) or FamilyGlobals()
    candidates = [*(ip for ip in ours.node_ips if ip in local), *sorted(local)]
    return candidates[0] if candidates else None


def reachable_addresses(family: Family) -> list[bytes]:
    """Return the packed addresses by which other hosts can reach this network namespace. Raises NetlinkError."""
    return [address.ip for address in local_addresses(family) if address.scope == SCOPE_UNIVERSE]


def _assignments(plans: Iterable[ServicePlan]) -> dict[ListenerName, Assignment]:
    found: dict[ListenerName, Assignment] = {}
    for plan in plans:
        if plan.key.protocol not in KINDS:
            log.warning(
                "%s: userspace mode carries TCP and UDP, its %s clients are refused; use another mode for it",
                plan.key,
                PROTOCOL_NAMES[plan.key.protocol],
            )
        found.update(assignments(plan))
    return found


def _count(part: Mapping[str, Sized]) -> int:
    return sum(len(entries) for entries in part.values())
