"""Found state of our table without the elements of Services: chains, rules, small sets. Reads only.

Used at the start, after a failure, and when another program may have changed the table. Its second part is the
transition from a found table to ours: elements of earlier versions, and temporary rules while a table is replaced.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubeproxy.backends.nftables.layout import (
    CLIENTS,
    POOL_MAPS,
    SERVICE_CIDRS,
    TABLE,
    TRANSPORTS,
    VERDICT_MAPS,
    ChainName,
    SetId,
    list_number,
    parse_chain_name,
    slot_of_clients,
)
from kubeproxy.backends.nftables.packing import Packers, Transaction
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.backends.nftables.ruleset import SOURCE_RANGES, Ruleset, client_number
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.errors import ChangedByOthersError
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import compiling, messages, nfnetlink
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.elements import catch_all_element, element_messages, plain_element, timed_element
from kubeproxy.kernel.nftables.nfnetlink import NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import ChainContents, Definition, Hook, SetForm, TableContents
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, Range, unpack
from kubeproxy.model.plan import FamilyGlobals

CONTRADICTIONS: Final = frozenset(
    {errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP}
)
"""Errors of a repair that mean that an object in the table blocks it. Others, such as ENOBUFS, are temporary."""


class Signed(NamedTuple):
    """A chain: its handle, its hook, None unless it is a base chain, and the handles of its rules in order."""

    handle: int
    hook: Hook | None
    rules: tuple[int, ...]


class Signature(NamedTuple):
    """Handles of a table, its chains and rules. The kernel never reuses one, so each change makes another signature."""

    header: nfnetlink.TableHeader | None = None
    chains: Mapping[str, Signed] = MappingProxyType({})

    def without(self, chains: Iterable[str]) -> Signature:
        """Return the signature after the removal of chains that another chain may lead to."""
        return self._replace(chains={name: self.chains[name] for name in self.chains.keys() - set(chains)})


def signature(table: KernelTable) -> Signature:
    """Return the signature of our table. Reads every rule: see `grown`."""
    header, chains = table.header(), table.chains()
    rules: dict[str, list[int]] = {name: [] for name in chains}
    for rule in table.rules():
        rules.setdefault(rule.chain, []).append(rule.handle)
    hooks = {name: (chain.handle, chain.hook) for name, chain in chains.items()}
    return Signature(header, {name: Signed(*hooks.get(name, (0, None)), tuple(its)) for name, its in rules.items()})


def grown(before: Signature, made: Sequence[bytes], reported: Sequence[int]) -> Signature | None:
    """Return the signature after our transaction that created chains and rules, without reading any.

    `reported` are the handles of its first chain and its last rule. The kernel counts handles in each table, so the
    objects between them have handles in a row. Returns None if one of the chains existed: another program created it.
    """
    objects = list(nfnetlink.created(made))
    del objects[: [kind for kind, _ in objects].index(nfnetlink.NEW_CHAIN)]
    if len(reported) != 2 or reported[1] - reported[0] != len(objects) - 1:
        return None
    rules: dict[str, list[int]] = {}
    chains = dict(before.chains)
    for handle, (kind, name) in enumerate(objects, reported[0]):
        if kind == nfnetlink.NEW_CHAIN:
            chains[name] = Signed(handle, None, ())
        elif kind == nfnetlink.NEW_RULE:
            rules.setdefault(name, []).append(handle)
    return before._replace(chains=chains | {name: chains[name]._replace(rules=tuple(rules[name])) for name in rules})


@contextmanager
def attributed(table: str) -> Iterator[None]:
    """Raise ChangedByOthersError if the kernel refuses a change because an object of our table is missing, or exists
    already."""
    try:
        yield
    except NetlinkError as error:
        if error.code not in {errno.ENOENT, errno.EEXIST}:
            raise
        raise ChangedByOthersError(f"another program changed table {table}: {error}") from error


NodeSets = dict[str, frozenset[Any]]
"""State of the node's own sets: SERVICE_CIDRS as edges of address ranges, the others as packed elements.

Edges are (first address, False) and (address after the last one, True).
"""


def node_sets(table: KernelTable) -> NodeSets:
    """Return the found state of the node's sets."""
    cidrs = frozenset([(element.key, element.ends) for element in table.elements(SERVICE_CIDRS)])
    return {
        # nft writes this element if no range begins at 0
        SERVICE_CIDRS: cidrs - {(bytes(table.family.address_size), True)},
        TRANSPORTS: frozenset([element.key[:1] for element in table.elements(TRANSPORTS)]),
        SetId.NODEPORT_IPS: frozenset([element.key for element in table.elements(SetId.NODEPORT_IPS)]),
    }


def desired_node_sets(ours: FamilyGlobals) -> NodeSets:
    """Return the desired state of the node's sets. Rules match only protocols in TRANSPORTS."""
    transports = frozenset([bytes([protocol]) for protocol in PROTOCOL_NAMES])
    nodeport_ips = frozenset(ours.nodeport_ips or ())
    return {SERVICE_CIDRS: edges(ours.service_cidrs), TRANSPORTS: transports, SetId.NODEPORT_IPS: nodeport_ips}


def filling(family: Family, name: str, elements: frozenset[Any]) -> list[bytes]:
    """Return the messages that fill an empty set of the node."""
    if name == SERVICE_CIDRS:
        return messages.ranges(family, TABLE, name, elements)
    return element_messages(nfnetlink.NEW_ELEMENT, family, TABLE, name, [plain_element(key) for key in elements])


def edges(ranges: Iterable[Range]) -> frozenset[tuple[bytes, bool]]:
    """Return the edges of disjoint ranges, as the kernel lists them."""
    found = set()
    for first, last in ranges:
        found.add((first, False))
        behind = int.from_bytes(last, "big") + 1
        if behind < 1 << 8 * len(last):
            found.add((behind.to_bytes(len(last), "big"), True))
    return frozenset(found)


