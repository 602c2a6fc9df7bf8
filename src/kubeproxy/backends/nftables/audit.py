"""Reads our table back from the kernel: at the start, after a failure, and when another program may have changed it.

Reads only, apart from a dormant scratch table that shows how nft lists what we would load.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from kubeproxy.backends.nftables.layout import (
    CLASSES,
    TABLE,
    ChainName,
    SetId,
    parse_chain_name,
    service_key,
    slot_bytes,
)
from kubeproxy.backends.nftables.render import Elements, Placed
from kubeproxy.backends.nftables.ruleset import Ruleset, pick_chain
from kubeproxy.errors import ApplyError
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.kernel.netlink import Netlink
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Pool, ServicePlan

Link = Netlink | None
"""The socket to read through; None means one of its own for each dump."""

READS: Final = 50
PAUSE: Final = 0.01  # seconds; resizing a table of 100,000 elements takes some 0.05


class Signature(NamedTuple):
    """What changes when anybody touches a table, its chains or rules: their handles are never used again."""

    table: nfnetlink.Table | None
    rules: tuple[int, ...]


def signature(family: Family, link: Link) -> Signature:
    """Return the signature of our table; (None, ()) when it is missing."""
    return Signature(nfnetlink.table(family, TABLE, link), nfnetlink.rule_handles(family, TABLE, link))


def service_cidrs(family: Family, link: Link) -> frozenset[bytes]:
    """Return where the ranges of service CIDRs begin and end."""
    return frozenset(e.key for e in nfnetlink.elements(family, TABLE, "service-cidrs", link))


def affinity_chains(family: Family, link: Link) -> set[ChainName]:
    """Return the chains of session affinity that the table has."""
    found = (parse_chain_name(name) for name in nfnetlink.chains(family, TABLE, link))
    return {name for name in found if name is not None}


def clones(family: Family, slots: Iterable[ChainName], link: Link) -> list[bytes]:
    """Return the messages that make slot chains, from rules that exist: nft 1.0.6 cannot add one to an existing map."""
    rules: dict[str, bytes] = {}
    for rule in nfnetlink.rules(family, TABLE, link):
        rules.setdefault(rule.chain, rule.raw)
    found = []
    for name in slots:
        template = rules[pick_chain(name.endpoint_map, CLASSES[0])]
        found.append(nfnetlink.chain_message(family, TABLE, str(name)))
        found.append(nfnetlink.numgen_rule_message(family, TABLE, str(name), template, 1, name.endpoints))
    return found


def elements(family: Family, names: Iterable[str], link: Link) -> Elements:
    """Return all elements of these sets. Raises ApplyError."""
    return {name: _elements_of(family, name, link) for name in names}


def _elements_of(family: Family, name: str, link: Link) -> dict[bytes, bytes]:
    """Return the elements of a set, read again while the kernel's hash table is being resized.

    Such a dump counts entries, not keys: it lists some twice and as many not at all (nft_rhash_walk of Linux 6.18).
    """
    for _ in range(READS):
        found = list(nfnetlink.elements(family, TABLE, name, link))
        entries = {e.key: e.data for e in found}
        if len(entries) == len(found):
            return entries
        time.sleep(PAUSE)
    raise ApplyError(f"the kernel does not list the elements of {name} completely")


def ranges_by_frontend(found: Elements, family: Family) -> dict[bytes, list[bytes]]:
    """Return the allowed source ranges (whole keys) of each frontend that is restricted."""
    ranges: dict[bytes, list[bytes]] = {}
    for key in found[SetId.FIREWALL_ALLOW]:
        ranges.setdefault(key[: len(key) // 2 - family.address_size], []).append(key)
    return ranges


def intact(ruleset: Ruleset, link: Link) -> bool:
    """Return whether the table's chains and rules are what we would load, by loading that beside it without effect.

    Chains that exist because some Service once had that many endpoints are taken as they are found.
    """
    scratch = ruleset.scratch()
    skeleton = scratch.skeleton(affinity_chains(ruleset.family, link))
    nft.run(f"add table {scratch.name}\ndelete table {scratch.name}\n{skeleton}")
    try:
        return _by_chain(ruleset.family, TABLE, link) == _by_chain(ruleset.family, scratch.table, link)
    finally:
        nft.run(f"delete table {scratch.name}\n")


def _by_chain(family: Family, table: str, link: Link) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {chain: [] for chain in nfnetlink.chains(family, table, link)}
    for rule in nfnetlink.rules(family, table, link):
        found[rule.chain].append(rule.expressions)
    return found


def recall(plan: ServicePlan, actual: Elements) -> Placed:
    """Return a plan with the endpoints that the kernel has for it, in their slots: what a change of it starts from."""
    cluster: Pool = ()
    local: Pool = ()
    if actual:
        for frontend in plan.frontends:
            nodeport = not frontend.address
            key = service_key(frontend.key)
            first = _in_slots(actual[SetId.NODEPORT_ENDPOINTS if nodeport else SetId.ENDPOINTS], key)
            second = _in_slots(actual[SetId.LOCAL_NODEPORT_ENDPOINTS if nodeport else SetId.LOCAL_ENDPOINTS], key)
            # A cluster IP under internalTrafficPolicy Local picks from the local pool, in the map of the others.
            if plan.traffic(frontend).node.picks_local:
                local = local or first
            else:
                cluster = cluster or first
            local = local or second
    return Placed(plan, cluster, local)


def _in_slots(entries: dict[bytes, bytes], key: bytes) -> Pool:
    found: list[bytes] = []
    while (destination := entries.get(key + slot_bytes(len(found) + 1)[len(found)])) is not None:
        found.append(destination[:-2])
    return tuple(found)
