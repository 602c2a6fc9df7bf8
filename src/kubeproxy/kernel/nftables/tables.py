"""A table of nf_tables as a value: its sets, named counters, flowtables, and chains with their rules. And reading it.

Sources: nf_tables_fill_chain_info, nf_tables_fill_set in net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.kernel.netlink.protocol import Netlink, attributes, messages, understood
from kubeproxy.kernel.nftables import chains, counters, expressions, flowtables, nfnetlink, nfta
from kubeproxy.kernel.nftables.fields import FIELDS, VERDICTS, Field, padded
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_SET, SUBSYSTEM, text_attribute

ANONYMOUS, CONSTANT, INTERVAL, MAP, TIMEOUT, DYNAMIC, CONCATENATION, COUNTED = 1, 2, 4, 8, 16, 32, 128, 256
"""Flags of sets (NFT_SET_...); COUNTED: each element counts packets (NFT_SET_EXPR)."""
VERDICT: Final = ("verdict",)
"""The data of a map to verdicts."""

_BITS: Final = 6  # of each type in that of a concatenation


class SetForm(NamedTuple):
    """What the kernel knows of a set: flags; types and lengths (bytes) of keys and data; size, timeout in ms (0: none).

    `lengths` are those of a key's fields where ranges are kept of several fields.
    """

    flags: int
    key_type: int
    key_length: int
    data_type: int = 0
    data_length: int = 0
    size: int = 0
    timeout: int = 0
    lengths: tuple[int, ...] = ()


class SetSpec(NamedTuple):
    """A set or map as it is declared: of what keys and data consist (names of fields.FIELDS, or VERDICT), and more as
    SetForm has it. MAP and CONCATENATION among the flags follow from that. `merges`: nft joins ranges that touch.
    """

    name: str
    key: tuple[str, ...]
    data: tuple[str, ...] = ()
    flags: int = 0
    size: int = 0
    timeout: int = 0
    merges: bool = False

    @property
    def keyword(self) -> str:
        """Return 'map' or 'set'."""
        return "map" if self.data else "set"

    @property
    def form(self) -> SetForm:
        """Return what the kernel knows of it."""
        key, key_length = _layout(self.key)
        flags, data, data_length = self.flags, 0, 0
        lengths: tuple[int, ...] = ()
        if self.data == VERDICT:
            flags, data = flags | MAP, VERDICTS
        elif self.data:
            flags, (data, data_length) = flags | MAP, _layout(self.data)
        if flags & INTERVAL and len(self.key) > 1:
            flags, lengths = flags | CONCATENATION, tuple(field.size for field in fields(self.key))
        return SetForm(flags, key, key_length, data, data_length, self.size, self.timeout, lengths)


def fields(names: tuple[str, ...]) -> list[Field]:
    """Return the fields of these names."""
    return [FIELDS[name] for name in names]


def _layout(names: tuple[str, ...]) -> tuple[int, int]:
    """Return the type and the length in bytes of a concatenation, or of a single field."""
    kind = 0
    for field in fields(names):
        kind = kind << _BITS | field.type
    sizes = [field.size for field in fields(names)]
    return kind, sizes[0] if len(sizes) == 1 else sum(map(padded, sizes))


class Hook(NamedTuple):
    """Where a base chain hangs: its type ('filter', 'nat'), the number of its hook, its priority, and its policy."""

    kind: str
    number: int
    priority: int
    drops: bool = False


class Chain(NamedTuple):
    """A chain: its hook, None for one that is jumped to; its rules, with the sets that belong to them (Inline)."""

    hook: Hook | None
    rules: tuple[expressions.Rule, ...]


class Definition(NamedTuple):
    """All that is made of a table but the elements of its named sets."""

    sets: tuple[SetSpec, ...]
    chains: Mapping[str, Chain]
    counters: tuple[str, ...] = ()
    flowtables: tuple[str, ...] = ()

    @property
    def contents(self) -> TableContents:
        """Return what the kernel has of a table that is made so."""
        sets = {spec.name: spec.form for spec in self.sets}
        return TableContents(sets, self.chains, frozenset(self.counters), frozenset(self.flowtables))


class TableContents(Struct, frozen=True):
    """All of a table but the elements of its named sets, and the interfaces of its flowtables."""

    sets: Mapping[str, SetForm]
    chains: Mapping[str, Chain]
    counters: frozenset[str] = frozenset()
    flowtables: frozenset[str] = frozenset()


# -- reading -----------------------------------------------------------------------------------------------------------


@understood("a table of nf_tables")
def read(family: int, table: str, link: Netlink) -> TableContents:
    """Return what there is of a table; nothing at all of one that is missing. Raises ApplyError."""
    sets = read_sets(family, table, link)
    hooks = read_hooks(family, table, link)
    rules: dict[str, list[expressions.Rule]] = {name: [] for name in hooks}
    for rule in nfnetlink.rules(family, table, link):
        whole = tuple([_whole(each, family, table, sets, link) for each in expressions.parse(rule.raw)])
        rules.setdefault(rule.chain, []).append(whole)
    named = {name: form for name, form in sets.items() if not form.flags & ANONYMOUS}
    found = {name: Chain(hooks.get(name), tuple(its)) for name, its in rules.items()}
    others = frozenset(counters.packets(family, table, link)), flowtables.names(family, table, link)
    return TableContents(named, found, *others)


@understood("rules of nf_tables")
def chain_rules(family: int, table: str, chain: str, link: Netlink) -> dict[int, expressions.Rule]:
    """Return the rules of one chain of any program, by handle. Raises NetlinkError."""
    sets = read_sets(family, table, link)
    return {
        rule.handle: tuple([_whole(each, family, table, sets, link) for each in expressions.parse(rule.raw)])
        for rule in nfnetlink.rules(family, table, link, chain)
    }


def read_hooks(family: int, table: str, link: Netlink) -> dict[str, Hook | None]:
    """Return the hooks of a table's chains by name, None for a chain that is jumped to. Raises NetlinkError."""
    return {
        one.name: Hook(one.kind, one.base.hook, one.base.priority, one.drops) if one.base is not None else None
        for one in chains.chains(link, family)
        if one.table == table
    }


