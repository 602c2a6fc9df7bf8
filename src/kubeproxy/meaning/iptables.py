"""Compiles the output of iptables-save to operations. Both variants of iptables have the same output.

An unsupported option becomes an UNKNOWN operation with the option's position. Source: iptables-extensions(8)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from typing import Final

from kubeproxy.meaning import rules
from kubeproxy.meaning.rules import (
    ACCEPT,
    DROP,
    ESTABLISHED,
    GOTO,
    INVALID,
    JUMP,
    NEW,
    RETURN,
    TRANSLATED_STATE,
    ChainRules,
    CompiledFor,
    HookPlace,
    NodePlace,
    Op,
    Operation,
    Property,
)

_PRIORITIES: Final = {"raw": -300, "mangle": -150, "nat": -100, "filter": 0, "security": 50}
_SOURCE_NAT: Final = 100
_PROTOCOLS: Final = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1, "ipv6-icmp": 58, "icmpv6": 58}
_COMMENT: Final = re.compile(r' -m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+)')
_VERDICTS: Final = {"ACCEPT": ACCEPT, "DROP": DROP, "RETURN": RETURN}
_SILENT: Final = frozenset({"LOG", "NFLOG", "TCPMSS", "TRACE", "CHECKSUM"})
_STATES: Final = {
    "INVALID": INVALID,
    "ESTABLISHED": ESTABLISHED,
    "RELATED": 4,
    "NEW": NEW,
    "DNAT": TRANSLATED_STATE,
    "UNTRACKED": 256,
}
_TCP_FLAGS: Final = {"NONE": 0, "FIN": 1, "SYN": 2, "RST": 4, "PSH": 8, "ACK": 16, "URG": 32}
_CHANGING: Final = frozenset({"--rcheck", "--update"})
"""Options that test a list of clients. Rules that are not compiled may have changed this list."""
_OWN: Final = "KUBE-"


def compiled(text: str, place: NodePlace, purpose: CompiledFor = CompiledFor.EVERYTHING) -> list[ChainRules]:
    """Return the chains in the output of iptables-save. Names of chains are `iptables/table/chain`."""
    found: list[ChainRules] = []
    rules: dict[str, list[tuple[Operation, ...]]] = {}
    policies: dict[str, str] = {}
    table = ""
    reader = _Reader(place, "", rules, purpose)
    for line in text.splitlines():
        if line.startswith("-A "):
            chain, _, rest = line[3:].partition(" ")
            rules[chain].append(reader.rule(chain, len(rules[chain]) + 1, rest))
        elif line.startswith("*"):
            table, rules, policies = line[1:], {}, {}
            reader = _Reader(place, table, rules, purpose)
        elif line.startswith(":"):
            name, policy = line[1:].split(" ")[:2]
            rules[name], policies[name] = [], policy
        elif line == "COMMIT":
            found += [
                ChainRules(f"iptables/{table}/{name}", its, _hook(table, name, policies[name]))
                for name, its in rules.items()
            ]
    return found


def of_kube_proxy(text: str) -> str:
    """Remove the rules of other programs from the output of iptables-save: keep the chains of kube-proxy and the rules
    that jump to them; change the policy DROP to ACCEPT."""
    kept = []
    for line in text.splitlines():
        if line.startswith(":"):
            name, policy, _ = line[1:].split(" ", 2)
            if name.startswith(_OWN) or policy != "-":
                kept.append(line.replace(f":{name} DROP ", f":{name} ACCEPT "))
        elif not line.startswith("-A ") or line[3:].startswith(_OWN) or f"-j {_OWN}" in line:
            kept.append(line)
    return "\n".join(kept)


def _hook(table: str, name: str, policy: str) -> HookPlace | None:
    if policy == "-":
        return None
    priority = _PRIORITIES[table]
    if table == "nat" and name in {"INPUT", "POSTROUTING"}:
        priority = _SOURCE_NAT
    return HookPlace(name.lower(), priority, table == "nat", policy == "DROP")


class _Unknown(Exception):  # noqa: N818 - the rules are valid
    """An option is not supported."""


class _Reader:
    def __init__(self, place: NodePlace, table: str, chains: Container[str], purpose: CompiledFor) -> None:
        self._place = place
        self._purpose = purpose
        self._chains = chains
        self._table = table
        self._prefix = f"iptables/{table}/"
        self._where = ""
        self._recent = Op.KNOWN

    def rule(self, chain: str, number: int, text: str) -> tuple[Operation, ...]:
        words = iter((_COMMENT.sub("", f" {text}") if "--comment" in text else f" {text}").split())
        self._where = f"in {self._table} {chain}, rule {number}"
        done: list[Operation] = []
        try:
            self._read(words, done)
        except _Unknown as unknown:
            done.append((Op.UNKNOWN, f"{unknown} {self._where}"))
            left = list(words)
            at = next((at for at, word in enumerate(left) if word in {"-j", "-g"}), None)
            if at is not None:
                self._target(left[at], left[at + 1], left[at + 2 :], done)
        return tuple(done)

    def _read(self, words: Iterator[str], done: list[Operation]) -> None:
        negated, random = False, False
        for word in words:
            if word == "!":
                negated = True
                continue
            if word in {"-j", "-g"}:
                self._target(word, next(words), list(words), done)
                return
            if word == "--mode":
                random = next(words) == "random"
            elif word == "--probability" and random:
                chance = float(next(words))
                done.append((Op.CHANCE, 1 - chance if negated else chance))
            else:
                _append_joined(self._option(word, words, negated), done)
            negated = False

    def _option(self, word: str, words: Iterator[str], negated: bool) -> Operation | None:
        """Return the test of an option with the next `words` as its arguments, or None for an option that restricts no
        packets."""
        if self._purpose is not CompiledFor.EVERYTHING and word in _CHANGING:
            raise _Unknown(f"option {word}")
        if word == "--sport" and self._purpose is CompiledFor.ANSWER:
            first, _, last = next(words).partition(":")
            return Op.VALUE, Property.SOURCE_PORT, -1, 0, int(first), int(last or first), negated
        if word in _RECENT:
            self._recent = _RECENT[word]
            return None
        if word == "--name":
            return self._recent, next(words)
        if word == "--tcp-flags":
            mask, wanted = (sum(_TCP_FLAGS[name] for name in next(words).split(",")) for _ in range(2))
            return _NEVER if (self._purpose.tcp_flags & mask == wanted) is negated else None
        if word in _OPTIONS:
            return _OPTIONS[word](self._place, next(words), negated)
        if word not in _FLAGS:
            raise _Unknown(f"option {word}")
        return _FLAGS[word]

    def _target(self, word: str, name: str, options: list[str], done: list[Operation]) -> None:
        if name in _VERDICTS:
            done.append((Op.VERDICT, _VERDICTS[name], ""))
        elif name in _SILENT:
            pass
        elif name == "MARK" and options[0] in {"--set-xmark", "--set-mark"}:
            value, mask = _masked(options[1])
            done.append((Op.MARK, ~(mask | value if options[0] == "--set-mark" else mask) & 0xFFFFFFFF, value))
        elif name in rules.TRANSLATING:
            done += self._translation(name, options[1] if len(options) > 1 else "")
        elif name == "MASQUERADE":
            done += [(Op.MASQUERADE,), (Op.VERDICT, ACCEPT, "")]
        elif name == "SNAT" and self._purpose is not rules.CompiledFor.EVERYTHING:
            done += self._source(options[1] if len(options) > 1 else "")
        elif name == "REJECT":
            done += [(Op.REFUSE, "tcp-reset" in options), (Op.VERDICT, DROP, "")]
        elif name == "NOTRACK" or (name == "CT" and "--notrack" in options):
            done.append((Op.UNTRACK, f"notrack {self._where}"))
        elif name == "CT" and options[:1] == ["--zone"]:
            done.append((Op.ZONE, f"ct zone {self._where}"))
        elif name in self._chains:
            done.append((Op.VERDICT, GOTO if word == "-g" else JUMP, f"{self._prefix}{name}"))
        else:
            done += [(Op.UNKNOWN, f"target {name} {self._where}"), (Op.VERDICT, ACCEPT, "")]

    def _source(self, text: str) -> tuple[Operation, ...]:
        """Return the operations of SNAT; the new address is unknown if `text` is a list or range of addresses."""
        try:
            address, _ = _destination(text.partition(":")[0] if text.count(":") == 1 else text)
        except _Unknown:
            return (Op.MASQUERADE, ()), (Op.VERDICT, ACCEPT, "")
        return (Op.MASQUERADE, address), (Op.VERDICT, ACCEPT, "")

    def _translation(self, name: str, text: str) -> tuple[Operation, ...]:
        try:
            address, port = _destination(f":{text}" if name == "REDIRECT" and text else text)
        except _Unknown as unknown:
            return (Op.UNKNOWN, f"{unknown} {self._where}"), *rules.UNKNOWN_TRANSLATION
        return (Op.TRANSLATE, rules.HERE if name == "REDIRECT" else address, port), (Op.VERDICT, ACCEPT, "")


def _append_joined(op: Operation | None, done: list[Operation]) -> None:
    if op is not None and op[0] is Op.SERVICE and done and done[-1][0] is Op.SERVICE:
        done[-1] = _both(done[-1][1], op[1])
    elif op is not None:
        done.append(op)


def _masked(text: str) -> tuple[int, int]:
    value, _, mask = text.partition("/")
    return int(value, 0), int(mask, 0) if mask else 0xFFFFFFFF


def _destination(text: str) -> tuple[bytes | None, bytes | None]:
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        return (ipaddress.ip_address(host).packed if host else None, int(port).to_bytes(2, "big") if port else None)
    except ValueError as error:
        raise _Unknown(f"DNAT to {text}") from error


@lru_cache(maxsize=65536)
def _network(text: str) -> rules.Addresses:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise _Unknown(f"address {text}") from error
    return ((int(network.network_address), int(network.broadcast_address)),)


def _local(place: NodePlace, text: str) -> rules.Addresses:
    if text != "LOCAL":
        raise _Unknown(f"address type {text}")
    return place.local


def _protocol(_: NodePlace, text: str, negated: bool) -> Operation:
    number = int(text) if text.isdecimal() else _PROTOCOLS.get(text)
    if number is None:
        raise _Unknown(f"protocol {text}")
    return _services(Op.SERVICE, rules.protocol_set(number), negated)


def _ports(kind: Op) -> _Option:
    def test(place: NodePlace, text: str, negated: bool) -> Operation:  # noqa: ARG001 - the signature of an option
        found = 0
        for part in text.split(","):
            first, _, last = part.partition(":")
            found |= rules.port_range(int(first), int(last or first))
        return _services(kind, found, negated)

    return test


@lru_cache(maxsize=65536)
def _services(kind: Op, found: int, negated: bool) -> Operation:
    return kind, rules.EVERY & ~found if negated else found


@lru_cache(maxsize=65536)
def _both(first: int, second: int) -> Operation:
    return Op.SERVICE, first & second


def _interface(text: str) -> tuple[str]:
    return (f"{text[:-1]}*" if text.endswith("+") else text,)


def _mark(_: NodePlace, text: str, negated: bool) -> Operation:
    value, mask = _masked(text)
    return Op.VALUE, Property.MARK, mask, 0, value, value, negated


def _state(_: NodePlace, text: str, negated: bool) -> Operation:
    try:
        mask = sum(_STATES[name] for name in text.split(","))
    except KeyError as error:
        raise _Unknown(f"state {text}") from error
    return Op.VALUE, Property.STATES, mask, 0, 1, mask, negated


def _module(place: NodePlace, text: str, negated: bool) -> None:  # noqa: ARG001 - the signature of an option
    """Refuse the module connmark, because its option has the same name as the option of the module mark."""
    if text == "connmark":
        raise _Unknown(f"module {text}")


_Option = Callable[[NodePlace, str, bool], Operation | None]
"""Returns the test of an option with an argument; None if the option does not restrict the packets."""
_NEVER: Final[Operation] = Op.SERVICE, 0
_ORIGINAL: Final = (Op.VALUE, Property.ORIGINAL_DESTINATION, -1, 0)
_OPTIONS: Final[dict[str, _Option]] = {
    "-s": lambda place, text, negated: (Op.SOURCE, place.unless(negated, _network(text))),
    "-d": lambda place, text, negated: (Op.DESTINATION, place.unless(negated, _network(text))),
    "-p": _protocol,
    "-i": lambda _, text, negated: (Op.INTERFACE, _interface(text), negated, False),
    "-o": lambda _, text, negated: (Op.INTERFACE, _interface(text), negated, True),
    "--dport": _ports(Op.SERVICE),
    "--dports": _ports(Op.SERVICE),
    "--src-type": lambda place, text, negated: (Op.SOURCE, place.unless(negated, _local(place, text))),
    "--dst-type": lambda place, text, negated: (Op.DESTINATION, place.unless(negated, _local(place, text))),
    "--mark": _mark,
    "--ctstate": _state,
    "--ctproto": _protocol,
    "--ctorigdst": lambda _, text, negated: (*_ORIGINAL, *_network(text)[0], negated),
    "--ctorigdstport": _ports(Op.ORIGINAL_SERVICE),
    "--state": _state,
    "-m": _module,
    **dict.fromkeys(("--nfacct-name", "--comment", "--seconds", "--mask"), lambda *_: None),
}
_FLAGS: Final[dict[str, Operation | None]] = {"--reap": None, "--rsource": None}
_RECENT: Final = {"--rcheck": Op.KNOWN, "--update": Op.KNOWN, "--set": Op.REMEMBER}
"""Options about a list of clients. The option `--name` follows them."""
