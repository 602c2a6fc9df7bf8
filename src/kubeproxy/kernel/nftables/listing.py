"""Prints rules in nft's language, like `nft list`. Rules of this program are printed exactly as nft prints them.
Expressions that only other programs use are printed in brackets, with their kind and all fields."""

from __future__ import annotations

import re
import sys
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubeproxy.kernel.netlink.protocol import parts
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.fields import FIELDS, INTEGER, NAMES, PORT, TCP_FLAGS, VERDICTS, padded, shown
from kubeproxy.model.addresses import destination_text, unpack

_VERDICTS: Final = {code: word for word, code in x.VERDICTS.items()}
_UNITS: Final = {1: "second", 60: "minute", 3600: "hour", 86400: "day", 604800: "week"}
_BURST: Final = 5
"""nft does not print a burst of this number of packets."""
_TCP: Final = "meta l4proto tcp"
_MASK: Final = b"\xff\xff\xff\xff"
# struct nf_nat_range2: flags, first and last address (16 bytes each) and port.
_ADDRESS_AND_PORT: Final = (3).to_bytes(4, sys.byteorder)  # NF_NAT_RANGE_MAP_IPS, _PROTO_SPECIFIED
_ADDRESS: Final = (1).to_bytes(4, sys.byteorder)  # NF_NAT_RANGE_MAP_IPS alone
_RANGE: Final = 40
_NOTRACK: Final = 1  # XT_CT_NOTRACK of struct xt_ct_target_info
_PORT_SIZE: Final = 2


class _Term(NamedTuple):
    text: str
    type: int
    size: int
    mask: bytes = b""
    xor: bytes = b""
    load: x.Expression | None = None


def text(rule: x.Rule, ip: str) -> str:
    """Return the text of a rule in a table of a family ('ip' or 'ip6')."""
    writer = _Writer(ip)
    for expression in rule:
        writer.add(expression)
    return " ".join(writer.words)


_IMPLIED: Final = (
    (re.compile(r"\bmeta l4proto (tcp|udp|sctp) th (?=[sd]port)"), r"\1 "),
    (re.compile(r"\bmeta nfproto ipv4 (?=(?:ip|icmp) )"), ""),
    (re.compile(r"\bmeta nfproto ipv6 (?=ip6 )"), ""),
)


def shortened(text: str) -> str:
    """Remove implied matches from a rule's text: `meta l4proto tcp th dport` becomes `tcp dport`."""
    for condition, short in _IMPLIED:
        text = condition.sub(short, text)
    return text


def _bracketed(expression: x.Expression, ip: str) -> str:
    if isinstance(expression, x.Opaque):
        if expression.name in {"match", "target"}:  # expressions of iptables-nft
            found = parts(expression.raw)
            name = found.get(nfta.MATCH_NAME, b"").rstrip(b"\0").decode(errors="replace")
            info = found.get(nfta.MATCH_INFO, b"")
            if name == "DNAT" and info[:4] == _ADDRESS_AND_PORT and len(info) >= _RANGE:
                return f"dnat to {destination_text(info[4 : 8 if ip == 'ip' else 20] + info[36:38])}"
            if name == "SNAT" and info[:4] == _ADDRESS and len(info) >= _RANGE:
                return f"snat to {unpack(info[4 : 8 if ip == 'ip' else 20])}"
            if name == "NOTRACK" or (name == "CT" and int.from_bytes(info[:2], sys.byteorder) & _NOTRACK):
                return "notrack"
            zone = int.from_bytes(info[2:4], sys.byteorder) if name == "CT" else 0
            return f"ct zone set {zone}" if zone else f'xt {expression.name} "{name}"'
        return f"[ {expression.name} {expression.raw.hex()} ]" if expression.name != "notrack" else expression.name
    fields = {name: getattr(expression, name) for name in expression.__struct_fields__}
    known = (f"{name} {_value(value)}" for name, value in fields.items() if value is not None)
    return f"[ {expression.KIND} {', '.join(known)} ]"


def _value(value: object) -> str:
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


