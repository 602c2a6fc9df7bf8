"""Packs messages that create, change and remove nf_tables tables, chains, rules, sets, counters and flowtables.
`nfnetlink.Transactions` commits the messages. A set's user data describes the set's keys in nft's format, so that nft
lists the set as it was declared. Sources: src/mnl.c and include/netlink.h of nft 1.0.6, include/udata.h of libnftnl
1.2.4, nf_tables_parse_netdev_hooks of Linux 6.18."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from msgspec.structs import replace

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfnetlink, nfta, tables
from kubeproxy.kernel.nftables.elements import element_messages, plain_element
from kubeproxy.kernel.nftables.fields import FIELDS, INTEGER, MARK, PROTOCOL
from kubeproxy.kernel.nftables.nfnetlink import names, nft_message
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.proc.modules import kernel_version

_NUMBERS: Final = count(1)
_HOST_ENDIAN, _BIG_ENDIAN = 1, 2  # enum byteorder of nft
_VERDICT_EXPRESSION, _CONCATENATED = 1, 13  # EXPR_... of nft
_COUNTER: Final = 1  # NFT_OBJECT_COUNTER
_INTERVAL_END: Final = 1  # NFT_SET_ELEM_INTERVAL_END
MOST_DEVICES: Final = 256
"""The maximum number of interfaces in one message about a flowtable: NFT_NETDEVICE_MAX."""


# -- tables -------------------------------------------------------------------------------------------------------


def table_message(family: int, table: str, comment: str = "", flags: int = 0) -> bytes:
    """Return the message that creates a table. The message does not change an existing table of this name."""
    payload = nl.text_attribute(nfta.TABLE_NAME, table)
    if comment:
        payload += nl.attribute(nfta.TABLE_USERDATA, _note(0, comment.encode() + b"\0"))
    if flags:
        payload += nl.number_attribute(nfta.TABLE_FLAGS, flags)
    return nft_message(nfnetlink.NEW_TABLE, family, payload, nfnetlink.CREATE)


def table_removal(family: int, table: str) -> bytes:
    """Return the message that removes a table with all its contents."""
    return nft_message(nfnetlink.DELETE_TABLE, family, nl.text_attribute(nfta.TABLE_NAME, table))


def _counter(kind: int, family: int, table: str, name: str, data: bytes = b"") -> bytes:
    payload = names(table, name) + nl.number_attribute(nfta.OBJ_TYPE, _COUNTER) + data
    return nft_message(kind, family, payload, nfnetlink.CREATE if kind == nfnetlink.NEW_OBJECT else nl.NLM_F_REQUEST)


def flowtable_message(family: int, table: str, name: str, devices: Sequence[str]) -> bytes:
    """Return the message that creates a flowtable, or adds interfaces to an existing flowtable. An interface that is
    already in the flowtable is no error; the kernel refuses the message if an interface does not exist. The kernel
    removes a deleted interface from the flowtable."""
    named = b"".join(nl.text_attribute(nfta.HOOK_DEVICE, device) for device in devices)
    number, priority = nl.number_attribute(nfta.HOOK_NUMBER, 0), nl.number_attribute(nfta.HOOK_PRIORITY, 0)  # ingress
    hook = nl.nested(nfta.FLOWTABLE_HOOK, number, priority, nl.nested(nfta.HOOK_DEVICES, named) if devices else b"")
    return nft_message(nfnetlink.NEW_FLOWTABLE, family, names(table, name) + hook, nfnetlink.CREATE)


def chain_message(family: int, table: str, name: str, hook: tables.Hook | None = None) -> bytes:
    """Return the message that creates a chain."""
    payload = names(table, name, nfta.CHAIN_NAME)
    if hook is not None:
        priority = nl.attribute(nfta.HOOK_PRIORITY, hook.priority.to_bytes(4, "big", signed=True))
        payload += nl.nested(nfta.CHAIN_HOOK, nl.number_attribute(nfta.HOOK_NUMBER, hook.number), priority)
        payload += nl.number_attribute(nfta.CHAIN_POLICY, not hook.drops) + nl.text_attribute(
            nfta.CHAIN_TYPE, hook.kind
        )
    return nft_message(nfnetlink.NEW_CHAIN, family, payload, nfnetlink.CREATE)


def chain_removals(family: int, table: str, chains: Iterable[str]) -> list[bytes]:
    """Return the messages that remove chains with their rules; the chains may jump to each other."""
    removed = list(chains)
    rules = [rules_removal(family, table, chain) for chain in removed]
    return [*rules, *(_chain_removal(family, table, chain) for chain in removed)]


def _chain_removal(family: int, table: str, chain: str) -> bytes:
    return nft_message(nfnetlink.DELETE_CHAIN, family, names(table, chain, nfta.CHAIN_NAME))


def rules_removal(family: int, table: str, chain: str) -> bytes:
    """Return the message that removes all rules of a chain."""
    return nft_message(nfnetlink.DELETE_RULE, family, names(table, chain))


def objects(family: int, table: str, made: tables.Definition) -> list[bytes]:
    """Return the messages that create sets, counters, flowtables and chains (without rules) in an existing table."""
    found = [_made_set(family, table, spec) for spec in made.sets]
    found += [_counter(nfnetlink.NEW_OBJECT, family, table, name, nl.nested(nfta.OBJ_DATA)) for name in made.counters]
    found += [flowtable_message(family, table, name, ()) for name in made.flowtables]
    return [*found, *(chain_message(family, table, name, chain.hook) for name, chain in made.chains.items())]


def rules(family: int, table: str, chains: Mapping[str, tables.ChainContents]) -> list[bytes]:
    """Return the messages that append rules to existing chains."""
    found: list[bytes] = []
    for name, chain in chains.items():
        for rule in chain.rules:
            found += appended(family, table, name, rule)
    return found


def changes(family: int, table: str, found: tables.TableContents, wanted: tables.Definition) -> list[bytes]:
    """Return the messages that change a table's contents from `found` to `wanted`. Equal objects are not changed. The
    kernel refuses the messages (EBUSY) if a remaining map has a verdict that names a removed chain."""
    ours = wanted.contents
    sets = {name for name, form in found.sets.items() if ours.sets.get(name) != form}
    other = {name: chain for name, chain in found.chains.items() if chain != ours.chains.get(name)}
    chains = {name for name, chain in other.items() if name not in ours.chains or chain.hook != ours.chains[name].hook}
    gone = sets | chains
    used = {name for name, chain in found.chains.items() if gone and any(x.names_of(r) & gone for r in chain.rules)}
    written = other.keys() | used
    removed = [rules_removal(family, table, name) for name in written]
    removed += [nft_message(nfnetlink.DELETE_SET, family, names(table, name)) for name in sets]
    removed += [_chain_removal(family, table, name) for name in chains]
    removed += [_counter(nfnetlink.DELETE_OBJECT, family, table, name) for name in found.counters - ours.counters]
    flowtables = found.flowtables - ours.flowtables
    removed += [nft_message(nfnetlink.DELETE_FLOWTABLE, family, names(table, name)) for name in flowtables]
    missing = wanted._replace(
        sets=tuple([spec for spec in wanted.sets if spec.name in sets or spec.name not in found.sets]),
        chains={name: each for name, each in wanted.chains.items() if name in chains or name not in found.chains},
        counters=tuple([name for name in wanted.counters if name not in found.counters]),
        flowtables=tuple([name for name in wanted.flowtables if name not in found.flowtables]),
    )
    written |= missing.chains.keys()
    texts = {name: chain for name, chain in wanted.chains.items() if name in written}
    return [*removed, *objects(family, table, missing), *rules(family, table, texts)]


# -- sets ---------------------------------------------------------------------------------------------------------


def _made_set(family: int, table: str, spec: tables.SetSpec) -> bytes:
    notes = _note(0, _order(spec.key).to_bytes(4, "little"))
    if spec.data:
        notes += _note(1, _order(spec.data).to_bytes(4, "little"))
    if spec.merges:
        notes += _note(2, (1).to_bytes(4, "little"))
    notes += _note(3, _typeof(spec.key))
    if spec.data:
        notes += _note(4, _typeof(spec.data)) + _note(6, bytes(4))
    return _set(family, table, spec.name, spec.form, notes)


def _set(family: int, table: str, name: str, form: tables.SetForm, notes: bytes, number: int = 0) -> bytes:
    parts = [names(table, name)]
    parts.append(nl.number_attribute(nfta.SET_ID, number or _next_number()))
    parts.append(nl.number_attribute(nfta.SET_FLAGS, form.flags & ~tables.COUNTED))
    numbers = [(nfta.SET_KEY_TYPE, form.key_type), (nfta.SET_KEY_LENGTH, form.key_length)]
    if form.flags & tables.MAP:
        numbers += [(nfta.SET_DATA_TYPE, form.data_type), (nfta.SET_DATA_LENGTH, form.data_length)]
    parts += [nl.number_attribute(kind, value) for kind, value in numbers]
    described = nl.number_attribute(nfta.SET_DESC_SIZE, form.size) if form.size else b""
    if form.lengths:
        lengths = (nl.nested(nfta.LIST_ELEM, nl.number_attribute(nfta.SET_FIELD_LENGTH, each)) for each in form.lengths)
        described += nl.nested(nfta.SET_DESC_CONCAT, *lengths)
    if described:
        parts.append(nl.nested(nfta.SET_DESC, described))
    if form.timeout:
        parts.append(nl.number_attribute(nfta.SET_TIMEOUT, form.timeout, 8))
    if form.flags & tables.COUNTED:
        parts.append(nl.nested(nfta.SET_EXPR, nl.attribute(nfta.EXPR_NAME, b"counter\0"), nl.nested(nfta.EXPR_DATA)))
    parts.append(nl.attribute(nfta.SET_USERDATA, notes))
    return nft_message(nfnetlink.NEW_SET, family, b"".join(parts), nfnetlink.CREATE)


def emptied(family: int, table: str, name: str) -> bytes:
    """Return the message that removes all elements of a set."""
    return nft_message(nfnetlink.DELETE_ELEMENT, family, names(table, name))


def ranges(family: int, table: str, name: str, edges: Iterable[tuple[bytes, bool]]) -> list[bytes]:
    """Return the messages that fill a set of ranges. An edge is the first value of a range (False), or the value after
    the range (True)."""
    elements = []
    for key, ends in sorted(edges):
        flags = nl.number_attribute(nfta.SET_ELEM_FLAGS, _INTERVAL_END) if ends else b""
        elements.append(plain_element(key, b"", flags))
    return element_messages(nfnetlink.NEW_ELEMENT, family, table, name, elements)


def _next_number() -> int:
    return next(_NUMBERS) & 0x7FFFFFFF


def _order(names: tuple[str, ...]) -> int:
    if len(names) > 1 or names == tables.VERDICT:
        return 0
    return _order_of(FIELDS[names[0]].type)


def _order_of(kind: int) -> int:
    return _HOST_ENDIAN if kind in {INTEGER, MARK, PROTOCOL} else _BIG_ENDIAN


def _note(kind: int, value: bytes) -> bytes:
    """Return an entry of user data: type, length, value."""
    return bytes((kind, len(value))) + value


def _typeof(names: tuple[str, ...]) -> bytes:
    if names == tables.VERDICT:
        return _expression(_VERDICT_EXPRESSION, ())
    found = tables.fields(names)
    if len(found) == 1:
        return _expression(*found[0].typeof)
    inner = b"".join(_note(at, _expression(*field.typeof)) for at, field in enumerate(found))
    return _note(0, _CONCATENATED.to_bytes(4, "little")) + _note(1, inner)


def _expression(kind: int, attributes: Sequence[int]) -> bytes:
    values = b"".join(_note(at, value.to_bytes(4, "little")) for at, value in enumerate(attributes))
    return _note(0, kind.to_bytes(4, "little")) + _note(1, values)


# -- rules --------------------------------------------------------------------------------------------------------


def appended(family: int, table: str, chain: str, rule: x.Rule) -> Iterator[bytes]:
    """Yield the messages that append a rule, with its anonymous sets."""
    packed = []
    for expression in rule:
        if isinstance(expression, x.Lookup) and isinstance(expression.set, x.Inline):
            number = _next_number()
            name = "__map%d" if expression.set.data_type else "__set%d"
            yield from _inline(family, table, name, number, expression.set)
            expression = replace(expression, set=name, set_id=number)  # noqa: PLW2901
        packed.append(x.pack(expression))
    payload = names(table, chain) + nl.nested(nfta.RULE_EXPRESSIONS, *packed)
    yield nft_message(nfnetlink.NEW_RULE, family, payload, nfnetlink.CREATE | nfnetlink.NLM_F_APPEND)


def _inline(family: int, table: str, name: str, number: int, inline: x.Inline) -> Iterator[bytes]:
    flags = tables.ANONYMOUS | tables.CONSTANT | (tables.MAP if inline.data_type else 0)
    form = tables.SetForm(flags, inline.key_type, inline.key_length, inline.data_type, size=len(inline.elements))
    notes = _note(0, _order_of(inline.key_type).to_bytes(4, "little"))
    yield _set(family, table, name, form, notes, number)
    elements = [plain_element(key[: inline.key_length], data) for key, data in sorted(inline.elements)]
    yield from element_messages(nfnetlink.NEW_ELEMENT, family, table, name, elements, set_id=number)


_NO_NF_TABLES: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT})
"""Errnos of a kernel without nf_tables or nfnetlink."""


def require(mode: str, kernel: tuple[int, int], otherwise: str) -> None:
    """Raise Unsupported if nf_tables does not work, or if the kernel is too old (`otherwise` is the fix)."""
    release = os.uname().release
    if (0, 0) < kernel_version(release) < kernel:
        oldest = ".".join(map(str, kernel))
        raise Unsupported(f"{mode} mode needs Linux {oldest} or later, and this is {release}: {otherwise}")
    try:
        with TableReader(socket.AF_INET, "kube-proxy", nl.Netlink.open()) as table:
            table.header()
    except nl.NetlinkError as error:
        reason = str(error).replace(": ", ", ")  # in the message, the fix follows the first ": "
        raise Unsupported(
            f"nf_tables does not answer ({reason}): load the kernel module nf_tables (modprobe nf_tables), "
            "and give the process the capability CAP_NET_ADMIN"
        ) from error


def remove_table(name: str) -> list[str]:
    """Remove the table of this name from both families; return the errors. A missing table is no error."""
    failures = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with TableReader(family, name, nl.Netlink.open()) as table:
                if table.header() is None:
                    continue
        except ApplyError as error:
            if not isinstance(error, nl.NetlinkError) or error.code not in _NO_NF_TABLES:
                failures.append(f"cannot look for the table {name}: {error}")
            continue
        try:
            with nfnetlink.Transactions.open() as transactions:
                transactions.commit([table_removal(family, name)])
        except ApplyError as error:
            if not isinstance(error, nl.NetlinkError) or error.code != errno.ENOENT:  # another program removed it
                failures.append(f"cannot remove the table {name}: {error}")
    return failures
