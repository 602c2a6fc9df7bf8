"""Reads and writes rules of iptables-nft over netlink, without the iptables-nft commands.

The command iptables-nft-restore needs a new process, and reads all chains of a table before it changes one chain. Input
with rules that are not for Services, or that the kernel refuses, is still passed to the command, which also creates
missing tables and has better error messages.

Rules have the same form as those of iptables-nft. Matches are xtables extensions (nft_compat), because every
iptables-nft since 1.8.0 can read them; newer releases write native expressions for some matches. Sources:
iptables/nft*.c and extensions/ of iptables 1.8.9;
include/uapi/linux/netfilter/{nf_tables,nf_tables_compat,xt_*,nf_nat}.h of Linux 6.18."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final, Self

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfnetlink, nfta
from kubeproxy.kernel.nftables.expressions import PacketCount, Rule, parse
from kubeproxy.kernel.nftables.nfnetlink import Transactions
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.kernel.xtables.xtables_lock import NOT_WAITED, Waited
from kubeproxy.model.addresses import PROTOCOLS, Family, pack

_CHAIN: Final = 4096
"""The assumed size in bytes of the messages of a chain with its rules. An endpoint's chain needs 1,200 bytes; only
chains with many rules need more."""

_END: Final = "COMMIT\n"

log = logging.getLogger("kubeproxy.iptables")


class RuleWriter:
    """Changes the rules of one variant and family; `transactions` is None for the legacy variant."""

    def __init__(self, commands: Commands, transactions: Transactions | None) -> None:
        self._commands = commands
        self._transactions = transactions

    @classmethod
    def open(cls, commands: Commands) -> Self:
        """Return a RuleWriter for the caller's network namespace. Raises NetlinkError."""
        return cls(commands, Transactions.open() if commands.uses_nft else None)

    @property
    def chains_at_once(self) -> int:
        """The best number of chains to change together. Over netlink, such a change takes about 0.4 s, because at
        the end of a transaction the kernel checks all rules of the table."""
        return min(10_000, max(1, self._transactions.room // _CHAIN)) if self._transactions is not None else 1000

    def close(self) -> None:
        """Close the socket."""
        if self._transactions is not None:
            self._transactions.close()

    def prepared(self, text: str) -> Callable[[], Waited]:
        """Return a function that applies `text`, an input of `iptables-restore --noflush`. The function changes each
        table atomically, and keeps the chains that `text` does not name. The function returns how long another program
        held the lock, and raises RestoreError or ApplyError."""
        if self._transactions is not None:
            try:
                tables = encode(text, self._commands.family)
                return partial(self._commit, self._transactions, tables, text)
            except Unknown as unknown:
                log.debug("Left to %s: %s", self._commands.name, unknown)
        return partial(self._commands.restore, [text])

    def _commit(self, transactions: Transactions, tables: list[list[bytes]], text: str) -> Waited:
        done = 0
        try:
            for messages in tables:
                transactions.commit(messages)
                done += 1
        except nl.NetlinkError as error:
            log.debug("Left to %s: %s", self._commands.name, error)
            # The tables before the refused table are committed. The command gets only the rest of the input, because
            # the caller counts one transaction per table.
            return self._commands.restore(text.split(_END, done)[-1:])
        return NOT_WAITED


def expressions(family: int, table: str, chain: str) -> list[bytes]:
    """Return the packed expressions of each rule in a chain; [] if the chain is missing. Raises NetlinkError."""
    with TableReader(family, table, nl.Netlink.open()) as reader:
        return [rule.raw for rule in reader.rules(chain)]


def leads_to(rule: bytes, target: str) -> bool:
    """Return whether a rule, given as packed expressions, jumps to a chain."""
    return target.encode() + b"\0" in rule


def has_jump(family: int, table: str, chain: str, target: str) -> bool:
    """Return whether a rule of a chain jumps to a target chain. Raises NetlinkError."""
    return any(leads_to(rule, target) for rule in expressions(family, table, chain))


@nl.understood("rules of nf_tables")
def uncounted(rule: bytes) -> Rule:
    """Return a rule without the expressions that count packets."""
    return tuple(expression for expression in parse(rule) if not isinstance(expression, PacketCount))


class Unknown(Exception):  # noqa: N818 - not an error: then iptables-nft-restore applies the input
    """The input contains text that this module cannot encode; the exception's message quotes that text."""


def encode(text: str, family: Family) -> list[list[bytes]]:
    """Return, for each table in the input, its messages in order. Raises Unknown."""
    found: list[list[bytes]] = []
    table = _Table(family, "")
    line = ""
    try:
        for line in text.splitlines():
            if line.startswith("-A "):
                table.append(line)
            elif line.startswith(":"):
                table.make(line)
            elif line.startswith("-X "):
                table.messages.append(table.message(nfnetlink.DELETE_CHAIN, 0, line[3:]))
            elif line.startswith("*"):
                table = _Table(family, line[1:])
            elif line == "COMMIT":
                found.append(table.messages)
            else:
                raise Unknown(line)
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise Unknown(line) from error
    return found


class _Table:
    def __init__(self, family: Family, name: str) -> None:
        self.messages: list[bytes] = []
        self._family = family
        self._start = nl.netfilter_header(family) + nl.text_attribute(nfta.RULE_TABLE, name)

    def message(self, kind: int, flags: int, chain: str) -> bytes:
        """Pack a message about a chain or about all rules of the chain."""
        name = nfta.CHAIN_NAME if kind in (nfnetlink.NEW_CHAIN, nfnetlink.DELETE_CHAIN) else nfta.RULE_CHAIN
        return nl.message(kind, nl.NLM_F_REQUEST | flags, 0, self._start + nl.text_attribute(name, chain))

    def make(self, line: str) -> None:
        """Create a chain; empty an existing chain."""
        chain, _, rest = line[1:].partition(" ")
        if not rest.startswith("- "):
            raise Unknown(line)
        self.messages += (
            self.message(nfnetlink.NEW_CHAIN, nl.NLM_F_CREATE, chain),
            self.message(nfnetlink.DELETE_RULE, 0, chain),
        )

    def append(self, line: str) -> None:
        body, _, target = line.rpartition(" -j ")
        if not body:
            body, target = target, ""
        head, *matches = body.split(" -m ")
        chain, _, options = head[3:].partition(" ")
        before, compat = _head(options, self._family)
        parts = [before, *map(_match, matches), _COUNTER]
        if target:
            parts.append(_jump(target) if target.startswith("KUBE-") else _target(target, self._family))
        payload = self._start + nl.text_attribute(nfta.RULE_CHAIN, chain) + nl.nested(nfta.RULE_EXPRESSIONS, *parts)
        self.messages.append(nl.message(nfnetlink.NEW_RULE, _APPENDED, 0, payload + compat))


_APPENDED: Final = nl.NLM_F_REQUEST | nl.NLM_F_CREATE | nfnetlink.NLM_F_APPEND


# -- expressions of nf_tables ---------------------------------------------------------------------------------------


_IIFNAME, _L4PROTO = 6, 16  # enum nft_meta_keys
_REGISTER = 1  # NFT_REG_1
_NETWORK_HEADER = 1  # NFT_PAYLOAD_NETWORK_HEADER
_COUNTER: Final = x.pack(x.PacketCount())


def _compared(value: bytes, unequal: bool) -> bytes:
    return x.pack(x.Compare(_REGISTER, x.OPERATORS.index("!=" if unequal else "=="), value))


def _meta(key: int) -> bytes:
    return x.pack(x.Meta(key, _REGISTER))


def _verdict(code: int, chain: str = "") -> bytes:
    return x.pack(x.Immediate(x.VERDICT, x.RuleVerdict(code, chain)))


@lru_cache(maxsize=1024)
def _frame(length: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after a chain name of `length` bytes in a jump expression."""
    before, _, after = _verdict(x.JUMP, "x" * length).partition(b"x" * length)
    return before, after


def _jump(chain: str) -> bytes:
    name = chain.encode()
    before, after = _frame(len(name))
    return before + name + after


@lru_cache(maxsize=4096)
def _head(text: str, family: Family) -> tuple[bytes, bytes]:
    """Return the expressions of options outside of a match (-p, -s, -i ...), and the attribute with the protocol."""
    found: dict[str, bytes] = {}
    compat = b""
    unequal = False
    words = text.split(" ") if text else []
    options = iter(words)
    for option in options:
        if option == "!":
            unequal = True
            continue
        value = next(options, "")
        if option == "-p" and not unequal:
            found[option], compat = _protocol(value)
        elif option in ("-s", "-d"):
            found[option] = _address(option, value, unequal, family)
        elif option == "-i":
            name = value.encode()
            # If the final zero byte is missing, the comparison matches all names with this prefix.
            found[option] = _meta(_IIFNAME) + _compared(name[:-1] if name.endswith(b"+") else name + b"\0", unequal)
        else:
            raise Unknown(text)
        unequal = False
    return b"".join([found[option] for option in ("-i", "-p", "-s", "-d") if option in found]), compat


@lru_cache(maxsize=8)
def _protocol(word: str) -> tuple[bytes, bytes]:
    number = PROTOCOLS.get(word.upper())
    if number is None:
        raise Unknown(f"-p {word}")
    return _meta(_L4PROTO) + _compared(bytes([number]), False), nl.nested(
        nfta.RULE_COMPAT,
        nl.number_attribute(nfta.RULE_COMPAT_PROTO, number),
        nl.number_attribute(nfta.RULE_COMPAT_FLAGS, 0),
    )


_OFFSETS: Final = {(Family.IPV4, "-s"): 12, (Family.IPV4, "-d"): 16, (Family.IPV6, "-s"): 8, (Family.IPV6, "-d"): 24}


@lru_cache(maxsize=1024)
def _load(family: Family, option: str, prefix: int) -> bytes:
    size = family.address_size
    load = x.pack(x.Payload(_NETWORK_HEADER, _OFFSETS[family, option], size, _REGISTER))
    if prefix == 8 * size:
        return load
    mask = (((1 << prefix) - 1) << (8 * size - prefix)).to_bytes(size, "big")
    return load + x.pack(x.Bitwise(_REGISTER, _REGISTER, size, mask, bytes(size)))


_EQUAL: Final = {
    (size, unequal): _compared(bytes(size), unequal)[:-size] for size in (4, 16) for unequal in (False, True)
}


def _address(option: str, text: str, unequal: bool, family: Family) -> bytes:
    address, _, prefix = text.partition("/")
    value = pack(address)
    size = family.address_size
    if value is None or len(value) != size or not prefix.isdecimal() or int(prefix) > 8 * size:
        raise Unknown(f"{option} {text}")
    length = int(prefix)
    if length < 8 * size:  # the host bits are cleared, as in the kernel's comparison
        shift = 8 * size - length
        value = (int.from_bytes(value, "big") >> shift << shift).to_bytes(size, "big")
    return _load(family, option, length) + _EQUAL[size, unequal] + value


# -- matches and targets of xtables ----------------------------------------------------------------------------------


def _xt(kind: str, name: str, revision: int, info: bytes) -> bytes:
    """Pack a match or a target; the parameters are aligned to eight bytes (XT_ALIGN)."""
    info += bytes(-len(info) & 7)
    parts = nl.text_attribute(nfta.MATCH_NAME, name), nl.number_attribute(nfta.MATCH_REV, revision)
    return x.pack(x.Opaque(kind, b"".join(parts) + nl.attribute(nfta.MATCH_INFO, info)))


@lru_cache(maxsize=4096)
def _match(text: str) -> bytes:
    name, _, options = text.partition(" ")
    revision, known, packed = _MATCHES[name]
    found = known.fullmatch(options)
    if found is None:
        raise Unknown(f"-m {text}")
    return _xt("match", name, revision, packed(*found.groups()))


def _ports(port: str | None) -> bytes:
    return struct.pack("=4HI", 0, 65535, int(port or 0), int(port or 65535), 0)


def _sctp(port: str | None) -> bytes:
    flags = 2 if port else 0  # XT_SCTP_DEST_PORTS
    chunks = b"\xff\0\0" * 4
    return struct.pack("=4H256xI12sIII", int(port or 0), int(port or 65535), 0, 0, 0, chunks, 0, flags, 0)


def _recent(options: str) -> bytes:
    words = iter(options.split(" "))
    seconds, checks, name = 0, 0, ""
    for option in words:
        if option == "--seconds":
            seconds = int(next(words, ""))
        elif option == "--name":
            name = next(words, "")
        else:
            checks |= _RECENT[option]
    return struct.pack("=IIBB200sBx16s", seconds, 0, checks, 0, name.encode(), 0, b"\xff" * 16)


_RECENT: Final = {"--set": 2, "--rcheck": 1, "--reap": 32}  # XT_RECENT_SET, _CHECK, _REAP
_LOCAL: Final = {"src": (1 << 2, 0), "dst": (0, 1 << 2)}  # XT_ADDRTYPE_LOCAL
_PORT: Final = re.compile(r"(?:--dport (\d+))?")

_MATCHES: Final[Mapping[str, tuple[int, re.Pattern[str], Callable[..., bytes]]]] = {
    "comment": (0, re.compile(r'--comment "?([ !#-~]{,255})"?'), lambda text: text.encode().ljust(256, b"\0")),
    "addrtype": (1, re.compile("--(src|dst)-type LOCAL"), lambda side: struct.pack("=HHI", *_LOCAL[side], 0)),
    "statistic": (
        0,
        re.compile(r"--mode random --probability (\S+)"),
        lambda share: struct.pack("=HHI16x", 0, 0, round(float(share) * 0x80000000)),
    ),
    "recent": (1, re.compile("(.*)"), _recent),
    "nfacct": (0, re.compile(r"--nfacct-name (\S{1,31})"), lambda name: struct.pack("=32s8x", name.encode())),
    "tcp": (0, _PORT, _ports),
    "udp": (0, _PORT, _ports),
    "sctp": (0, _PORT, _sctp),
}
"""For each match: its revision, the known options, and a function that packs the operands of these options."""

_VERDICTS: Final = {"ACCEPT": _verdict(x.ACCEPT), "DROP": _verdict(x.DROP), "RETURN": _verdict(x.RETURN)}


def _target(text: str, family: Family) -> bytes:
    if (verdict := _VERDICTS.get(text)) is not None:
        return verdict
    name, _, options = text.partition(" ")
    if name == "DNAT" and options.startswith("--to-destination "):
        return _dnat(options.removeprefix("--to-destination "), family)
    if text == "REJECT":
        code = 3 if family is Family.IPV4 else 4  # IPT_ICMP_PORT_UNREACHABLE, IP6T_ICMP6_PORT_UNREACH
        return _xt("target", "REJECT", 0, struct.pack("=I", code))
    raise Unknown(f"-j {text}")


def _dnat(destination: str, family: Family) -> bytes:
    address, _, port = destination.rpartition(":")
    value = pack(address.strip("[]"))
    if value is None or len(value) != family.address_size:
        raise Unknown(f"-j DNAT --to-destination {destination}")
    ends = int(port).to_bytes(2, "big") * 2
    return _DNAT + (value.ljust(16, b"\0") * 2) + ends + bytes(8)


# NF_NAT_RANGE_MAP_IPS, NF_NAT_RANGE_PROTO_SPECIFIED
_DNAT: Final = _xt("target", "DNAT", 2, bytes(48))[:-48] + struct.pack("=I", 3)
