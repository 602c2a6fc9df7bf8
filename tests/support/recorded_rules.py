"""The recorded rules of the Go kube-proxy, line by line, and random mutations of them.

A line is a rule or an element of a set. The lines of nf_tables are those that `nft -f` reads: the table without
elements, then a command for each element. The lines of iptables are those that iptables-restore reads.
"""

from __future__ import annotations

import gzip
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from support.places import RECORDINGS

FOLDER: Final = RECORDINGS / "go-rules"
PROGRAMS: Final = ("nftables", "iptables")
COUNTERS: Final = re.compile(r" -m nfacct --nfacct-name +\S+")
"""Counters of the Go kube-proxy are kernel objects separate from the rules."""
_COMMENT: Final = re.compile(r'(?: -m comment --comment|\n?\s+comment) "[^"]*"')


def text(program: str) -> str:
    """Return the recorded rules as their program prints them, without counters."""
    file = {"nftables": "v1.36.nft.gz", "iptables": "v1.36.iptables.gz"}[program]
    return COUNTERS.sub("", gzip.decompress((FOLDER / file).read_bytes()).decode())


class Line(NamedTuple):
    """A line: the chain of its rule, or the set of its element ('' for other lines); its kind; and its text."""

    place: str
    kind: str
    text: str


def lines(program: str) -> list[Line]:
    """Return the recorded rules line by line, without comments."""
    recorded = _COMMENT.sub("", text(program))
    return _nftables(recorded) if program == "nftables" else _iptables(recorded)


def written(found: list[Line]) -> str:
    """Return lines as their program reads them."""
    return "".join(f"{line.text}\n" for line in found)


def _iptables(recorded: str) -> list[Line]:
    found, table = [], ""
    for line in recorded.splitlines():
        if line.startswith("*"):
            table = line[1:]
        is_rule = line.startswith("-A ")
        found.append(Line(f"{table} {line.split()[1]}" if is_rule else "", "rule" if is_rule else "", line))
    return found


_ELEMENTS: Final = re.compile(r"\n\t\telements = \{ (.*?) \}", re.DOTALL)


def _nftables(recorded: str) -> list[Line]:
    found: list[Line] = []
    elements: list[Line] = []
    place = ""
    for block in recorded.split("\n\n"):
        kind, place = block.removeprefix("table ip kube-proxy {\n").split()[:2]
        for each in _ELEMENTS.findall(block):
            added = (" ".join(one.split()) for one in each.split(","))
            elements += [Line(place, "element", f"add element ip kube-proxy {place} {{ {one} }}") for one in added]
        for line in _ELEMENTS.sub("", block).splitlines():
            inner = line.startswith("\t\t") and kind == "chain" and not line.startswith(("\t\ttype ", "\t\tcomment "))
            found.append(Line(place if inner else "", "rule" if inner else "", line))
    return found + elements


# -- mutations ---------------------------------------------------------------------------------------------------------


MUTATIONS: Final = 125
"""Number of mutations of each program's rules."""
HARMLESS: Final[dict[str, frozenset[int]]] = {
    "nftables": frozenset({1, 8, 26, 55, 56, 67, 71, 73, 74, 84, 98, 107, 115, 121, 122}),
    "iptables": frozenset(
        {
            *(6, 12, 16, 17, 19, 20, 21, 29, 31, 32, 37, 39, 44, 49, 52, 57, 62, 64, 66, 71, 76, 77, 86, 87, 91, 92),
            *(101, 105, 106, 110, 111, 112, 117, 121, 122),
        }
    ),
}
"""Numbers of mutations without an effect on any packet: tests/kernel/test_meaning_witnesses.py sends packets."""


class Mutation(NamedTuple):
    """A change of recorded rules: its kind, the number of the changed line, and all lines after the change."""

    kind: str
    at: Line
    lines: list[Line]


def mutations(program: str) -> Iterator[Mutation]:
    """Yield different mutations, always the same ones. The kernel accepts each of them."""
    draw = random.Random(f"mutations of {program}")
    before = lines(program)
    able = [at for at, line in enumerate(before) if line.kind]
    kinds = itertools.cycle(_KINDS if program == "nftables" else [kind for kind in _KINDS if kind != "value"])
    seen: set[str] = {written(before)}
    for kind in itertools.islice(kinds, MUTATIONS):
        after: list[Line] | None = None
        while after is None or written(after) in seen or _is_refused(before, after):
            at = draw.choice(able)
            after = _KINDS[kind](before, at, draw)
        seen.add(written(after))
        yield Mutation(kind, before[at], after)


def _is_refused(before: list[Line], after: list[Line]) -> bool:
    """Return whether two elements have one key now."""
    changed = {line for line in after if line.kind == "element"} - {*before}
    keys = [(line.place, _key(line)) for line in after if line.kind == "element"]
    return any(keys.count((line.place, _key(line))) > 1 for line in changed)


def _key(line: Line) -> str:
    return line.text.partition("{ ")[2].partition(" : ")[0].removesuffix(" }")