def affinity_chains(names: Iterable[str]) -> set[ChainName]:
    """Return the chains of session affinity among these chains."""
    return {name for name in map(parse_chain_name, names) if name is not None}


def wanted(ruleset: Ruleset, found: TableContents) -> Definition:
    """Return the desired table. The desired chains of session affinity and sets of clients are those found: they depend
    on earlier Services, and sets of clients outlive their chains.
    """
    slots = (slot for name in found.sets if (slot := slot_of_clients(name)) is not None)
    return ruleset.definition(affinity_chains(found.chains), slots)


def repairs(ruleset: Ruleset, found: TableContents, table: KernelTable) -> list[bytes] | None:
    """Return the messages that make chains, rules and sets as desired; [] if they are.

    Returns None if a set with elements of Services has another form: then rules and elements must change together.
    """
    definition = wanted(ruleset, found)
    of_services = (spec for spec in definition.sets if spec.name in ruleset.layout.shapes)
    if any((found.sets.get(spec.name) or older_form(spec.name, found)) != spec.form for spec in of_services):
        return None
    changes = messages.changes(ruleset.family, TABLE, found, definition)
    return [*changes, *copies(ruleset, definition, found, table)] if changes else changes


def catch_alls(table: KernelTable) -> list[str]:
    """Return the sets with a catch-all element, which this program never writes."""
    return sorted(name for name in table.sets() if not name.startswith("__") and table.has_catch_all(name))


def catch_all_removals(table: KernelTable) -> list[bytes]:
    """Return the messages that remove catch-all elements. Lookups by key do not show them."""
    place, element = (table.family, TABLE), [catch_all_element()]
    found = (element_messages(nfnetlink.DELETE_ELEMENT, *place, name, element) for name in catch_alls(table))
    return [message for messages in found for message in messages]


_OLDER: Final[dict[str, str]] = {name: name.replace("session", "affinity") for name in (*VERDICT_MAPS, *POOL_MAPS)}
_AFFINITY: Final = "affinity-"
_MOST: Final = 2000
"""Maximum number of ranges that become rules: packets to restricted addresses pass them one by one."""


def older_form(name: str, found: TableContents) -> SetForm | None:
    """Return the form of the earlier version of this set; None if there is none."""
    return found.sets.get(_OLDER.get(name, ""))


def copies(ruleset: Ruleset, wanted: Definition, found: TableContents, table: KernelTable) -> list[bytes]:
    """Return the messages that copy the elements of former sets into their successors. Raises ApplyError.

    Tables of versions before 2026-11-24 have other names of sets, and another key for clients of session affinity. The
    elements are copied in the transaction that writes the current rules, so endpoints keep their slots, and clients
    their endpoints.
    """
    transaction = Transaction(Packers(ruleset.layout), {})
    for name, older in _OLDER.items():
        if older in found.sets and name not in found.sets:
            for element in table.elements(older):
                transaction.add(name, element.key, element.data)
    copied = transaction.messages()
    made = {spec.name for spec in wanted.sets} - found.sets.keys()
    for name, form in found.sets.items():
        current = name.replace(_AFFINITY, CLIENTS, 1)
        if name.startswith(_AFFINITY) and current in made:
            clients = list(_clients(name, form, table))
            copied += element_messages(NEW_ELEMENT, ruleset.family, TABLE, current, clients)
    return copied


def _clients(name: str, form: SetForm, table: KernelTable) -> Iterator[bytes]:
    """Yield the clients of a slot under their current keys, which have a hash of the address instead of the address."""
    size = table.family.address_size
    for client in table.elements(name) if form.key_length == 2 * size else ():
        if client.expires > 0:
            key = client_number(client.key[:size]) + client.key[size:]
            yield timed_element(key, client.timeout, client.expires)


def spelled_out(ruleset: Ruleset, services: Iterable[Iterable[Placed]]) -> dict[str, ChainContents]:
    """Return the chain of source ranges by its name, with a rule for each range of these Services; {} for none.

    The kernel activates the elements of a set of ranges at the end of a commit, after the rules, and later for larger
    sets. Until then the rules would drop clients in the ranges. So the same transaction has a rule for each range, and
    the next one removes these rules. Source: nf_tables_commit in net/netfilter/nf_tables_api.c of Linux 6.18.
    """
    rules = tuple(islice(_rules(ruleset.layout.ip, services), _MOST))
    if not rules:
        return {}
    to_number, *others = ruleset.definition(()).chains[SOURCE_RANGES].rules
    return {SOURCE_RANGES: ChainContents(None, (to_number, *rules, *others))}


def ordinary(ruleset: Ruleset) -> list[bytes]:
    """Return the messages that write the chain of source ranges without temporary rules."""
    place, chain = (ruleset.family, TABLE), ruleset.definition(()).chains[SOURCE_RANGES]
    return [messages.rules_removal(*place, SOURCE_RANGES), *messages.rules(*place, {SOURCE_RANGES: chain})]


def _rules(ip: str, services: Iterable[Iterable[Placed]]) -> Iterator[x.Rule]:
    at_least, at_most = map(x.OPERATORS.index, (">=", "<="))
    for item in (item for placed in services for item in placed):
        number = unpack(list_number(item.ranges, item.plan.key.family))
        for first, last in item.allowed:
            text = f"{ip} daddr {number} {ip} saddr {unpack(first)} goto source-allowed"
            *before, equals, onwards = compiling.rule(text, ip)
            assert isinstance(equals, x.Compare)  # noqa: S101 - its key has the client's address
            yield (*before, x.Compare(equals.sreg, at_least, first), x.Compare(equals.sreg, at_most, last), onwards)
