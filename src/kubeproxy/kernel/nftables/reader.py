"""Reads a table of nf_tables: its header, rules, sets, counters, and the elements of its sets. Sources:
nf_tables_fill_set, nf_tables_fill_obj_info, nf_tables_getsetelem, nft_rhash_walk in net/netfilter of Linux 6.18."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import elements, expressions, nfnetlink, nfta, tables
from kubeproxy.kernel.nftables.elements import COUNTED_AT_ONCE, Element, ElementCount, Entries, Pairs, decoded
from kubeproxy.kernel.nftables.fields import padded
from kubeproxy.kernel.nftables.nfnetlink import GET_ELEMENT, Rule, TableHeader, names
from kubeproxy.kernel.nftables.tables import ANONYMOUS, ChainContents, SetForm, TableContents

_DORMANT: Final = 1  # NFT_TABLE_F_DORMANT
_NUMBER: Final = struct.Struct(">Q").unpack_from


class TableReader(nl.Closing):
    """A named table in the network namespace of a socket. Several readers may use one socket in turn. All calls raise
    ApplyError; calls about a set that is missing raise NetlinkError with code ENOENT. Frequent callers should keep the
    socket open: after the close of a netfilter socket, the next transaction of any program waits for 10 to 30 ms
    (nft_rcv_nl_event)."""

    def __init__(self, family: int, table: str, link: nl.Netlink) -> None:
        self.family = family
        self._table = table
        self._link = link

    def close(self) -> None:
        """Close the socket."""
        self._link.close()

    @nl.understood("nf_tables")
    def header(self) -> TableHeader | None:
        """Return the table's handle, comment and state; None if the table is missing."""
        for place in self._dump(nfnetlink.GET_TABLE, b"", "nf_tables tables"):
            found = nl.parts(*place)
            if nl.text_of(found.get(nfta.TABLE_NAME, b"")) == self._table:
                number, comment = nl.numbers(*place).get, _comment(found.get(nfta.TABLE_USERDATA, b""))
                dormant = bool(number(nfta.TABLE_FLAGS, 0) & _DORMANT)
                return TableHeader(number(nfta.TABLE_HANDLE, 0), comment, dormant, number(nfta.TABLE_OWNER, 0))
        return None

    @nl.understood("chains of nf_tables")
    def chains(self) -> frozenset[str]:
        """Return the names of the chains."""
        places = tables.chain_places(self.family, self._table, self._link)
        return frozenset(nl.text_of(nl.parts(*place)[nfta.CHAIN_NAME]) for place in places)

    @nl.understood("nf_tables")
    def rules(self, chain: str = "") -> list[Rule]:
        """Return the rules of the table, or of one of its chains, in order."""
        request = nl.text_attribute(nfta.RULE_TABLE, self._table)
        if chain:
            request += nl.text_attribute(nfta.RULE_CHAIN, chain)
        places = self._dump(nfnetlink.GET_RULE, request, f"rules of {chain}" if chain else "nf_tables rules")
        return [_rule(data[start:end]) for data, start, end in places]

    @nl.understood("sets of nf_tables")
    def sets(self) -> dict[str, SetForm]:
        """Return the sets and maps by name, including the anonymous sets of rules."""
        places = self._dump(nfnetlink.GET_SET, nl.text_attribute(nfta.SET_TABLE, self._table), "nf_tables sets")
        return {nl.text_of(one[nfta.SET_NAME]): tables.form_of(one) for one in (nl.parts(*place) for place in places)}

    @nl.understood("a table of nf_tables")
    def contents(self) -> TableContents:
        """Return the contents of the table."""
        sets = self.sets()
        chains = self.chain_contents(lambda raw: self._whole(raw, sets))
        named = {name: form for name, form in sets.items() if not form.flags & ANONYMOUS}
        return TableContents(named, chains, frozenset(self.counter_packets()), self._flowtables())

    def chain_contents(self, parse: Callable[[bytes], expressions.Rule]) -> dict[str, ChainContents]:
        """Return the chains by name; `parse` returns the rule with the given packed expressions."""
        hooks = {one.name: one.hook for one in tables.listed_chains(self._link, self.family, self._table)}
        rules: dict[str, list[expressions.Rule]] = {name: [] for name in hooks}
        for rule in self.rules():
            rules.setdefault(rule.chain, []).append(parse(rule.raw))
        return {name: ChainContents(hooks.get(name), tuple(its)) for name, its in rules.items()}

    @nl.understood("rules of nf_tables")
    def chain_rules(self, chain: str) -> dict[int, expressions.Rule]:
        """Return the rules of a chain by handle; the table may belong to another program."""
        sets = self.sets()
        return {rule.handle: self._whole(rule.raw, sets) for rule in self.rules(chain)}

    @nl.understood("counters of nf_tables")
    def counter_packets(self) -> dict[str, int]:
        """Return the packet counts of the table's named counters by name; {} if the table is missing."""
        found: dict[str, int] = {}
        request = nl.text_attribute(nfta.OBJ_TABLE, self._table)
        for data, start, end in self._dump(nfnetlink.GET_OBJECT, request, f"the counters of table {self._table}"):
            one = nl.parts(data, start, end)
            place = nl.find(data, start, end, nfta.OBJ_DATA, nfta.COUNTER_PACKETS)
            if place is not None and nl.text_of(one[nfta.OBJ_TABLE]) == self._table:
                found[nl.text_of(one[nfta.OBJ_NAME])] = int.from_bytes(data[slice(*place)], "big")
        return found

    @nl.understood("flowtables of nf_tables")
    def _flowtables(self) -> frozenset[str]:
        """Return the names of the flowtables; none if the kernel does not support flowtables."""
        try:
            request = nl.text_attribute(nfta.FLOWTABLE_TABLE, self._table)
            found = [nl.parts(*place) for place in self._dump(nfnetlink.GET_FLOWTABLE, request, "flowtables")]
        except nl.NetlinkError as error:
            if error.code != errno.EOPNOTSUPP:
                raise
            return frozenset()
        ours = (one for one in found if nl.text_of(one[nfta.FLOWTABLE_TABLE]) == self._table)
        return frozenset(nl.text_of(one[nfta.FLOWTABLE_NAME]) for one in ours)

    def _whole(self, raw: bytes, sets: Mapping[str, SetForm]) -> expressions.Rule:
        """Return a rule with the contents of its anonymous sets in place of their names."""
        found: list[expressions.Expression] = []
        for one in expressions.parse(raw):
            if isinstance(one, expressions.Lookup) and isinstance(one.set, str):
                form = sets.get(one.set)
                if form is not None and form.flags & ANONYMOUS:
                    contents = frozenset(self._contents_of(one.set))
                    inline = expressions.Inline(form.key_type, form.key_length, form.data_type, contents)
                    found.append(replace(one, set=inline))
                    continue
            found.append(one)
        return tuple(found)

    def _contents_of(self, name: str) -> Iterator[tuple[bytes, bytes | expressions.RuleVerdict]]:
        for data, first, last in self.element_lists(name):
            for _, start, end in nl.attributes(data, first, last):
                one = nl.parts(data, start, end)
                key = expressions.parse_value(one.get(nfta.SET_ELEM_KEY, b""))  # b'' for the catch-all element
                assert isinstance(key, bytes)  # noqa: S101 - a key is never a verdict
                yield key.ljust(padded(len(key)), b"\0"), expressions.parse_value(one.get(nfta.SET_ELEM_DATA, b""))

    # -- elements ---------------------------------------------------------------------------------------------------

    def all_elements(self, name: str) -> Iterable[Element]:
        """Yield the elements of a set."""
        for data, start, end in self.element_lists(name):
            for _, first, last in nl.attributes(data, start, end):
                yield elements.element_of(data, first, last)

    def pairs(self, name: str) -> Iterable[Pairs]:
        """Yield the elements of a set in groups, one per buffer of the dump. An element may occur twice
        (nft_rhash_walk)."""
        for place in self.element_lists(name):
            yield decoded(*place)

    def element_lists(self, name: str) -> Iterator[tuple[bytes, int, int]]:
        """Yield (buffer, start, end) of each list of elements in a dump of a set."""
        return elements.lists(self._dump(GET_ELEMENT, names(self._table, name), f"elements of {name}"))

    @nl.understood("elements of nf_tables")
    def one_pass(self, name: str) -> Entries:
        """Return the key and data of each element that one dump of a set contains. Elements may be missing if another
        program changes the set during the dump: the kernel finds its place again by counting from the first element."""
        found: Entries = {}
        buffers = self._link.dump_once(GET_ELEMENT, self._place(name), f"elements of {name}")
        for place in elements.lists(nl.answers(buffers, nfnetlink.GENERIC.size)):
            found.update(decoded(*place))
        return found

    @nl.understood("sets of nf_tables")
    def count(self, name: str) -> int | None:
        """Return the number of elements of a set; None if the kernel refuses, or is older than Linux 6.16."""
        what = f"the number of elements of {name}"
        ((_, _, places),) = self._link.inquire(nfnetlink.GET_SET, [self._place(name)], what)
        found = [nl.parts(data, start + nfnetlink.GENERIC.size, end) for data, start, end in places]
        return int.from_bytes(found[0][nfta.SET_COUNT], "big") if found and nfta.SET_COUNT in found[0] else None

    def has_catch_all(self, name: str) -> bool:
        """Return whether a set has a catch-all element. A request by key does not return the catch-all element, and the
        kernel's count does not include it."""
        element = nl.nested(nfta.SET_ELEM_LIST_ELEMENTS, elements.catch_all_element())
        ((code, *_),) = self._link.inquire(GET_ELEMENT, [self._place(name) + element], f"elements of {name}")
        return not code

    @nl.understood("elements of nf_tables")
    def look_up(self, name: str, keys: Iterable[bytes], *, ranges: bool = False) -> Entries:
        """Return the key and data of the existing elements with these keys; one request per key. With `ranges`, a key
        is the first value of a range followed by the last value."""
        where = self._place(name)
        pack = elements.interval_element if ranges else elements.plain_element
        payloads = [where + nl.nested(nfta.SET_ELEM_LIST_ELEMENTS, pack(key)) for key in keys]
        found: Entries = {}
        for code, text, places in self._link.inquire(GET_ELEMENT, payloads, f"elements of {name}"):
            if code and code != errno.ENOENT:
                raise nl.NetlinkError(code, f"cannot read elements of {name}", text)
            for place in elements.lists((data, start + nfnetlink.GENERIC.size, end) for data, start, end in places):
                found.update(decoded(*place))
        return found

    @nl.understood("counters of nf_tables")
    def element_counts(self, name: str, keys: Sequence[bytes]) -> list[ElementCount]:
        """Return the counts of the elements with these keys that exist and have a counter. All keys have the same
        length. The elements are not dumped, because for each buffer of a dump the kernel starts again at the first
        element, and a dump misses elements while other programs change the map."""
        found: list[ElementCount] = []
        layouts: dict[int, tuple[int, int, int, int] | None] = {}
        packer = elements.Packer.of(len(keys[0]) if keys else 0, 0)
        left = list(keys)
        while left:
            asked = b"".join([packer.pack(key, b"") for key in left[:COUNTED_AT_ONCE]])
            payload = self._place(name) + nl.nested(nfta.SET_ELEM_LIST_ELEMENTS, asked)
            ((code, text, places),) = self._link.inquire(GET_ELEMENT, [payload], f"counters of {name}")
            if code and code != errno.ENOENT:
                raise nl.NetlinkError(code, f"cannot read the counters of {name}", text)
            # The kernel answers each request in order, up to the first missing element.
            for key, (data, start, end) in zip(left, places, strict=False):
                if end - start not in layouts:
                    layouts[end - start] = elements.counter_places(data, start, end)
                if (offsets := layouts[end - start]) is not None:
                    value, after, packets, octets = offsets
                    counts = _NUMBER(data, start + packets)[0], _NUMBER(data, start + octets)[0]
                    found.append(ElementCount(key, data[start + value : start + after], *counts))
            del left[: len(places) + 1 if code else COUNTED_AT_ONCE]
        return found

    def _dump(self, kind: int, request: bytes, what: str) -> Iterator[tuple[bytes, int, int]]:
        return nfnetlink.dump(kind, self.family, request, what, self._link)

    def _place(self, name: str) -> bytes:
        return nl.netfilter_header(self.family) + names(self._table, name)


def _comment(userdata: bytes) -> str:
    if len(userdata) >= 2 and userdata[0] == 0:
        return userdata[2 : 2 + userdata[1]].rstrip(b"\0").decode(errors="replace")
    return ""


def _rule(data: bytes) -> Rule:
    one = nl.parts(data)
    handle = int.from_bytes(one[nfta.RULE_HANDLE], "big")
    return Rule(nl.text_of(one[nfta.RULE_CHAIN]), handle, one.get(nfta.RULE_EXPRESSIONS, b""))
