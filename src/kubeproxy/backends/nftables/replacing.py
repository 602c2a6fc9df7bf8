"""Transitions between tables: elements of earlier versions, and temporary rules while a table is replaced.

Tables of versions before 2026-11-24 have other names of sets, and another key for clients of session affinity. Their
elements are copied in the transaction that writes the current rules, so endpoints keep their slots, and clients their
endpoints.

The kernel activates the elements of a set of ranges at the end of a commit, after the rules, and later for larger sets.
Until then the rules would drop clients in the ranges. So the same transaction has a rule for each range, and the next
one removes these rules. Source: nf_tables_commit in net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from kubeproxy.backends.nftables.layout import CLIENTS, POOL_MAPS, TABLE, VERDICT_MAPS, list_number
from kubeproxy.backends.nftables.packing import Packers, Transaction
from kubeproxy.backends.nftables.render import Placed
from kubeproxy.backends.nftables.ruleset import SOURCE_RANGES, Ruleset, client_number
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.kernel.nftables import compiling, messages
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.elements import element_messages, timed_element
from kubeproxy.kernel.nftables.nfnetlink import NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import ChainContents, Definition, SetForm, TableContents
from kubeproxy.model.addresses import unpack

_OLDER: Final[dict[str, str]] = {name: name.replace("session", "affinity") for name in (*VERDICT_MAPS, *POOL_MAPS)}
_AFFINITY: Final = "affinity-"
_MOST: Final = 2000
"""Maximum number of ranges that become rules: packets to restricted addresses pass them one by one."""


def older_form(name: str, found: TableContents) -> SetForm | None:
    """Return the form of the set that an earlier version had in place of this one; None if there is none."""
    return found.sets.get(_OLDER.get(name, ""))


def copies(ruleset: Ruleset, wanted: Definition, found: TableContents, table: KernelTable) -> list[bytes]:
    """Return the messages that copy the elements of former sets into their successors. Raises ApplyError."""
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
    """Yield the clients of a slot under the current key, which has a hash of the address instead of the address."""
    size = table.family.address_size
    for client in table.elements(name) if form.key_length == 2 * size else ():
        if client.expires > 0:
            key = client_number(client.key[:size]) + client.key[size:]
            yield timed_element(key, client.timeout, client.expires)


def spelled_out(ruleset: Ruleset, services: Iterable[Iterable[Placed]]) -> dict[str, ChainContents]:
    """Return the chain of source ranges by its name, with a rule for each range of these Services; {} for none."""
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
            assert isinstance(equals, x.Compare)  # noqa: S101 - with the client's address
            yield (*before, x.Compare(equals.sreg, at_least, first), x.Compare(equals.sreg, at_most, last), onwards)
