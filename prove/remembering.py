"""What judges would ask nft, parse or compute again and again: the rules of our table, which few histories ever change.

Messages of the kernel are kept with what they say, whole: one that differs in a byte is read anew.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from kubeproxy.backends.examination import Examiner
from kubeproxy.backends.nftables.examine import NftablesExaminer
from kubeproxy.backends.nftables.layout import parse_chain_name
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.view import Skeleton, expected
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import HEADER, NETLINK_NETFILTER, Netlink, attributes
from kubeproxy.kernel.nftables import nfnetlink, nfta
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals


def remember(examiners: Iterable[Examiner]) -> None:
    """Have examiners take what they found out about the same rules before."""
    nfnetlink.rules = _rules  # type: ignore[assignment]
    nfnetlink._names = _names  # type: ignore[assignment]
    Ruleset.comment = _comment  # type: ignore[method-assign]
    for one in examiners:
        if isinstance(one, NftablesExaminer):
            one._expect = _expected


def _rules(family: int, table_name: str, link: Netlink | None = None) -> list[nfnetlink.Rule]:
    request = nfnetlink.text_attribute(nfta.RULE_TABLE, table_name)
    return [_rule(body) for body in _bodies(nfnetlink.GET_RULE, family, request, "nf_tables rules", link)]


def _bodies(kind: int, family: int, request: bytes, what: str, link: Netlink | None) -> Iterator[bytes]:
    """Yield the attributes of each entry of a dump: all but a message's header, which has changing numbers."""
    if link is None:
        with Netlink.open(NETLINK_NETFILTER) as own:
            yield from _bodies(kind, family, request, what, own)
        return
    for data in link.dump_all(kind, nfnetlink.GENERIC.pack(family, 0, 0) + request, what):
        at, size = 0, len(data)
        while at < size:
            length, found = _LENGTH_AND_KIND.unpack_from(data, at)
            if length < _HEADERS:
                raise ApplyError(f"malformed netlink message of {length} bytes")
            if found >> 8 == nfnetlink.SUBSYSTEM:
                yield data[at + _HEADERS : at + length]
            at += (length + 3) & ~3


_LENGTH_AND_KIND: Final = struct.Struct("=IH")
_HEADERS: Final = HEADER.size + nfnetlink.GENERIC.size


@functools.lru_cache(maxsize=32768)
def _rule(message: bytes) -> nfnetlink.Rule:
    parts = {kind: message[s:e] for kind, s, e in attributes(message, 0, len(message))}
    raw = parts.get(nfta.RULE_EXPRESSIONS, b"")
    return nfnetlink.Rule(parts[nfta.RULE_CHAIN].rstrip(b"\0").decode(), _expressions(raw), raw)


_expressions = functools.lru_cache(maxsize=8192)(nfnetlink._expressions)


def _names(
    kind: int, family: int, table_name: str, name_attribute: int, what: str, link: Netlink | None = None
) -> Iterator[str]:
    wanted = table_name.encode() + b"\0"
    for body in _bodies(kind, family, b"", what, link):
        table, name = _named(body, name_attribute)
        if table == wanted:
            yield name


@functools.lru_cache(maxsize=32768)
def _named(message: bytes, name_attribute: int) -> tuple[bytes, str]:
    parts = {kind: message[s:e] for kind, s, e in attributes(message, 0, len(message))}
    return parts[nfta.SET_TABLE], parts[name_attribute].rstrip(b"\0").decode()


_commented = Ruleset.comment


def _comment(ruleset: Ruleset) -> str:
    return _fingerprint(ruleset.family, ruleset._world, ruleset.table)


@functools.lru_cache(maxsize=256)
def _fingerprint(family: Family, world: Globals, table: str) -> str:
    return _commented(Ruleset(family, world, table))


_skeletons: dict[tuple[object, ...], Skeleton] = {}


def _expected(ruleset: Ruleset, world: Globals, chains: Iterable[str]) -> Skeleton:
    """Ask nft once for each text: most of what the node is told, as its zone, is in none."""
    names, ours = frozenset(chains), world.of(ruleset.family)
    key = (_text(ruleset.family, world, names), names, ours and ours.service_cidrs)
    if key not in _skeletons:
        _skeletons[key] = expected(ruleset, world, names)
    return _skeletons[key]


@functools.lru_cache(maxsize=256)
def _text(family: Family, world: Globals, chains: frozenset[str]) -> str:
    named = (parse_chain_name(chain) for chain in chains)
    return Ruleset(family, world).skeleton({name for name in named if name is not None})
