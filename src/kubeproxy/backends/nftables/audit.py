"""The found state of our table without the elements of Services: chains, rules, small sets. The module is used at the
start, after a failure, and when another program may have changed the table. The functions return messages, and write
nothing. The messages of the functions after `_OLDER` copy elements of earlier versions' tables, or write temporary
rules while a table of another program is replaced."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from kubeproxy.backends.nftables import layout
from kubeproxy.backends.nftables.affinity import client_number
from kubeproxy.backends.nftables.layout import SERVICE_CIDRS, TABLE, TRANSPORTS, ChainName, SetId
from kubeproxy.backends.nftables.packing import Packers, Transaction
from kubeproxy.backends.nftables.render import Numbers, Placed, own_frontend, sticky_pool
from kubeproxy.backends.nftables.ruleset import SOURCE_RANGES, Ruleset
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.errors import ChangedByOthersError
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import compiling, messages, nfnetlink
from kubeproxy.kernel.nftables.elements import catch_all_element, element_messages, plain_element, timed_element
from kubeproxy.kernel.nftables.nfnetlink import NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import ChainContents, Definition, SetForm, TableContents
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, Range, unpack
from kubeproxy.model.plan import FamilyGlobals

CONTRADICTIONS: Final = frozenset(
    {errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP}
)
"""Error codes of the kernel that mean that an object in the table blocks a repair. Other codes, such as ENOBUFS, are
temporary."""


@contextmanager
def attributed(table: str) -> Iterator[None]:
    """Raise ChangedByOthersError if the kernel refuses a change because an object is missing, or exists already."""
    try:
        yield
    except NetlinkError as error:
        if error.code not in {errno.ENOENT, errno.EEXIST}:
            raise
        raise ChangedByOthersError(f"another program changed table {table}: {error}") from error


NodeSets = dict[str, frozenset[Any]]
"""The state of the node's own sets: SERVICE_CIDRS contains edges of address ranges, other sets contain packed elements.
Edges are (first address, False) and (address after the last address, True)."""


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
    """Return the messages that add elements to an empty set of NodeSets."""
    if name == SERVICE_CIDRS:
        return messages.ranges(family, TABLE, name, elements)
    return element_messages(nfnetlink.NEW_ELEMENT, family, TABLE, name, [plain_element(key) for key in elements])


def refilled(family: Family, wanted: NodeSets) -> list[bytes]:
    """Return the messages that replace all elements of these sets of the node."""
    fills = ([messages.emptied(family, TABLE, name), *filling(family, name, wanted[name])] for name in wanted)
    return [message for fill in fills for message in fill]


def edges(ranges: Iterable[Range]) -> frozenset[tuple[bytes, bool]]:
    """Return the edges of disjoint ranges in the form in which the kernel lists them."""
    found = set()
    for first, last in ranges:
        found.add((first, False))
        behind = int.from_bytes(last, "big") + 1
        if behind < 1 << 8 * len(last):
            found.add((behind.to_bytes(len(last), "big"), True))
    return frozenset(found)


def affinity_chains(names: Iterable[str]) -> set[ChainName]:
    """Return the chains of session affinity and consistent hashing among these chains."""
    return {name for name in map(layout.parse_chain_name, names) if name is not None}


def wanted(ruleset: Ruleset, found: TableContents) -> Definition:
    """Return the desired table. The found chains for affinity timeouts and Maglev table sizes are part of the desired
    table, because only Services determine which of these chains are needed."""
    chains = affinity_chains(found.chains) | older_chains(found)
    return ruleset.definition(name for name in chains if ruleset.extra or not name.of_ranges)


def repairs(ruleset: Ruleset, found: TableContents, table: KernelTable) -> list[bytes] | None:
    """Return the messages that change chains, rules and sets to the desired state; [] if nothing differs. Returns None
    if a set with elements of Services has a wrong declaration, because the whole table must then be replaced."""
    definition = wanted(ruleset, found)
    of_services = [spec for spec in definition.sets if spec.name in ruleset.layout.sets]
    forms = {spec.name: found.sets.get(spec.name) or older_form(spec.name, found) for spec in of_services}
    # Tables of earlier versions lack the SESSION_SETS; tables without ranges of ports lack the sets of OF_RANGES.
    added = {*layout.SESSION_SETS, *layout.OF_RANGES}
    if any(forms[spec.name] != spec.form for spec in of_services if forms[spec.name] or spec.name not in added):
        return None
    changes = messages.changes(ruleset.family, TABLE, found, definition)
    return [*changes, *copies(ruleset, found, table)] if changes else changes


def catch_alls(table: KernelTable) -> list[str]:
    """Return the sets with a catch-all element, which this program never writes."""
    return sorted(name for name in table.sets() if not name.startswith("__") and table.has_catch_all(name))


def catch_all_removals(table: KernelTable) -> list[bytes]:
    """Return the messages that remove catch-all elements, which lookups by key do not return."""
    place, element = (table.family, TABLE), [catch_all_element()]
    found = (element_messages(nfnetlink.DELETE_ELEMENT, *place, name, element) for name in catch_alls(table))
    return [message for messages in found for message in messages]


_OLDER: Final[dict[str, tuple[str, ...]]] = {
    SetId.AFFINITY_SERVICES: ("session-services", "affinity-services"),
    SetId.LOCAL_AFFINITY_SERVICES: ("local-session-services", "local-affinity-services"),
    SetId.AFFINITY_NODEPORTS: ("session-nodeports", "affinity-nodeports"),
    SetId.LOCAL_AFFINITY_NODEPORTS: ("local-session-nodeports", "local-affinity-nodeports"),
    **{name: (name, name.replace("session", "affinity")) for name in layout.POOL_MAPS},
}
"""Names of sets in earlier versions, by their present name."""
_OLDER_CHAIN: Final = re.compile(
    r"((?:nodeport-)?(?:cluster|external|policy-local|local-pick|pick))-([0-9]{1,5})-([0-9]+s)"
)
_OLDER_CLIENTS: Final = re.compile(r"(?:clients|affinity)-([0-9]{1,5})")
_MOST: Final = 2000
"""Maximum number of source ranges for which temporary rules are written; a packet to a restricted address passes these
rules in sequence."""


def older_form(name: str, found: TableContents) -> SetForm | None:
    """Return the declaration of a set in an earlier version; None if the table has no such set."""
    return next((found.sets[each] for each in _OLDER.get(name, ()) if each in found.sets), None)


def older_chains(found: TableContents) -> set[ChainName]:
    """Return the chains that replace found chains of an earlier version, which had a chain for each timeout and number
    of endpoints."""
    matches = filter(None, map(_OLDER_CHAIN.fullmatch, found.chains))
    return {name for match in matches if (name := layout.parse_chain_name(f"{match[1]}-{match[3]}")) is not None}


def copies(ruleset: Ruleset, found: TableContents, table: KernelTable) -> list[bytes]:
    """Return the messages that copy the elements of former sets into their successors. Raises ApplyError. Tables of
    versions before 2026-11-26 have a chain of session affinity for each number of endpoints and timeout, and a set of
    clients for each slot; tables of versions before 2026-11-24 have other names of sets, and another key for clients.
    The elements are copied in the transaction that writes the current rules, so clients keep their endpoints."""
    if SetId.AFFINITY_SERVICES in found.sets or older_form(SetId.AFFINITY_SERVICES, found) is None:
        return []
    transaction = Transaction(Packers(ruleset.family), {})
    pools: dict[bytes, dict[bytes, bytes]] = {}  # key: a pool's number; value: the number of each endpoint
    slots_of: dict[bytes, list[bytes]] = {}  # key: a pool's number; value: the endpoint number in each slot
    known = Numbers()
    for endpoint_map, chain_map, pool_map in zip(
        layout.ENDPOINT_MAPS, layout.VERDICT_MAPS, layout.POOL_MAPS, strict=True
    ):
        pool_of = _older(pool_map, found, table)
        if pool_map not in found.sets:
            for frontend, data in pool_of.items():
                transaction.add(pool_map, frontend, data)
        for frontend, chain in _older(chain_map, found, table).items():
            match = _OLDER_CHAIN.fullmatch(chain.decode(errors="replace"))
            transaction.add(chain_map, frontend, f"{match[1]}-{match[3]}".encode() if match else chain)
            number = pool_of.get(frontend)
            if match is None or number is None:
                continue
            if number not in pools:
                slots = layout.slot_keys(frontend, int(match[2]))
                there = table.lookup(endpoint_map, slots)
                members = tuple([there[slot][:-2] for slot in slots if slot in there])
                pools[number] = known.endpoints(members, {}, ruleset.family)
                slots_of[number] = [pools[number][each] for each in members]
                sticky_pool(number, members, pools[number], frontend[-8], transaction)
            for own in own_frontend(pools[number], frontend):
                transaction.add(SetId.SESSION_OWN, own, b"")
    return [*transaction.messages(), *_clients(slots_of, found, table)]


def _older(name: str, found: TableContents, table: KernelTable) -> dict[bytes, bytes]:
    older = next((each for each in _OLDER[name] if each in found.sets), None)
    return {each.key: each.data for each in table.elements(older)} if older is not None else {}


def _clients(pools: Mapping[bytes, Sequence[bytes]], found: TableContents, table: KernelTable) -> list[bytes]:
    """Return the messages that add the clients of former sets to the map of clients. Each slot had a set of clients; if
    a client is in several sets, the set of the lowest slot is used."""
    sets = {int(match[1]): match[0] for match in map(_OLDER_CLIENTS.fullmatch, found.sets) if match}
    size, added = table.family.address_size, {}
    for slot, name in sorted(sets.items()):
        addresses = name.startswith("affinity")
        for client in table.elements(name):
            who, pool = client.key[:-size], client.key[-size:]
            key = (client_number(who) if addresses else who) + pool
            if client.expires > 0 and slot < len(pools.get(pool, ())) and key not in added:
                added[key] = timed_element(key, client.timeout, client.expires, pools[pool][slot])
    return element_messages(NEW_ELEMENT, table.family, TABLE, layout.CLIENTS, list(added.values()))


def spelled_out(ruleset: Ruleset, services: Iterable[Iterable[Placed]]) -> dict[str, ChainContents]:
    """Return the chain of source ranges, keyed by name, with a rule for each range of these Services; {} if there are
    no ranges.

    At the end of a commit the kernel activates rules first, and then the elements of a set of ranges; a larger set
    takes longer. In between, the rules would drop admitted clients. The same transaction therefore adds a rule for each
    range, and the next transaction removes these rules. Source: nf_tables_commit in net/netfilter/nf_tables_api.c of
    Linux 6.18."""
    ip = ruleset.layout.ip
    texts = (
        f"{ip} daddr {unpack(layout.list_number(item.ranges, ruleset.family))}"
        f" {ip} saddr >= {unpack(first)} {ip} saddr <= {unpack(last)} goto source-allowed"
        for placed in services
        for item in placed
        for first, last in item.allowed
    )
    rules = [compiling.rule(text, ip) for text in islice(texts, _MOST)]
    if not rules:
        return {}
    to_number, *others = ruleset.definition(()).chains[SOURCE_RANGES].rules
    return {SOURCE_RANGES: ChainContents(None, (to_number, *rules, *others))}


def ordinary(ruleset: Ruleset) -> list[bytes]:
    """Return the messages that write the chain of source ranges without temporary rules."""
    place, chain = (ruleset.family, TABLE), ruleset.definition(()).chains[SOURCE_RANGES]
    return [messages.rules_removal(*place, SOURCE_RANGES), *messages.rules(*place, {SOURCE_RANGES: chain})]