class _Writer:
    def __init__(self, ip: str) -> None:
        self.words: list[str] = []
        self._ip = ip
        self._terms: dict[int, _Term] = {}  # the terms by their first slot

    def add(self, expression: x.Expression) -> None:
        """Print the next expression, or store it in a register."""
        write = getattr(self, f"_{expression.KIND}", self._statement)
        try:
            write(expression)
        except (LookupError, ValueError):
            self.words.append(_bracketed(expression, self._ip))

    def _statement(self, expression: x.Expression) -> None:
        """Print an expression without registers."""
        match expression:
            case x.PacketCount():
                self.words.append("counter")
            case x.TableObject(type=1, sreg=None):
                self.words.append(f'counter name "{expression.name}"')
            case x.Offload():
                self.words.append(f"flow add @{expression.flowtable}")
            case x.Masquerade(flags=0 | 0x10, port=None):
                self.words.append("masquerade fully-random" if expression.flags else "masquerade")
            case x.Reject(type=1):
                if self.words[-1:] == [_TCP]:
                    self.words.pop()  # nft implies this match
                self.words.append("reject with tcp reset")
            case x.Reject(type=0, code=code) if code == (3 if self._ip == "ip" else 4):
                self.words.append("reject")
            case _:
                raise LookupError

    def _load(self, register: int, term: _Term) -> None:
        self._terms[_slot(register)] = term

    def _key(self, register: int) -> tuple[str, _Term]:
        """Remove the terms from this register on; return their text and the first term."""
        slot = _slot(register)
        first = self._terms[slot]
        words = []
        while (term := self._terms.pop(slot, None)) is not None:
            words.append(term.text)
            slot += padded(term.size) // 4
        return " . ".join(words), first

    def _loaded(self, expression: x.Payload | x.Meta | x.Ct | x.Fib) -> None:
        register = expression.dreg
        if register is None:
            raise LookupError
        bare = replace(expression, dreg=0 if isinstance(expression, x.Fib) else None)
        if bare in NAMES:
            name = NAMES[bare]
            if FIELDS[name].type == TCP_FLAGS and self.words[-1:] == [_TCP]:
                self.words.pop()  # nft implies this match
            self._load(register, _Term(name, FIELDS[name].type, FIELDS[name].size, load=bare))
            return
        if not isinstance(bare, x.Payload):
            raise LookupError
        whole = self._whole(bare)
        self._load(register, _Term(whole, FIELDS[whole].type, bare.length, load=bare))

    _ct = _fib = _loaded

    def _whole(self, part: x.Payload) -> str:
        """Return the name of the address field from which an expression loads the first bytes to match a prefix."""
        for name in (f"{self._ip} saddr", f"{self._ip} daddr"):
            load = FIELDS[name].load
            if isinstance(load, x.Payload) and (load.base, load.offset) == (part.base, part.offset):
                return name
        raise LookupError

    def _payload(self, expression: x.Payload) -> None:
        if expression.sreg is None:
            self._loaded(expression)
            return
        value, _ = self._key(expression.sreg)
        target = NAMES[x.Payload(expression.base, expression.offset, expression.length)]
        self.words.append(f"{target} set {value}")

    def _meta(self, expression: x.Meta) -> None:
        if expression.sreg is None:
            self._loaded(expression)
            return
        term = self._terms.pop(_slot(expression.sreg))
        target = NAMES[x.Meta(expression.key)]
        if not term.mask:
            value = term.load.value if isinstance(term.load, x.Immediate) else None
            right = shown(FIELDS[target].type, value) if isinstance(value, bytes) else term.text
            self.words.append(f"{target} set {right}")
            return
        sign = "^" if term.mask == _MASK else "|"
        self.words.append(f"{target} set {term.text} {sign} {shown(term.type, term.xor)}")

    def _byteorder(self, expression: x.Byteorder) -> None:
        if _slot(expression.sreg) not in self._terms:
            raise LookupError

    def _numgen(self, expression: x.Numgen) -> None:
        kind = "random" if expression.type else "inc"
        offset = f" offset {expression.offset}" if expression.offset else ""
        words = f"numgen {kind} mod {expression.modulus}{offset}"
        self._load(expression.dreg, _Term(words, INTEGER, 4))

    def _hash(self, expression: x.Hash) -> None:
        if expression.sreg is None or expression.type or expression.offset:
            raise LookupError
        key, _ = self._key(expression.sreg)
        seed = f" seed {expression.seed:#x}" if expression.seed is not None else ""
        self._load(expression.dreg, _Term(f"jhash {key} mod {expression.modulus}{seed}", INTEGER, 4))

    def _bitwise(self, expression: x.Bitwise) -> None:
        term = self._terms[_slot(expression.sreg)]
        if expression.op or expression.sreg2 is not None:
            raise LookupError
        self._load(expression.dreg, term._replace(mask=expression.mask, xor=expression.xor))

    def _lookup(self, expression: x.Lookup) -> None:
        words, first = self._key(expression.sreg)
        if isinstance(expression.set, x.Inline):
            place = _inline(expression.set, first.type, first.size)
        else:
            place = f"@{expression.set}"
        if expression.dreg is None:
            self.words.append(f"{words} {'!= ' if expression.flags else ''}{place}")
        elif expression.dreg == x.VERDICT:
            self.words.append(f"{words} vmap {place}")
        else:
            self._load(expression.dreg, _Term(f"{words} map {place}", PORT, 4))

    def _cmp(self, expression: x.Compare) -> None:
        term = self._terms.pop(_slot(expression.sreg))
        sign = x.OPERATORS[expression.op]
        if term.mask:
            self.words.append(_masked(term, sign, expression.value))
            return
        value = expression.value
        if isinstance(term.load, x.Payload) and term.size < FIELDS[term.text].size:
            value = value.ljust(FIELDS[term.text].size, b"\0")
            right = f"{shown(term.type, value)}/{8 * term.size}"
        else:
            right = shown(term.type, value)
        implied = sign == "==" and term.type != TCP_FLAGS
        self.words.append(f"{term.text} {'' if implied else sign + ' '}{right}")

    def _immediate(self, expression: x.Immediate) -> None:
        value = expression.value
        if not isinstance(value, bytes):
            self.words.append(_verdict(value))
        elif len(value) == _PORT_SIZE:
            self._load(expression.dreg, _Term(shown(PORT, value), PORT, _PORT_SIZE))
        else:
            address = unpack(value)
            self._load(expression.dreg, _Term(f"[{address}]" if ":" in address else address, 0, 16, load=expression))

    def _nat(self, expression: x.Nat) -> None:
        kind = "dnat" if expression.type else "snat"
        if expression.address is None and expression.port is None:
            raise LookupError
        address = self._terms.pop(_slot(expression.address)).text if expression.address is not None else ""
        term = self._terms.pop(_slot(expression.port), None) if expression.port is not None else None
        port = term.text if term is not None else ""
        mapped = expression.port is not None and not port
        self.words.append(f"{kind} {self._ip} to {address}" if mapped else f"{kind} to {address}{port and f':{port}'}")

    def _redir(self, expression: x.Redirect) -> None:
        port = self._terms.pop(_slot(expression.port)).text if expression.port is not None else ""
        self.words.append(f"redirect to :{port}" if port else "redirect")

    def _limit(self, expression: x.Limit) -> None:
        over = "over " if expression.flags else ""
        rate, burst = (_amount(n) if expression.type else n for n in (expression.rate, expression.burst))
        usual = expression.burst == (0 if expression.type else _BURST)
        more = "" if usual else f" burst {burst}{'' if expression.type else ' packets'}"
        self.words.append(f"limit rate {over}{rate}/{_UNITS[expression.unit]}{more}")

    def _dynset(self, expression: x.Update) -> None:
        key, _ = self._key(expression.key)
        word = ("add", "update", "delete")[expression.op]
        timeout = f" timeout {duration(expression.timeout)}" if expression.timeout else ""
        data = f" : {self._key(expression.data)[0]}" if expression.data is not None else ""
        self.words.append(f"{word} @{expression.set} {{ {key}{timeout}{data} }}")


