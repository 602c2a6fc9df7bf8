"""Examination of nftables mode: compares the table with plans, element by element, beside the running proxy.

A difference is what a resync would write, except for free choices: the slots of endpoints, and the numbers of pools if
each pool has its own. A dump may lack elements while the proxy writes, so missing ones are looked up by key.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kubeproxy.backends.examination import Examiner, Finding, Kind, Plans
from kubeproxy.backends.nftables import audit
from kubeproxy.backends.nftables.gone import GONE, endpoint_key
from kubeproxy.backends.nftables.layout import (
    ENDPOINT_MAPS,
    NUMBER_MAPS,
    POOL_MAPS,
    POOLS_OF,
    SERVICE_CIDRS,
    SHARED,
    TABLE,
    TRANSPORTS,
    Layout,
    Packing,
    SetId,
    client_set,
    service_key,
    slot_bytes,
)
from kubeproxy.backends.nftables.localhost import LOOPBACK, relay_targets
from kubeproxy.backends.nftables.render import MaglevTable, Numbers, Parts, place_all
from kubeproxy.backends.nftables.ruleset import COMMENT, Ruleset, client_number
from kubeproxy.backends.nftables.words import ElementWords
from kubeproxy.backends.table_view import TableView, complete, nodeport_findings, rule_findings
from kubeproxy.features import RESETS
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.elements import Entries
from kubeproxy.kernel.proc.listening import Listening, listening
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, destination_text, pack, unpack
from kubeproxy.model.plan import FamilyGlobals, Globals, Loopback, Pool, ServiceName, ServicePlan

Actual = Mapping[str, Entries]

_PAD: Final = b"\0\0"
_BEYOND: Final = (4, 256)
"""Minimum and maximum number of slots after those of a frontend's endpoints that are looked up, else as many again."""


class NftablesView(TableView):
    """Our table in the network namespace of a socket."""

    def __init__(self, family: Family, link: Netlink) -> None:
        ranges = {name for name, shape in Layout(family).shapes.items() if shape.kind is Packing.INTERVAL}
        super().__init__(family, TABLE, ranges, link)


class _Wanted(Parts):
    """The elements that the plans of one Service put into a family's table."""

    def __init__(self, family: Family, plans: Iterable[ServicePlan], numbers: Numbers) -> None:
        self.plans = [plan for plan in plans if plan.key.family is family]
        super().__init__(place_all(self.plans, (), numbers))

    def number_lists(self, lists: Entries) -> None:
        """Renumber the source ranges as the kernel numbers their list; `lists` maps frontends to these numbers."""
        ours = {data: lists[key] for key, data in self.elements.get(SetId.FIREWALL_LISTS, {}).items() if key in lists}
        if ours and (spans := self.elements.get(SetId.FIREWALL_ALLOW)):
            self.elements[SetId.FIREWALL_ALLOW] = {_numbered(key, ours): b"" for key in spans}

    @property
    def fronts(self) -> list[bytes]:
        """Return the keys of the frontends."""
        return [service_key(frontend.key) for plan in self.plans for frontend in plan.frontends]

    def places(self) -> Iterator[tuple[str, bytes]]:
        """Yield set and key of all elements."""
        for set_id, entries in self.elements.items():
            for key in entries:
                yield set_id, key
        for (set_id, key), pool in self.pools.items():
            for slot in slot_bytes(len(pool))[: len(pool)]:
                yield set_id, key + slot


