"""Elements as nft text: for the one transaction that replaces another program's table, skeleton and all.

Slower than packed elements (about 10 us each, and 2 KB of nft's memory), and the only form that nft can commit together
with its own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from kubeproxy.backends.elements import Elements
from kubeproxy.backends.nftables.layout import Kind, Layout, SetShape
from kubeproxy.model.addresses import Range, unpack

_AT_ONCE: Final = 500
_PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}


def element_lines(layout: Layout, table: str, elements: Elements) -> Iterator[str]:
    """Yield `add element` lines of hundreds of elements: with a line for each, nft takes two thirds more memory."""
    for set_id, entries in elements.items():
        shape = layout.shapes[set_id]
        show = _key_writer(layout, shape)
        texts = (f"{show(key)}{_value(shape, data)}" for key, data in entries.items())
        while some := list(islice(texts, _AT_ONCE)):
            yield f"add element {table} {set_id} {{ {', '.join(some)} }}"


def interval_lines(table: str, set_name: str, ranges: tuple[Range, ...]) -> list[str]:
    """Return the line that fills a set of address ranges, none for no ranges."""
    text = ", ".join(f"{unpack(first)}-{unpack(last)}" if first != last else unpack(first) for first, last in ranges)
    return [f"add element {table} {set_name} {{ {text} }}"] if text else []


def _value(shape: SetShape, data: bytes) -> str:
    if shape.kind is Kind.DESTINATION:
        return f" : {unpack(data[:-4])} . {int.from_bytes(data[-4:-2], 'big')}"
    if shape.kind is Kind.VERDICT:
        return f" : goto {data.decode()}"
    if shape.kind is Kind.NUMBER:
        return f" : {unpack(data)}"
    if shape.kind is Kind.CLASS:
        return f" : {int.from_bytes(data, 'big')}"
    return ""


def _key_writer(layout: Layout, shape: SetShape) -> Callable[[bytes], str]:
    size = layout.family.address_size

    def words(key: bytes) -> list[str]:
        found, at = [], 0
        for field in shape.fields:
            width = size if field == "address" else 4
            found.append(_word(field, key[at : at + width]))
            at += width
        return found

    def interval(key: bytes) -> str:
        first, last = words(key[: len(key) // 2]), words(key[len(key) // 2 :])
        return " . ".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))

    return interval if shape.kind is Kind.INTERVAL else lambda key: " . ".join(words(key))


def _word(field: str, value: bytes) -> str:
    if field == "address":
        return unpack(value)
    if field == "protocol":
        return _PROTOCOLS[value[0]]
    if field == "port":
        return str(int.from_bytes(value[:2], "big"))
    return str(int.from_bytes(value, "little"))
