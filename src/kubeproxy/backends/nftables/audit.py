"""Reads our table back from the kernel: at the start, after a failure, and when another program may have changed it.

Reads only, apart from a dormant scratch table that shows how nft lists what we would load.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kubeproxy.backends.nftables.layout import (
    NUMBER_MAPS,
    POOL_MAPS,
    SERVICE_CIDRS,
    TABLE,
    TRANSPORTS,
    ChainName,
    SetId,
    parse_chain_name,
    service_key,
    service_port_number,
    slot_bytes,
    slot_of_clients,
)
from kubeproxy.backends.nftables.numbering import Numbers, list_key
from kubeproxy.backends.nftables.older import copies, older_form
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.backends.state import Elements
from kubeproxy.kernel.nftables import messages, nfnetlink
from kubeproxy.kernel.nftables.elements import catch_all_element
from kubeproxy.kernel.nftables.shapes import ChainShape
from kubeproxy.kernel.nftables.tables import Definition, TableContents
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family, Range
from kubeproxy.model.plan import FrontendKind, Policy, Pool, ServicePlan

CONTRADICTIONS: Final = frozenset(
    {errno.EBUSY, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.EMLINK, errno.ENOENT, errno.EOPNOTSUPP}
)
"""Refusals of a repair that say that something in the table is in its way; others, as ENOBUFS, pass by themselves."""


class Signature(NamedTuple):
    """What changes when anybody touches a table, its chains or rules: their handles are never used again."""

    header: nfnetlink.TableHeader | None = None
    rules: tuple[int, ...] = ()
    chains: frozenset[tuple[str, ChainShape]] = frozenset()


def signature(table: KernelTable) -> Signature:
    """Return the signature of our table."""
    return Signature(table.header(), table.rule_handles(), frozenset(table.chains().items()))


Edges = frozenset[tuple[bytes, bool]]
"""Where ranges of addresses begin, and, with True, where they are over: the address behind the last one."""


def service_cidrs(table: KernelTable) -> Edges:
    """Return the edges of the ranges of service CIDRs."""
    found = frozenset([(element.key, element.ends) for element in table.elements(SERVICE_CIDRS)])
    return found - {(bytes(table.family.address_size), True)}  # nft says so that nothing is before the first one


def edges(ranges: Iterable[Range]) -> Edges:
    """Return the edges of disjoint ranges, as the kernel lists them."""
    found = set()
    for first, last in ranges:
        found.add((first, False))
        behind = int.from_bytes(last, "big") + 1
        if behind < 1 << 8 * len(last):
            found.add((behind.to_bytes(len(last), "big"), True))
    return frozenset(found)


def affinity_chains(table: KernelTable) -> set[ChainName]:
    """Return the chains of session affinity that the table has."""
    names = map(parse_chain_name, table.chains())
    return {name for name in names if name is not None}


def ranges_by_list(actual: Elements, family: Family) -> dict[bytes, list[bytes]]:
    """Return the allowed source ranges (whole keys) of each list, by its number as it is packed."""
    ranges: dict[bytes, list[bytes]] = {}
    for key in actual[SetId.FIREWALL_ALLOW]:
        ranges.setdefault(key[: family.address_size], []).append(key)
    return ranges


def wanted(ruleset: Ruleset, found: TableContents) -> Definition:
    """Return what a table should be. Chains of session affinity depend on what Services there once were, and so do the
    sets of clients, which stay when their chains go: it has those that are there.
    """
    chains = (name for name in map(parse_chain_name, found.chains) if name is not None)
    return ruleset.definition(chains, (slot for name in found.sets if (slot := slot_of_clients(name)) is not None))


def repairs(ruleset: Ruleset, found: TableContents, table: KernelTable) -> list[bytes] | None:
    """Return the messages that make chains, rules and sets what they should be, [] where they are, None where sets that
    have the elements of Services are others: then rules and elements have to change at once.
    """
    definition = wanted(ruleset, found)
    of_services = (spec for spec in definition.sets if spec.name in ruleset.layout.shapes)
    if any((found.sets.get(spec.name) or older_form(spec.name, found)) != spec.form for spec in of_services):
        return None
    changes = messages.changes(ruleset.family, TABLE, found, definition)
    return [*changes, *copies(ruleset, definition, found, table)] if changes else changes


def transports(table: KernelTable) -> bool:
    """Return whether the set of transports is as it should be: rules only act on what is in it."""
    return {element.key[0] for element in table.elements(TRANSPORTS)} == PROTOCOL_NAMES.keys()


def catch_alls(table: KernelTable) -> list[str]:
    """Return the sets with an element that matches what no other one does. None of ours has one."""
    return sorted(name for name in table.sets() if not name.startswith("__") and table.has_catch_all(name))


def catch_all_removals(table: KernelTable) -> list[bytes]:
    """Return the messages that remove such elements, which no reading by key shows."""
    place, element = (table.family, TABLE), [catch_all_element()]
    found = (nfnetlink.element_messages(nfnetlink.DELETE_ELEMENT, *place, name, element) for name in catch_alls(table))
    return [message for messages in found for message in messages]


def numbers(actual: Elements) -> Iterator[int]:
    """Yield the numbers that service ports and lists of source ranges have in the kernel."""
    for numbered in NUMBER_MAPS:
        yield from map(service_port_number, actual[numbered].values())
    # Ranges that another program left or made would open a list that got their number.
    for key in actual[SetId.FIREWALL_ALLOW]:
        yield service_port_number(key[: len(key) // 4])


def recall(plan: ServicePlan, actual: Elements, known: Numbers) -> Placed:
    """Return a plan with what the kernel has for it, endpoints in their slots: what a change of it starts from."""
    cluster: Pool = ()
    local: Pool = ()
    number = ranges = 0
    if actual:
        for frontend in plan.frontends:
            nodeport = not frontend.address
            key = service_key(frontend.key)
            ranges = ranges or _list_of(actual, key)
            first = _in_slots(actual[SetId.NODEPORT_ENDPOINTS if nodeport else SetId.ENDPOINTS], key)
            second = _in_slots(actual[SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS], key)
            # A cluster IP under internalTrafficPolicy Local picks from the local pool, in the map of the others; it did
            # so as well where nothing of that pool is left now.
            if frontend.kind is FrontendKind.CLUSTER and plan.policies.internal is Policy.LOCAL:
                local = local or first
            else:
                cluster = cluster or first
            local = local or second
            number = number or _number(actual, key)
    number = known.recall(plan.key, number) if plan.affinity else 0
    ranges = known.recall(list_key(plan.key), ranges) if plan.source_ranges is not None else 0
    return Placed(plan, cluster, local, number, ranges)


def _list_of(actual: Elements, frontend: bytes) -> int:
    packed = actual[SetId.FIREWALL_LISTS].get(frontend)
    return service_port_number(packed) if packed is not None else 0


def _number(actual: Elements, frontend: bytes) -> int:
    found = (actual[pools].get(frontend) for pools in POOL_MAPS)
    return next((service_port_number(packed) for packed in found if packed is not None), 0)


def _in_slots(entries: dict[bytes, bytes], key: bytes) -> Pool:
    pool: list[bytes] = []
    while (destination := entries.get(key + slot_bytes(len(pool) + 1)[len(pool)])) is not None:
        pool.append(destination[:-2])
    return tuple(pool)