def _numbered(key: bytes, numbers: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a range with its list's number in the kernel, which precedes the first and the last address."""
    size = len(key) // 4
    number = numbers.get(key[:size], key[:size])
    return number + key[size : 2 * size] + number + key[3 * size :]


class NftablesExaminer(Examiner):
    """See backends.examination.Examiner."""

    def __init__(self, view: NftablesView, world: Globals) -> None:
        super().__init__(view.family)
        self._view = view
        self._world = world
        self._ours = world.of(self.family) or FamilyGlobals()
        self._ruleset = Ruleset(self.family, world)
        self._layout: Layout = self._ruleset.layout
        self._words = ElementWords(self._layout)

    def close(self) -> None:
        """Close the socket."""
        self._view.close()

    # -- a few Services ---------------------------------------------------------------------------------------------

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner. Looks up each planned element of these Services, and each one that they could have."""
        if (harm := self._harm()) is not None:
            yield harm
            return
        numbers = Numbers()
        wanted = {name: _Wanted(self.family, its, numbers) for name, its in plans.items()}
        actual = self._looked_up(wanted.values())
        comparison = _Comparison(self._words, actual)
        comparison.reserve(self._numbers_of_others(wanted.values()))
        yield from comparison.all_of(wanted)
        yield from self._gone(plans)
        yield from self._relayed(wanted)

    def _looked_up(self, wanted: Collection[_Wanted]) -> Actual:
        keys: dict[str, set[bytes]] = {}
        for part in wanted:
            for set_id, key in (*part.places(), *self._possible(part)):
                keys.setdefault(set_id, set()).add(key)
        restricted = keys.pop(SetId.FIREWALL_ALLOW, None) is not None
        actual = {set_id: self._view.lookup(set_id, asked) for set_id, asked in keys.items()}
        lists = actual.get(SetId.FIREWALL_LISTS, {})
        if restricted or lists:
            # Ranges that another program added to a list are not in the planned keys.
            size, numbers = self.family.address_size, set(lists.values())
            spans = self._view.elements(SetId.FIREWALL_ALLOW)
            actual[SetId.FIREWALL_ALLOW] = {key: b"" for key in spans if key[:size] in numbers}
            for part in wanted:
                part.number_lists(lists)
        return actual

    def _numbers_of_others(self, wanted: Iterable[_Wanted]) -> Iterator[bytes]:
        """Yield the numbers of frontends of other Services, if the plans have numbers to compare."""
        asked = {(set_id, key) for part in wanted for set_id in NUMBER_MAPS for key in part.elements.get(set_id, ())}
        for set_id in NUMBER_MAPS if asked else ():
            for key, number in self._view.elements(set_id).items():
                if (set_id, key) not in asked:
                    yield number

    def _possible(self, part: _Wanted) -> Iterator[tuple[str, bytes]]:
        """Yield set and key of elements that a Service's frontends could have without a plan."""
        for key in part.fronts:
            for name, shape in self._layout.shapes.items():
                if name not in ENDPOINT_MAPS and shape.fields[-1] == "port" and shape.key_size(self.family) == len(key):
                    yield name, key
        for (set_id, key), pool in part.pools.items():
            count = len(pool)
            least, most = _BEYOND
            after = count + min(max(count, least), most)
            for slot in slot_bytes(after)[count:after]:
                yield set_id, key + slot

    def remembered(self, plan: ServicePlan, client: bytes) -> Iterator[bytes]:
        """See Examiner. The first slot whose set has the client decides."""
        sets, asked = self._view.sets(), set()
        remembered = client_number(client)
        for (set_id, key), pool in _Wanted(self.family, [plan], Numbers()).pools.items():
            number = self._view.lookup(POOLS_OF[SetId(set_id)], [key]).get(key)
            if number is None or number in asked:
                continue
            asked.add(number)
            keys = [key + slot for slot in slot_bytes(len(pool))[: len(pool)]]
            there = self._view.lookup(set_id, keys)
            for name, slot in zip(map(client_set, range(len(pool))), keys, strict=True):
                if slot in there and name in sets and self._view.lookup(name, [remembered + number]):
                    yield there[slot][: -len(_PAD)]
                    break

    # -- everything -------------------------------------------------------------------------------------------------

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        if (harm := self._harm()) is not None:
            yield harm
            return
        numbers = Numbers()
        parts = {name: _Wanted(self.family, plans, numbers) for name, plans in wanted.items()}
        actual = {name: self._view.elements(name) for name in self._layout.shapes}
        for part in parts.values():
            part.number_lists(actual[SetId.FIREWALL_LISTS])
        complete(actual, (element for part in parts.values() for element in part.places()), self._view.lookup)
        nodeport_ips = actual.pop(SetId.NODEPORT_IPS).keys()
        yield from _Comparison(self._words, actual).all_of(parts)
        answering = frozenset(self._ours.nodeport_ips or ())
        yield from nodeport_findings(answering, nodeport_ips, self._words.where(SetId.NODEPORT_IPS))
        yield from self._skeleton()
        yield from self._gone(wanted)
        yield from self._relayed(parts)

    # -- the table itself -------------------------------------------------------------------------------------------

    def _harm(self) -> Finding | None:
        """Return the finding that makes the whole table useless, if any."""
        header, where = self._view.header(), f"table {self._ruleset.name}"
        if header is None:
            return Finding(None, Kind.MISSING, "the whole table: no Service is served", where)
        if header.dormant:
            return Finding(None, Kind.DIFFERENT, "the table is dormant: no Service is served", where)
        if not header.comment.startswith(COMMENT):
            what = "the table is another program's"
            return Finding(None, Kind.DIFFERENT, what, where, COMMENT, header.comment or "no comment")
        if missing := self._layout.shapes.keys() - self._view.sets():
            return Finding(None, Kind.MISSING, f"sets of the table: {', '.join(sorted(missing))}", where)
        return None

    def _skeleton(self) -> Iterator[Finding]:
        """Yield differences of chains, rules, service CIDRs and transport protocols."""
        present = self._view.contents()
        where = f"table {self._ruleset.name}"
        yield from rule_findings(audit.wanted(self._ruleset, present).chains, present.chains, where)
        found = frozenset(self._view.elements(SERVICE_CIDRS)) - {bytes(self.family.address_size)}
        if found != {key for key, _ in audit.edges(self._ours.service_cidrs)}:
            ranges = ", ".join(f"{unpack(a)} to {unpack(b)}" for a, b in self._ours.service_cidrs) or "none"
            yield Finding(None, Kind.DIFFERENT, "the ServiceCIDRs", f"set {SERVICE_CIDRS} of {where}", ranges, "others")
        if {key[0] for key in self._view.elements(TRANSPORTS)} != PROTOCOL_NAMES.keys():
            what = f"set {TRANSPORTS} of {where}"
            yield Finding(None, Kind.DIFFERENT, "the protocols that are served", what, "TCP, UDP, SCTP", "others")

    def _gone(self, wanted: Plans) -> Iterator[Finding]:
        """Yield endpoints of Services that are in the set of deleted endpoints."""
        if not RESETS.value(self._world) or not (gone := set(map(endpoint_key, self._view.elements(GONE)))):
            return
        for name, plans in wanted.items():
            for plan in plans:
                for destination in plan.serving if plan.key.family is self.family else ():
                    if destination[:-2] + bytes((plan.key.protocol,)) + destination[-2:] in gone:
                        what = f"{destination_text(destination)}, whose connections are reset as if it were deleted"
                        yield Finding(name, Kind.EXTRA, what, f"set {GONE} of table {self._ruleset.name}")

    def _relayed(self, parts: Mapping[ServiceName, _Wanted]) -> Iterator[Finding]:
        """Yield NodePorts that the proxy should relay from loopback and does not listen on."""
        if self._ours.loopback is not Loopback.RELAYED:
            return
        address = LOOPBACK[self.family]
        there = listening(self.family, socket.IPPROTO_TCP)
        for name, part in parts.items():
            for port, _ in relay_targets(part.plans):
                if Listening(pack(address) or b"", port) not in there:
                    yield Finding(name, Kind.MISSING, f"NodePort {port}/tcp on {address}", "the proxy's own sockets")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


class _Comparison:
    """Compares found with planned elements. Whole sets and pools are compared in C where possible."""

    def __init__(self, words: ElementWords, actual: Actual) -> None:
        self._words = words
        self._actual = actual
        self._used: dict[str, set[bytes]] = {set_id: set() for set_id in actual}
        self._endpoints: dict[bytes, ServiceName] = {}  # address of an unplanned endpoint : its Service
        self._numbers: dict[bytes, bytes] = {}  # planned number of a pool or list : number in the kernel
        self._pools: dict[bytes, bytes] = {}  # the inverse

    def reserve(self, numbers: Iterable[bytes]) -> None:
        """Note the numbers of other pools, which no pool compared here may have."""
        self._pools.update(dict.fromkeys(numbers, b""))

    def all_of(self, parts: Mapping[ServiceName, _Wanted]) -> Iterator[Finding]:
        """Yield all findings; those without a Service come last."""
        for name, part in parts.items():
            for set_id, entries in part.elements.items():
                there = self._actual[set_id]
                self._used[set_id].update(entries)
                for key, data in entries.items():
                    present = there.get(key)
                    right = self._is_number_of(data, present) if set_id in NUMBER_MAPS else present == data
                    if not right:
                        yield self._otherwise(name, set_id, key, data, present)
            for (set_id, key), pool in part.pools.items():
                yield from self._pool(name, set_id, key, pool)
        owners = {key: name for name, part in parts.items() for key in part.fronts}
        lists = self._actual.get(SetId.FIREWALL_LISTS, {})
        owners |= {lists[key]: name for key, name in owners.items() if key in lists}
        yield from self._strays(owners)

    def _is_number_of(self, pool: bytes, number: bytes | None) -> bool:
        """Return whether the kernel uses one number for a pool, and for this pool only. Its last bit is the policy."""
        if number is None or (number[-1] ^ pool[-1]) & 1:
            return False
        return self._numbers.setdefault(pool, number) == number and self._pools.setdefault(number, pool) == pool

    def _otherwise(self, name: ServiceName, set_id: str, key: bytes, data: bytes, present: bytes | None) -> Finding:
        words = self._words
        what, where, wanted = words.front(set_id, key), words.where(set_id), words.meaning(set_id, key, data)
        if set_id in POOL_MAPS:
            wanted = "its clients are remembered under a number of their own"
        elif set_id == SetId.FIREWALL_LISTS:
            wanted = "its source ranges are kept under a number of their own"
        if present is None:
            return Finding(name, Kind.MISSING, what, where, wanted)
        return Finding(name, Kind.DIFFERENT, what, where, wanted, words.meaning(set_id, key, present))

    def _pool(self, name: ServiceName, set_id: str, key: bytes, pool: Pool) -> Iterator[Finding]:
        entries = self._actual[set_id]
        keys = [key + slot for slot in slot_bytes(len(pool))[: len(pool)]]
        self._used[set_id].update(keys)
        present = [entries.get(slot_key) for slot_key in keys]
        wanted = {destination + _PAD for destination in pool}
        # With weights an endpoint has several slots; their number must match, not their places.
        if wanted != set(present) or (len(wanted) < len(pool) and sorted(pool) != sorted(d[:-2] for d in present if d)):
            counts = Counter([destination + _PAD for destination in pool])
            yield from self._otherwise_picked(name, set_id, key, counts, [d for d in present if d is not None])
        elif isinstance(pool, MaglevTable):
            wrong = sum(destination + _PAD != there for destination, there in zip(pool, present, strict=True))
            if wrong:
                yield self._otherwise_led(name, set_id, key, wrong, len(pool))

    def _otherwise_led(self, name: ServiceName, set_id: str, key: bytes, wrong: int, size: int) -> Finding:
        what = f"{wrong} of {size} slots of the table of {self._words.front(set_id, key)}"
        where = self._words.where(set_id)
        return Finding(name, Kind.DIFFERENT, what, where, "the endpoints of Maglev", "others")

    def _otherwise_picked(
        self, name: ServiceName, set_id: str, key: bytes, wanted: Counter[bytes], present: Sequence[bytes]
    ) -> Iterator[Finding]:
        where = self._words.where(set_id)
        counts = Counter(present)
        for destination in sorted(wanted.keys() - counts.keys()):
            yield Finding(name, Kind.MISSING, self._words.endpoint(set_id, key, destination), where)
        for destination, count in sorted(counts.items()):
            if destination not in wanted:
                self._endpoints[destination[:-4]] = name
                yield Finding(name, Kind.EXTRA, self._words.endpoint(set_id, key, destination), where)
            elif count != wanted[destination]:
                what = self._words.endpoint(set_id, key, destination)
                yield Finding(name, Kind.DIFFERENT, what, where, _times(wanted[destination]), _times(count))

    def _strays(self, owners: Mapping[bytes, ServiceName]) -> Iterator[Finding]:
        """Yield unplanned elements. One with a frontend or list of a Service is attributed to the Service."""
        last = []
        for set_id, entries in self._actual.items():
            extra = sorted(entries.keys() - self._used[set_id])
            if set_id in SHARED:
                last += [(set_id, key) for key in extra]
                continue
            for key in extra:
                yield self._stray(set_id, key, entries[key], owners)
        for set_id, key in last:
            # A hairpin element whose address is that of an unplanned endpoint is attributed to the same Service.
            what, meaning = self._words.front(set_id, key), self._words.meaning(set_id, key, b"")
            name = self._endpoints.get(key[: len(key) // 2])
            yield Finding(name, Kind.EXTRA, what, self._words.where(set_id), present=meaning)

    def _stray(self, set_id: str, key: bytes, data: bytes, owners: Mapping[bytes, ServiceName]) -> Finding:
        where = self._words.where(set_id)
        if set_id in ENDPOINT_MAPS:
            name = owners.get(key[:-4])
            if name is not None:
                self._endpoints[data[:-4]] = name
            return Finding(name, Kind.EXTRA, self._words.endpoint(set_id, key, data), where)
        front = next((key[:size] for size in (len(key), 8, 12, 24, len(key) // 4) if key[:size] in owners), key)
        what, meaning = self._words.front(set_id, key), self._words.meaning(set_id, key, data)
        return Finding(owners.get(front), Kind.EXTRA, what, where, present=meaning)