def _slot(register: int) -> int:
    return register - 8 if register >= 8 else 4 * (register - 1)


def _verdict(verdict: x.RuleVerdict) -> str:
    word = _VERDICTS.get(verdict.code, f"[ verdict {verdict.code} ]")
    return f"{word} {verdict.chain}" if verdict.chain else word


def _inline(inline: x.Inline, kind: int, size: int) -> str:
    entries = []
    for key, data in sorted(inline.elements, key=lambda element: _number(kind, element[0][:size])):
        value = f" : {_verdict(data)}" if inline.data_type == VERDICTS and isinstance(data, x.RuleVerdict) else ""
        entries.append(f"{shown(kind, key[:size])}{value}")
    return f"{{ {', '.join(entries)} }}"


def _number(kind: int, key: bytes) -> int:
    return int.from_bytes(key, "little" if kind == INTEGER else "big")


def _masked(term: _Term, sign: str, value: bytes) -> str:
    bits = shown(term.type, term.mask)
    if term.text in {"ct state", "ct status", "tcp flags"}:
        if not any(value):
            return f"{term.text} {'! ' if sign == '==' else ''}{bits}"
        if term.type == TCP_FLAGS:
            return f"{term.text} {'' if sign == '==' else sign + ' '}{shown(term.type, value)} / {bits}"
        return f"{term.text} & {bits} {sign} {shown(term.type, value)}"
    if isinstance(term.load, x.Payload):
        length = bin(int.from_bytes(term.mask, "big")).count("1")
        return f"{term.text} {'' if sign == '==' else sign + ' '}{shown(term.type, value)}/{length}"
    return f"{term.text} & {bits} {sign} {shown(term.type, value)}"


def _amount(count: int) -> str:
    size, unit = next(((s, u) for s, u in ((1 << 20, "mbytes"), (1 << 10, "kbytes")) if count % s == 0), (1, "bytes"))
    return f"{count // size} {unit}"


def duration(milliseconds: int) -> str:
    """Return a time in nft's notation: '1h30m', '5s'."""
    seconds, rest = divmod(milliseconds, 1000)
    found = ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        number, seconds = divmod(seconds, size)
        found += f"{number}{unit}" if number else ""
    return found + (f"{rest}ms" if rest else "") or "0s"
