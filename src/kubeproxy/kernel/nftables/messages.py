"""Messages that make tables, chains, rules and sets of nf_tables, of values; without sequence numbers.

A set notes what its keys are made of in user data, in nft's own form, so that nft lists it as it was declared. Sources:
src/mnl.c and include/netlink.h of nft 1.0.6, include/udata.h of libnftnl 1.2.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Final

from kubeproxy.kernel.netlink.protocol import HEADER, NLM_F_CREATE, NLM_F_REQUEST, attribute, nested
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.fields import FIELDS, INTEGER, MARK, PROTOCOL
from kubeproxy.kernel.nftables.flowtables import flowtable_message, flowtable_removal
from kubeproxy.kernel.nftables.nfnetlink import (
    DELETE_ELEMENT,
    DELETE_OBJECT,
    DELETE_SET,
    GENERIC,
    NEW_CHAIN,
    NEW_ELEMENT,
    NEW_OBJECT,
    NEW_SET,
    NEW_TABLE,
    chain_removal,
    element_messages,
    in_set,
    rule_message,
    rules_removal,
    text_attribute,
)
from kubeproxy.kernel.nftables.tables import (
    ANONYMOUS,
    CONSTANT,
    COUNTED,
    MAP,
    VERDICT,
    Chain,
    Definition,
    Hook,
    SetForm,
    SetSpec,
    TableContents,
    fields,
)

_NUMBERS: Final = count(1)
_HOST_ENDIAN, _BIG_ENDIAN = 1, 2  # enum byteorder of nft
_VERDICT_EXPRESSION, _CONCATENATED = 1, 13  # EXPR_... of nft
_COUNTER: Final = 1  # NFT_OBJECT_COUNTER
_INTERVAL_END: Final = 1  # NFT_SET_ELEM_INTERVAL_END


# -- tables ------------------------------------------------------------------------------------------------------------


def table_message(family: int, table: str, comment: str = "", flags: int = 0) -> bytes:
    """Return the message that makes a table; of one that is there it changes nothing."""
    payload = text_attribute(nfta.TABLE_NAME, table)
    if comment:
        payload += attribute(nfta.TABLE_USERDATA, _note(0, comment.encode() + b"\0"))
    if flags:
        payload += _number(nfta.TABLE_FLAGS, flags)
    return _message(NEW_TABLE, family, payload)


def counter_message(family: int, table: str, name: str, kind: int = NEW_OBJECT) -> bytes:
    """Return the message that makes a named counter, or, with DELETE_OBJECT, removes one."""
    names = text_attribute(nfta.OBJ_TABLE, table) + text_attribute(nfta.OBJ_NAME, name)
    data = _number(nfta.OBJ_TYPE, _COUNTER) + (nested(nfta.OBJ_DATA) if kind == NEW_OBJECT else b"")
    return _message(kind, family, names + data, NLM_F_REQUEST | (NLM_F_CREATE if kind == NEW_OBJECT else 0))


def chain_message(family: int, table: str, name: str, hook: Hook | None = None) -> bytes:
    """Return the message that makes a chain."""
    payload = text_attribute(nfta.CHAIN_TABLE, table) + text_attribute(nfta.CHAIN_NAME, name)
    if hook is not None:
        priority = attribute(nfta.HOOK_PRIORITY, hook.priority.to_bytes(4, "big", signed=True))
        payload += nested(nfta.CHAIN_HOOK, _number(nfta.HOOK_NUMBER, hook.number), priority)
        payload += _number(nfta.CHAIN_POLICY, not hook.drops) + text_attribute(nfta.CHAIN_TYPE, hook.kind)
    return _message(NEW_CHAIN, family, payload)


def objects(family: int, table: str, made: Definition) -> list[bytes]:
    """Return the messages that make sets, counters, flowtables and chains, without rules, in a table that is there."""
    found = [made_set(family, table, spec) for spec in made.sets]
    found += [counter_message(family, table, name) for name in made.counters]
    found += [flowtable_message(family, table, name, ()) for name in made.flowtables]
    return [*found, *(chain_message(family, table, name, chain.hook) for name, chain in made.chains.items())]


def rules(family: int, table: str, chains: Mapping[str, Chain]) -> list[bytes]:
    """Return the messages that append the rules of chains which are there."""
    found: list[bytes] = []
    for name, chain in chains.items():
        for rule in chain.rules:
            found += appended(family, table, name, rule)
    return found


def changes(family: int, table: str, found: TableContents, wanted: Definition) -> list[bytes]:
    """Return the messages that make of a table what is wanted, [] where it is that; what is alike stays as it is.

    The kernel refuses them (EBUSY) where an element of a map that stays leads to a chain that goes.
    """
    ours = wanted.contents
    sets = {name for name, form in found.sets.items() if ours.sets.get(name) != form}
    other = {name: chain for name, chain in found.chains.items() if chain != ours.chains.get(name)}
    chains = {name for name, chain in other.items() if name not in ours.chains or chain.hook != ours.chains[name].hook}
    written = other.keys() | {name for name, chain in found.chains.items() if _uses(chain, sets | chains)}
    removed = [rules_removal(family, table, name) for name in written]
    removed += [set_removal(family, table, name) for name in sets]
    removed += [chain_removal(family, table, name) for name in chains]
    removed += [counter_message(family, table, name, DELETE_OBJECT) for name in found.counters - ours.counters]
    removed += [flowtable_removal(family, table, name) for name in found.flowtables - ours.flowtables]
    missing = wanted._replace(
        sets=tuple([spec for spec in wanted.sets if spec.name in sets or spec.name not in found.sets]),
        chains={name: each for name, each in wanted.chains.items() if name in chains or name not in found.chains},
        counters=tuple([name for name in wanted.counters if name not in found.counters]),
        flowtables=tuple([name for name in wanted.flowtables if name not in found.flowtables]),
    )
    written |= missing.chains.keys()
    texts = {name: chain for name, chain in wanted.chains.items() if name in written}
    return [*removed, *objects(family, table, missing), *rules(family, table, texts)]


def _uses(chain: Chain, names: AbstractSet[str]) -> bool:
    """Return whether a rule of a chain refers to one of these sets, or leads to one of these chains."""
    return any(x.names_of(rule) & names for rule in chain.rules) if names else False


def _message(kind: int, family: int, payload: bytes, flags: int = NLM_F_REQUEST | NLM_F_CREATE) -> bytes:
    body = GENERIC.pack(family, 0, 0) + payload
    return HEADER.pack(HEADER.size + len(body), kind, flags, 0, 0) + body


# -- sets --------------------------------------------------------------------------------------------------------------


def made_set(family: int, table: str, spec: SetSpec) -> bytes:
    """Return the message that makes a set."""
    notes = _note(0, _order(spec.key).to_bytes(4, "little"))
    if spec.data:
        notes += _note(1, _order(spec.data).to_bytes(4, "little"))
    if spec.merges:
        notes += _note(2, (1).to_bytes(4, "little"))
    notes += _note(3, _typeof(spec.key))
    if spec.data:
        notes += _note(4, _typeof(spec.data)) + _note(6, bytes(4))
    return _set(family, table, spec.name, spec.form, notes)


def _set(family: int, table: str, name: str, form: SetForm, notes: bytes, number: int = 0) -> bytes:
    parts = [text_attribute(nfta.SET_TABLE, table), text_attribute(nfta.SET_NAME, name)]
    parts.append(_number(nfta.SET_ID, number or _next_number()))
    parts.append(_number(nfta.SET_FLAGS, form.flags & ~COUNTED))
    parts += (_number(nfta.SET_KEY_TYPE, form.key_type), _number(nfta.SET_KEY_LENGTH, form.key_length))
    if form.flags & MAP:
        parts += (_number(nfta.SET_DATA_TYPE, form.data_type), _number(nfta.SET_DATA_LENGTH, form.data_length))
    described = _number(nfta.SET_DESC_SIZE, form.size) if form.size else b""
    if form.lengths:
        lengths = (nested(nfta.LIST_ELEM, _number(nfta.SET_FIELD_LENGTH, each)) for each in form.lengths)
        described += nested(nfta.SET_DESC_CONCAT, *lengths)
    if described:
        parts.append(nested(nfta.SET_DESC, described))
    if form.timeout:
        parts.append(attribute(nfta.SET_TIMEOUT, form.timeout.to_bytes(8, "big")))
    if form.flags & COUNTED:
        parts.append(nested(nfta.SET_EXPR, attribute(nfta.EXPR_NAME, b"counter\0"), nested(nfta.EXPR_DATA)))
    parts.append(attribute(nfta.SET_USERDATA, notes))
    return _message(NEW_SET, family, b"".join(parts))


def set_removal(family: int, table: str, name: str) -> bytes:
    """Return the message that removes a set, to which no rule refers any more, with its elements."""
    payload = text_attribute(nfta.SET_TABLE, table) + text_attribute(nfta.SET_NAME, name)
    return _message(DELETE_SET, family, payload, NLM_F_REQUEST)


def emptied(family: int, table: str, name: str) -> bytes:
    """Return the message that removes all elements of a set."""
    where = in_set(family, table, name)
    return HEADER.pack(HEADER.size + len(where), DELETE_ELEMENT, NLM_F_REQUEST, 0, 0) + where


def ranges(family: int, table: str, name: str, edges: Iterable[tuple[bytes, bool]]) -> list[bytes]:
    """Return the messages that fill a set of ranges of one field: where each begins, and, with True, the value behind
    its last one.
    """
    elements = []
    for key, ends in sorted(edges):
        flags = _number(nfta.SET_ELEM_FLAGS, _INTERVAL_END) if ends else b""
        elements.append(nested(nfta.LIST_ELEM, nested(nfta.SET_ELEM_KEY, x.pack_value(key)), flags))
    return element_messages(NEW_ELEMENT, family, table, name, elements)


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, value.to_bytes(4, "big"))


def _next_number() -> int:
    return next(_NUMBERS) & 0x7FFFFFFF


def _order(names: tuple[str, ...]) -> int:
    if len(names) > 1 or names == VERDICT:
        return 0
    return _order_of(FIELDS[names[0]].type)


def _order_of(kind: int) -> int:
    return _HOST_ENDIAN if kind in {INTEGER, MARK, PROTOCOL} else _BIG_ENDIAN


def _note(kind: int, value: bytes) -> bytes:
    """Return an entry of user data: type, length, value."""
    return bytes((kind, len(value))) + value


def _typeof(names: tuple[str, ...]) -> bytes:
    if names == VERDICT:
        return _expression(_VERDICT_EXPRESSION, ())
    found = fields(names)
    if len(found) == 1:
        return _expression(*found[0].typeof)
    inner = b"".join(_note(at, _expression(*field.typeof)) for at, field in enumerate(found))
    return _note(0, _CONCATENATED.to_bytes(4, "little")) + _note(1, inner)


def _expression(kind: int, attributes: Sequence[int]) -> bytes:
    values = b"".join(_note(at, value.to_bytes(4, "little")) for at, value in enumerate(attributes))
    return _note(0, kind.to_bytes(4, "little")) + _note(1, values)


# -- rules -------------------------------------------------------------------------------------------------------------


def appended(family: int, table: str, chain: str, rule: x.Rule) -> Iterator[bytes]:
    """Yield the messages that append a rule, with the sets that belong to it."""
    packed = []
    for expression in rule:
        if isinstance(expression, x.Lookup) and isinstance(expression.set, x.Inline):
            number = _next_number()
            name = "__map%d" if expression.set.data_type else "__set%d"
            yield from _inline(family, table, name, number, expression.set)
            packed.append(x.pack_lookup(expression, name, number))
        else:
            packed.append(x.pack(expression))
    yield rule_message(family, table, chain, b"".join(packed))


def _inline(family: int, table: str, name: str, number: int, inline: x.Inline) -> Iterator[bytes]:
    flags = ANONYMOUS | CONSTANT | (MAP if inline.data_type else 0)
    form = SetForm(flags, inline.key_type, inline.key_length, inline.data_type, size=len(inline.elements))
    notes = _note(0, _order_of(inline.key_type).to_bytes(4, "little"))
    yield _set(family, table, name, form, notes, number)
    elements = [_element(key[: inline.key_length], data) for key, data in sorted(inline.elements)]
    yield from element_messages(NEW_ELEMENT, family, table, name, elements, set_id=number)


def _element(key: bytes, data: bytes | x.RuleVerdict) -> bytes:
    value = nested(nfta.SET_ELEM_DATA, x.pack_value(data)) if data else b""
    return nested(nfta.LIST_ELEM, nested(nfta.SET_ELEM_KEY, x.pack_value(key)), value)