def _removed(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    return [*before[:at], *before[at + 1 :]]


def _exchanged(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    """Exchange a rule with the next rule of its chain."""
    rule, after = before[at], before[at + 1]
    if rule.kind != "rule" or after.place != rule.place:
        return None
    return [*before[:at], after, rule, *before[at + 2 :]]


_ALIKE: Final = (
    ("service-ips", "no-endpoint-services", "firewall-ips"),
    ("service-nodeports", "no-endpoint-nodeports"),
    ("cluster-ips", "nodeport-ips"),
)
"""Sets and maps of nf_tables with keys of the same type."""


def _moved(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    """Move an element to another set, or a rule to another place of its chain."""
    line = before[at]
    rest = [*before[:at], *before[at + 1 :]]
    if line.kind == "element":
        others = [name for names in _ALIKE if line.place in names for name in names if name != line.place]
        if not others or re.search("goto (service|external|local)-", line.text):  # allowed only in NAT
            return None
        other = draw.choice(others)
        changed = line._replace(place=other, text=line.text.replace(f" {line.place} ", f" {other} ", 1))
        return [*before[:at], changed, *before[at + 1 :]]
    places = [number for number, one in enumerate(rest) if one.place == line.place]
    if not places:
        return None
    to = draw.choice(places)
    return [*rest[:to], line, *rest[to:]]


def _replaced(before: list[Line], at: int, new: str) -> list[Line] | None:
    if new == before[at].text:
        return None
    return [*before[:at], before[at]._replace(text=new), *before[at + 1 :]]


_TARGET: Final = re.compile(r"-j (KUBE-(?:SVC|SVL|SEP|EXT|FW)-)?(\S+).*|(goto|jump) (\w+-)(\S+)|\b(drop|reject)\b")


def _verdict(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    """Change a verdict: to another chain of the same kind, or to accept, drop or return."""
    line = before[at]
    found = list(_TARGET.finditer(line.text))
    if not found:
        return None
    match = draw.choice(found)
    kind = match[1] or (f"{match[3]} {match[4]}" if match[3] else "")
    others = sorted({one[0] for each in before for one in _TARGET.finditer(each.text) if kind and kind in one[0]})
    if match[0].startswith("-j"):
        verdicts = ["-j RETURN", "-j ACCEPT"] + ["-j DROP"] * line.place.startswith("filter")
    else:
        verdicts = ["accept", "drop"] if line.kind == "element" else ["accept", "drop", "return"]
    new = draw.choice(others if len(others) > 1 and draw.random() < 0.7 else verdicts)
    return _replaced(before, at, line.text[: match.start()] + new + line.text[match.end() :])


_CONSTANTS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\d._/])(?<!--mask )\d+\.\d+\.\d+\.\d+(?:/\d+)?(?![\d./])",
        r"(?<=--dport )\d+",
        r"(?<=\d:)\d+|(?<=\d \. )\d{4,}",
        r"(?<=(?:tcp|udp) \. )\d+",
        r"(?<=--probability )[\d.]+",
        r"0x[0-9a-f]+(?:/0x[0-9a-f]+)?",
        r"(?<=mod )\d+",
        r"(?<=@)(?:affinity-\S+|[a-z-]+(?= |$))",
        r"(?<=--name )\S+",
        r"(?<=--ctstate )\S+",
        r"! (?=-)|(?<= )!= ",
    )
)
"""Constants of one kind each: addresses, ports, shares, marks, sets, states; a negation can only be removed."""


def _constant(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    """Change a constant to another constant of its kind; or change the protocol everywhere in the line."""
    line = before[at]
    if draw.random() < 0.15 and re.search(r"\b(tcp|udp)\b", line.text):
        names = {"tcp": "udp", "udp": "tcp"}
        return _replaced(before, at, re.sub(r"(?<= )(tcp|udp)(?= )", lambda found: names[found[1]], line.text))
    pattern = draw.choice(_CONSTANTS)
    found = list(pattern.finditer(line.text))
    if not found:
        return None
    match = draw.choice(found)
    alike = [one for one in before if one.kind == line.kind] if line.kind == "element" else before
    others = sorted({one for each in alike for one in pattern.findall(each.text)} - {match[0]})
    new = draw.choice(others) if others else ""
    return _replaced(before, at, line.text[: match.start()] + new + line.text[match.end() :])


def _value(before: list[Line], at: int, draw: random.Random) -> list[Line] | None:
    """Exchange the value of an element with that of another element of its map, or two endpoints of a rule."""
    line = before[at]
    if line.kind == "element":
        head, sep, value = line.text.partition(" : ")
        others = sorted(
            {one.text.partition(" : ")[2] for one in before if one.place == line.place and one.kind == "element"}
            - {value}
        )
        return _replaced(before, at, head + sep + draw.choice(others)) if sep and others else None
    ends = re.findall(r"(?<=\d : )[^,}]+(?= [,}]|,)", line.text)
    if len(ends) < 2:
        return None
    old, new = draw.sample(ends, 2)
    return _replaced(before, at, line.text.replace(f" : {old}", f" : {new}", 1))


_KINDS: Final[dict[str, Callable[[list[Line], int, random.Random], list[Line] | None]]] = {
    "removed": _removed,
    "exchanged": _exchanged,
    "moved": _moved,
    "verdict": _verdict,
    "constant": _constant,
    "value": _value,
}
