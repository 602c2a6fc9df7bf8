"""Upgrade from tables of versions before 2026-11-24: renamed sets, and another key for clients of session affinity.

Their elements are copied in the transaction that writes the current rules, so endpoints keep their slots, and clients
their endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubeproxy.backends.nftables.layout import CLIENTS, POOL_MAPS, TABLE, VERDICT_MAPS
from kubeproxy.backends.nftables.packing import Packers, Transaction
from kubeproxy.backends.nftables.ruleset import Ruleset, client_number
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.kernel.nftables.elements import element_messages, timed_element
from kubeproxy.kernel.nftables.nfnetlink import NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import Definition, SetForm, TableContents

_OLDER: Final[dict[str, str]] = {name: name.replace("session", "affinity") for name in (*VERDICT_MAPS, *POOL_MAPS)}
_AFFINITY: Final = "affinity-"


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
    messages = transaction.messages()
    made = {spec.name for spec in wanted.sets} - found.sets.keys()
    for name, form in found.sets.items():
        current = name.replace(_AFFINITY, CLIENTS, 1)
        if name.startswith(_AFFINITY) and current in made:
            clients = list(_clients(name, form, table))
            messages += element_messages(NEW_ELEMENT, ruleset.family, TABLE, current, clients)
    return messages


def _clients(name: str, form: SetForm, table: KernelTable) -> Iterator[bytes]:
    """Yield the clients of a slot under the current key, which has a hash of the address instead of the address."""
    size = table.family.address_size
    for client in table.elements(name) if form.key_length == 2 * size else ():
        if client.expires > 0:
            key = client_number(client.key[:size]) + client.key[size:]
            yield timed_element(key, client.timeout, client.expires)
