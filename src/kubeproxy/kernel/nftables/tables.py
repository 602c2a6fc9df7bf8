"""A table of nf_tables as a value: sets, named counters, flowtables, chains with rules. Sources:
nf_tables_fill_chain_info, nf_tables_fill_set in net/netfilter/nf_tables_api.c of Linux 6.18."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import expressions, nfnetlink, nfta
from kubeproxy.kernel.nftables.fields import FIELDS, VERDICTS, Field, padded

HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")
INGRESS: Final = "ingress"
"""The hook of a device in family inet, before prerouting (NF_INET_INGRESS)."""
"""Names of hooks by number (enum nf_inet_hooks)."""
TABLE_FAMILIES: Final = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""Names of families by number (NFPROTO_... in linux/netfilter.h)."""
ANONYMOUS, CONSTANT, INTERVAL, MAP, TIMEOUT, DYNAMIC, CONCATENATION, COUNTED = 1, 2, 4, 8, 16, 32, 128, 256
"""Flags of sets (NFT_SET_...). COUNTED means that each element counts packets (NFT_SET_EXPR)."""
VERDICT: Final = ("verdict",)
"""The data type of a verdict map."""

_TYPE_BITS: Final = 6  # the number of bits of each field's type in a concatenation's type
_DROP: Final = 0  # NF_DROP


class SetForm(NamedTuple):
    """A set as the kernel describes it: flags, types and lengths (bytes) of keys and data, size, timeout in ms (0:
    none). If the set has ranges of several fields, `lengths` are the lengths of the key's fields."""

    flags: int
    key_type: int
    key_length: int
    data_type: int = 0
    data_length: int = 0
    size: int = 0
    timeout: int = 0
    lengths: tuple[int, ...] = ()


class SetSpec(NamedTuple):
    """A declared set or map. `key` and `data` are names in fields.FIELDS; `data` may be VERDICT. Other fields are as in
    SetForm. The flags MAP and CONCATENATION are derived from the fields. `merges`: nft merges adjacent ranges."""

    name: str
    key: tuple[str, ...]
    data: tuple[str, ...] = ()
    flags: int = 0
    size: int = 0
    timeout: int = 0
    merges: bool = False

    @property
    def keyword(self) -> str:
        """'map' or 'set'."""
        return "map" if self.data else "set"

    @property
    def form(self) -> SetForm:
        """The set in the form in which the kernel describes it."""
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
    kind = 0
    for field in fields(names):
        kind = kind << _TYPE_BITS | field.type
    sizes = [field.size for field in fields(names)]
    return kind, sizes[0] if len(sizes) == 1 else sum(map(padded, sizes))


class Hook(NamedTuple):
    """The hook of a base chain: the chain's type ('filter', 'nat'), the hook's number, the priority, and the policy."""

    kind: str
    number: int
    priority: int
    drops: bool = False


class ChainContents(NamedTuple):
    """A chain: its hook (None unless it is a base chain), and its rules with their anonymous sets (Inline)."""

    hook: Hook | None
    rules: tuple[expressions.Rule, ...]


class Definition(NamedTuple):
    """A table to create, without the elements of its named sets."""

    sets: tuple[SetSpec, ...]
    chains: Mapping[str, ChainContents]
    counters: tuple[str, ...] = ()
    flowtables: tuple[str, ...] = ()

    @property
    def contents(self) -> TableContents:
        """The contents of the table after its creation."""
        sets = {spec.name: spec.form for spec in self.sets}
        return TableContents(sets, self.chains, frozenset(self.counters), frozenset(self.flowtables))


class TableContents(Struct, frozen=True):
    """The contents of a table, without the elements of its named sets and the interfaces of its flowtables."""

    sets: Mapping[str, SetForm]
    chains: Mapping[str, ChainContents]
    counters: frozenset[str] = frozenset()
    flowtables: frozenset[str] = frozenset()


# -- reading -----------------------------------------------------------------------------------------------------------


class ListedChain(NamedTuple):
    """A chain: the number of its family, its table and name, and its hook (None unless it is a base chain)."""

    family: int
    table: str
    name: str
    hook: Hook | None


def chain_places(family: int, table: str, link: nl.Netlink) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of the attributes of each chain in a table; '' selects all tables."""
    first = nl.text_attribute(nfta.CHAIN_TABLE, table) if table else b""
    # The first attribute is the table's name, so chains of other tables are skipped unparsed: there may be 100,000.
    places = nfnetlink.dump(nfnetlink.GET_CHAIN, family, b"", "nf_tables chains", link)
    return (place for place in places if place[0].startswith(first, place[1]))


@nl.understood("chains of nf_tables")
def listed_chains(link: nl.Netlink, family: int = 0, table: str = "") -> list[ListedChain]:
    """Return the chains of one table ('' for all tables) in one family (0 for all families). Raises NetlinkError."""
    found = []
    for data, start, end in chain_places(family, table, link):
        one = nl.parts(data, start, end)
        hook = None
        if nfta.CHAIN_HOOK in one:
            place = nl.parts(one[nfta.CHAIN_HOOK])
            priority = int.from_bytes(place.get(nfta.HOOK_PRIORITY, b""), "big", signed=True)
            drops = int.from_bytes(one.get(nfta.CHAIN_POLICY, b"\1"), "big") == _DROP
            kind = nl.text_of(one.get(nfta.CHAIN_TYPE, b""))
            hook = Hook(kind, int.from_bytes(place.get(nfta.HOOK_NUMBER, b""), "big"), priority, drops)
        of_table, name = nl.text_of(one[nfta.CHAIN_TABLE]), nl.text_of(one[nfta.CHAIN_NAME])
        # struct nfgenmsg, which precedes the attributes, starts with the family.
        found.append(ListedChain(data[start - 4], of_table, name, hook))
    return found


def form_of(one: Mapping[int, bytes]) -> SetForm:
    """Return the form of a set with these attributes."""

    def number(kind: int) -> int:
        return int.from_bytes(one.get(kind, b""), "big")

    desc = nl.parts(one.get(nfta.SET_DESC, b""))
    data = number(nfta.SET_DATA_TYPE)
    return SetForm(
        flags=number(nfta.SET_FLAGS) | (COUNTED if nfta.SET_EXPR in one else 0),
        key_type=number(nfta.SET_KEY_TYPE),
        key_length=number(nfta.SET_KEY_LENGTH),
        data_type=data,
        data_length=0 if data == VERDICTS else number(nfta.SET_DATA_LENGTH),
        size=int.from_bytes(desc.get(nfta.SET_DESC_SIZE, b""), "big"),
        timeout=number(nfta.SET_TIMEOUT),
        lengths=tuple(_lengths(desc.get(nfta.SET_DESC_CONCAT, b""))),
    )


def _lengths(data: bytes) -> Iterator[int]:
    for _, start, end in nl.attributes(data, 0, len(data)):
        for kind, first, last in nl.attributes(data, start, end):
            if kind == nfta.SET_FIELD_LENGTH:
                yield int.from_bytes(data[first:last], "big")