def read_sets(family: int, table: str, link: Netlink) -> dict[str, SetForm]:
    """Return a table's sets and maps by name, those of its rules (ANONYMOUS) among them. Raises NetlinkError."""
    request = GENERIC.pack(family, 0, 0) + text_attribute(nfta.SET_TABLE, table)
    found = {}
    with understood("sets of nf_tables"):
        for data in link.dump_all(GET_SET, request, "nf_tables sets"):
            for at in messages(data):
                if at.kind >> 8 == SUBSYSTEM:
                    parts = {kind: data[s:e] for kind, s, e in attributes(data, at.start + GENERIC.size, at.end)}
                    found[parts[nfta.SET_NAME].rstrip(b"\0").decode(errors=nfta.NOT_TEXT)] = _form(parts)
    return found


def _form(parts: Mapping[int, bytes]) -> SetForm:
    def number(kind: int) -> int:
        return int.from_bytes(parts.get(kind, b""), "big")

    described = parts.get(nfta.SET_DESC, b"")
    desc = {kind: described[s:e] for kind, s, e in attributes(described, 0, len(described))}
    data = number(nfta.SET_DATA_TYPE)
    return SetForm(
        flags=number(nfta.SET_FLAGS) | (COUNTED if nfta.SET_EXPR in parts else 0),
        key_type=number(nfta.SET_KEY_TYPE),
        key_length=number(nfta.SET_KEY_LENGTH),
        data_type=data,
        data_length=0 if data == VERDICTS else number(nfta.SET_DATA_LENGTH),
        size=int.from_bytes(desc.get(nfta.SET_DESC_SIZE, b""), "big"),
        timeout=number(nfta.SET_TIMEOUT),
        lengths=tuple(_lengths(desc.get(nfta.SET_DESC_CONCAT, b""))),
    )


def _lengths(data: bytes) -> Iterator[int]:
    for _, start, end in attributes(data, 0, len(data)):
        for kind, first, last in attributes(data, start, end):
            if kind == nfta.SET_FIELD_LENGTH:
                yield int.from_bytes(data[first:last], "big")


def _whole(
    expression: expressions.Expression, family: int, table: str, sets: Mapping[str, SetForm], link: Netlink
) -> expressions.Expression:
    """Return an expression with what is in a set that belongs to its rule."""
    if not isinstance(expression, expressions.Lookup) or not isinstance(expression.set, str):
        return expression
    form = sets.get(expression.set)
    if form is None or not form.flags & ANONYMOUS:
        return expression
    elements = frozenset(_elements(family, table, expression.set, link))
    return replace(expression, set=expressions.Inline(form.key_type, form.key_length, form.data_type, elements))


def _elements(
    family: int, table: str, name: str, link: Netlink
) -> Iterator[tuple[bytes, bytes | expressions.RuleVerdict]]:
    """Yield keys, in whole registers, and data of a set's elements."""
    for data, first, last in nfnetlink.element_lists(family, table, name, link):
        for _, start, end in attributes(data, first, last):
            parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
            key = expressions.parse_value(parts.get(nfta.SET_ELEM_KEY, b""))  # none of one that matches all the rest
            assert isinstance(key, bytes)  # noqa: S101 - no key is a verdict
            yield key.ljust(padded(len(key)), b"\0"), expressions.parse_value(parts.get(nfta.SET_ELEM_DATA, b""))
