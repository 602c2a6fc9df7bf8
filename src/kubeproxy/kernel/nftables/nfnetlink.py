"""nf_tables over netlink: transactions of set elements, and reading tables, sets and their elements back.

Packs messages and speaks to the socket; what the elements mean is a backend's affair. Sources:
include/uapi/linux/netfilter/nf_tables.h and net/netfilter/nfnetlink.c of Linux 6.18.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.netlink.protocol import (
    ATTRIBUTE,
    HEADER,
    NETLINK_CAP_ACK,
    NETLINK_EXT_ACK,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    SOL_NETLINK,
    Netlink,
    NetlinkError,
    acknowledgement,
    attribute,
    attributes,
    grow_receive_buffer,
    grow_send_buffer,
    messages,
    nested,
    understood,
)
from kubeproxy.kernel.nftables import nfta

NETLINK_NETFILTER: Final = 12
SUBSYSTEM: Final = 10  # NFNL_SUBSYS_NFTABLES
NLM_F_CREATE: Final = 0x400
NLM_F_APPEND: Final = 0x800

NEW_TABLE: Final = SUBSYSTEM << 8 | 0
GET_TABLE: Final = SUBSYSTEM << 8 | 1
DELETE_TABLE: Final = SUBSYSTEM << 8 | 2
NEW_CHAIN: Final = SUBSYSTEM << 8 | 3
GET_CHAIN: Final = SUBSYSTEM << 8 | 4
DELETE_CHAIN: Final = SUBSYSTEM << 8 | 5
NEW_RULE: Final = SUBSYSTEM << 8 | 6
DELETE_RULE: Final = SUBSYSTEM << 8 | 8
GET_RULE: Final = SUBSYSTEM << 8 | 7
NEW_SET: Final = SUBSYSTEM << 8 | 9
GET_SET: Final = SUBSYSTEM << 8 | 10
DELETE_SET: Final = SUBSYSTEM << 8 | 11
NEW_ELEMENT: Final = SUBSYSTEM << 8 | 12
GET_ELEMENT: Final = SUBSYSTEM << 8 | 13
DELETE_ELEMENT: Final = SUBSYSTEM << 8 | 14
GET_GENERATION: Final = SUBSYSTEM << 8 | 16
NEW_OBJECT: Final = SUBSYSTEM << 8 | 18
GET_OBJECT: Final = SUBSYSTEM << 8 | 19
DELETE_OBJECT: Final = SUBSYSTEM << 8 | 20
NEW_FLOWTABLE: Final = SUBSYSTEM << 8 | 22
GET_FLOWTABLE: Final = SUBSYSTEM << 8 | 23
DELETE_FLOWTABLE: Final = SUBSYSTEM << 8 | 24
_BATCH_BEGIN: Final = 16
_BATCH_END: Final = 17

GENERIC: Final = struct.Struct("=BBH")
"""What every message begins with, struct nfgenmsg: family, version, resource id."""
_DORMANT: Final = 1  # NFT_TABLE_F_DORMANT
_INTERVAL_END: Final = 1  # NFT_SET_ELEM_INTERVAL_END

# A nested attribute's length has 16 bits; the list of a message's elements must stay under it.
_LIST_LIMIT: Final = 60_000
_SEND_BUFFER: Final = 512 << 20
_RECEIVE_BUFFER: Final = 16 << 20
_TIMEOUT: Final = 60.0  # seconds


def element_messages(
    kind: int, family: int, table: str, name: str, elements: Sequence[bytes], size: int = 0, set_id: int = 0
) -> list[bytes]:
    """Return the messages, without sequence numbers, that add (NEW_ELEMENT) or remove elements of one set.

    `size` is that of each element when they are all alike; `elements` may then hold pieces of several elements.
    `set_id` is the number under which the same transaction makes a set without a name.
    """
    flags = NLM_F_REQUEST | (NLM_F_CREATE if kind == NEW_ELEMENT else 0)
    where = in_set(family, table, name)
    if set_id:
        where += attribute(nfta.SET_ELEM_LIST_SET_ID, set_id.to_bytes(4, "big"))
    found = []
    for chunk in _cut(b"".join(elements), size) if size else _chunks(elements):
        payload = where + attribute(nfta.SET_ELEM_LIST_ELEMENTS | NLA_F_NESTED, chunk)
        found.append(HEADER.pack(HEADER.size + len(payload), kind, flags, 0, 0) + payload)
    return found


def in_set(family: int, table: str, name: str) -> bytes:
    """Return what a message about elements of a set begins with."""
    names = text_attribute(nfta.SET_ELEM_LIST_TABLE, table) + text_attribute(nfta.SET_ELEM_LIST_SET, name)
    return GENERIC.pack(family, 0, 0) + names


def text_attribute(kind: int, text: str) -> bytes:
    """Pack an attribute that holds a name."""
    return attribute(kind, text.encode(errors=nfta.NOT_TEXT) + b"\0")


def _cut(joined: bytes, size: int) -> Iterator[bytes]:
    step = _LIST_LIMIT // size * size
    for start in range(0, len(joined), step):
        yield joined[start : start + step]


def _chunks(elements: Sequence[bytes]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    used = 0
    for element in elements:
        if used + len(element) > _LIST_LIMIT:
            yield b"".join(chunk)
            chunk, used = [], 0
        chunk.append(element)
        used += len(element)
    if chunk:
        yield b"".join(chunk)


def table_removal(family: int, name: str) -> bytes:
    """Return the message that removes a table with all that is in it."""
    payload = GENERIC.pack(family, 0, 0) + attribute(1, name.encode() + b"\0")
    return HEADER.pack(HEADER.size + len(payload), DELETE_TABLE, NLM_F_REQUEST, 0, 0) + payload


def chain_removals(family: int, table: str, names: Iterable[str]) -> list[bytes]:
    """Return the messages that remove chains, which may lead to each other, with their rules."""
    chains = list(names)
    rules = [rules_removal(family, table, chain) for chain in chains]
    return [*rules, *(chain_removal(family, table, chain) for chain in chains)]


def rules_removal(family: int, table: str, chain: str) -> bytes:
    """Return the message that removes all rules of a chain."""
    names = text_attribute(nfta.RULE_TABLE, table) + text_attribute(nfta.RULE_CHAIN, chain)
    payload = GENERIC.pack(family, 0, 0) + names
    return HEADER.pack(HEADER.size + len(payload), DELETE_RULE, NLM_F_REQUEST, 0, 0) + payload


def chain_removal(family: int, table: str, chain: str) -> bytes:
    """Return the message that removes a chain, to which nothing leads any more."""
    names = text_attribute(nfta.CHAIN_TABLE, table) + text_attribute(nfta.CHAIN_NAME, chain)
    payload = GENERIC.pack(family, 0, 0) + names
    return HEADER.pack(HEADER.size + len(payload), DELETE_CHAIN, NLM_F_REQUEST, 0, 0) + payload


def rule_message(family: int, table: str, chain: str, expressions: bytes) -> bytes:
    """Return the message that appends a rule, of packed expressions as `Rule.raw` has them."""
    names = text_attribute(nfta.RULE_TABLE, table) + text_attribute(nfta.RULE_CHAIN, chain)
    payload = GENERIC.pack(family, 0, 0) + names + nested(nfta.RULE_EXPRESSIONS, expressions)
    flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_APPEND
    return HEADER.pack(HEADER.size + len(payload), NEW_RULE, flags, 0, 0) + payload


class Transactions:
    """The socket that commits batches. Kept open for the life of a backend."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._sequence = count(1)

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises NetlinkError."""
        try:
            opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, "cannot open an nf_tables socket") from error
        try:
            opened.bind((0, 0))
            opened.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
            opened.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
            grow_send_buffer(opened, _SEND_BUFFER)
            grow_receive_buffer(opened, _RECEIVE_BUFFER)
            opened.settimeout(_TIMEOUT)
        except OSError as error:
            opened.close()
            raise NetlinkError(error.errno or errno.EIO, "cannot set up an nf_tables socket") from error
        return cls(opened)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @property
    def port(self) -> int:
        """Return the number by which netlink knows this socket, in its network namespace."""
        return int(self._socket.getsockname()[0])

    @property
    def room(self) -> int:
        """Return how many bytes a transaction may have, about: less in a user namespace (net.core.wmem_max)."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def commit(self, parts: Sequence[bytes]) -> None:
        """Commit messages as one transaction: all of them or none.

        Raises NetlinkError with the first complaint of the kernel, whose `code` is its errno.
        """
        if not parts:
            return
        begin = next(self._sequence) & 0x7FFFFFFF
        resource = socket.htons(SUBSYSTEM)
        edge = HEADER.size + GENERIC.size
        head = HEADER.pack(edge, _BATCH_BEGIN, NLM_F_REQUEST, begin, 0) + GENERIC.pack(0, 0, resource)
        tail = HEADER.pack(edge, _BATCH_END, NLM_F_REQUEST, begin, 0) + GENERIC.pack(0, 0, resource)
        last = next(self._sequence) & 0x7FFFFFFF
        length, kind, flags, _, _ = HEADER.unpack_from(parts[-1])
        # The last message asks for the acknowledgement: kernels before 6.10 send none for the end of a batch.
        final = HEADER.pack(length, kind, flags | NLM_F_ACK, last, 0) + parts[-1][HEADER.size :]
        self._send(b"".join((head, *parts[:-1], final, tail)))
        try:
            self._settle(begin, last)
        except NetlinkError:
            self._forget()
            raise

    def generation(self) -> int:
        """Return the number of the ruleset's generation: every transaction that any program commits adds one."""
        sequence = next(self._sequence) & 0x7FFFFFFF
        payload = GENERIC.pack(0, 0, 0)
        self._send(HEADER.pack(HEADER.size + len(payload), GET_GENERATION, NLM_F_REQUEST, sequence, 0) + payload)
        while True:
            data = self._receive()
            for at in messages(data):
                if at.sequence == sequence and at.kind == NLMSG_ERROR:
                    raise NetlinkError(acknowledgement(data, at)[0], "cannot read the nf_tables generation")
                if at.sequence == sequence:
                    for kind, start, end in attributes(data, at.start + GENERIC.size, at.end):
                        if kind == nfta.GEN_ID:
                            return int.from_bytes(data[start:end], "big")

    def _send(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except OSError as error:
            limit = "raise net.core.wmem_max, or leave the user namespace" if error.errno == errno.EMSGSIZE else ""
            raise NetlinkError(error.errno or errno.EIO, "cannot send to nf_tables", limit) from error

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except OSError as error:
            code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or errno.EIO
            raise NetlinkError(code, "no answer from nf_tables") from error

    def _forget(self) -> None:
        """Read what a failed transaction left: its refusals may have been too many for the buffer.

        Until that is empty the kernel drops all further answers without a word (NETLINK_S_CONGESTED).
        """
        self._socket.setblocking(False)
        while True:
            try:
                self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    break
        self._socket.settimeout(_TIMEOUT)

    def _settle(self, begin: int, last: int) -> None:
        """Read answers until the last message's; an answer to the begin message ends the transaction as well."""
        complaint: tuple[int, str] | None = None
        while True:
            data = self._receive()
            for at in messages(data):
                if at.kind != NLMSG_ERROR:
                    continue
                code, text = acknowledgement(data, at)
                if code and complaint is None and at.sequence in (0, begin, last):
                    complaint = code, text
                if at.sequence == last or (at.sequence == begin and code):
                    if complaint is not None:
                        raise NetlinkError(complaint[0], "the kernel refused an nf_tables transaction", complaint[1])
                    return


# What follows reads through `link` where it is given. Who reads often should keep one: the kernel settles pending work
# whenever a netfilter socket is closed, and the next transaction of anybody waits 10 to 30 ms (nft_rcv_nl_event).


class TableHeader(NamedTuple):
    """A table as the kernel has it; another handle is another table. A dormant one does nothing.

    `owner` is the netlink port of the one socket that may change it (flags owner), 0 for a table that anybody may. It
    is a number that the socket's program chose, or that of its process.
    """

    handle: int
    comment: str
    dormant: bool
    owner: int = 0


@understood("nf_tables")
def table(family: int, name: str, link: Netlink | None = None) -> TableHeader | None:
    """Return a table, None when it is missing."""
    for data, start, end in _dump(GET_TABLE, family, b"", "nf_tables tables", link):
        found = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
        if found.get(nfta.TABLE_NAME) == name.encode() + b"\0":
            handle, flags, owner = (
                int.from_bytes(found.get(k, b""), "big")
                for k in (nfta.TABLE_HANDLE, nfta.TABLE_FLAGS, nfta.TABLE_OWNER)
            )
            return TableHeader(handle, _comment(found.get(nfta.TABLE_USERDATA, b"")), bool(flags & _DORMANT), owner)
    return None


def _comment(userdata: bytes) -> str:
    """Return the comment in a table's user data: type 0 of libnftnl's type-length-value list."""
    if len(userdata) >= 2 and userdata[0] == 0:
        return userdata[2 : 2 + userdata[1]].rstrip(b"\0").decode(errors="replace")
    return ""


class Rule(NamedTuple):
    """A rule's chain and handle; `raw` are its expressions as the kernel sent them."""

    chain: str
    handle: int
    raw: bytes


@understood("nf_tables")
def rules(family: int, table_name: str, link: Netlink | None = None, chain: str = "") -> list[Rule]:
    """Return the rules of a table, or of one of its chains, in order. Raises NetlinkError."""
    request = text_attribute(nfta.RULE_TABLE, table_name)
    if chain:
        request += text_attribute(nfta.RULE_CHAIN, chain)
    found = []
    for data, start, end in _dump(GET_RULE, family, request, f"rules of {chain}" if chain else "nf_tables rules", link):
        parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
        name = parts[nfta.RULE_CHAIN].rstrip(b"\0").decode(errors=nfta.NOT_TEXT)
        handle = int.from_bytes(parts[nfta.RULE_HANDLE], "big")
        found.append(Rule(name, handle, parts.get(nfta.RULE_EXPRESSIONS, b"")))
    return found


def rule_handles(family: int, table_name: str, link: Netlink | None = None) -> tuple[int, ...]:
    """Return the handles of a table's rules in order: any rule added, replaced or removed changes them."""
    return tuple(rule.handle for rule in rules(family, table_name, link))


def chains(family: int, table_name: str, link: Netlink | None = None) -> frozenset[str]:
    """Return the names of a table's chains."""
    return frozenset(_names(GET_CHAIN, family, table_name, nfta.CHAIN_NAME, "nf_tables chains", link))


def has_chain(family: int, table_name: str, chain: str) -> bool:
    """Return whether a table has a chain; costs the same whatever else is in there. Raises NetlinkError."""
    request = text_attribute(nfta.CHAIN_TABLE, table_name) + text_attribute(nfta.CHAIN_NAME, chain)
    with Netlink.open(NETLINK_NETFILTER) as link:
        try:
            link.ask(GET_CHAIN, GENERIC.pack(family, 0, 0) + request, f"chain {chain}")
        except NetlinkError as error:
            if error.code != errno.ENOENT:
                raise
            return False
    return True


def _names(
    kind: int, family: int, table_name: str, name_attribute: int, what: str, link: Netlink | None
) -> Iterator[str]:
    wanted, asked = table_name.encode() + b"\0", (nfta.CHAIN_TABLE, name_attribute)
    with understood(what):
        for data, start, end in _dump(kind, family, b"", what, link):
            found = {k: data[s:e] for k, s, e in attributes(data, start, end) if k in asked}
            if found.get(nfta.CHAIN_TABLE) == wanted:
                yield found[name_attribute].rstrip(b"\0").decode(errors=nfta.NOT_TEXT)


class Element(NamedTuple):
    """An element as the kernel has it: packed key and data (a verdict's chain name for verdict maps).

    Times are in milliseconds, 0 where the set has none. The key of an interval is its first value and its last one; in
    a set of single values it is two elements, of which the second `ends` it: it has the first value behind.
    """

    key: bytes
    data: bytes
    timeout: int
    expires: int
    ends: bool = False


def elements(family: int, table_name: str, set_name: str, link: Netlink | None = None) -> Iterator[Element]:
    """Yield the elements of a set. Raises NetlinkError, with code ENOENT when the set is missing."""
    for data, start, end in element_lists(family, table_name, set_name, link):
        for _, first, last in attributes(data, start, end):
            yield element_of(data, first, last)


def element_lists(
    family: int, table_name: str, set_name: str, link: Netlink | None = None
) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of the lists of elements in a dump of a set. Raises NetlinkError as `elements`."""
    request = text_attribute(nfta.SET_ELEM_LIST_TABLE, table_name) + text_attribute(nfta.SET_ELEM_LIST_SET, set_name)
    for data, start, end in _dump(GET_ELEMENT, family, request, f"elements of {set_name}", link):
        for kind, s, e in attributes(data, start, end):
            if kind == nfta.SET_ELEM_LIST_ELEMENTS:
                yield data, s, e


def element_of(data: bytes, start: int, end: int) -> Element:
    """Return the element whose attributes are in data[start:end]."""
    key = end_key = value = b""
    timeout = expires = flags = 0
    for kind, s, e in attributes(data, start, end):
        if kind == nfta.SET_ELEM_KEY:
            key = data[s + ATTRIBUTE.size : e]
        elif kind == nfta.SET_ELEM_DATA:
            value = _value(data, s, e)
        elif kind == nfta.SET_ELEM_KEY_END:
            end_key = data[s + ATTRIBUTE.size : e]
        elif kind == nfta.SET_ELEM_TIMEOUT:
            timeout = int.from_bytes(data[s:e], "big")
        elif kind == nfta.SET_ELEM_EXPIRATION:
            expires = int.from_bytes(data[s:e], "big")
        elif kind == nfta.SET_ELEM_FLAGS:
            flags = int.from_bytes(data[s:e], "big")
    return Element(key + end_key, value, timeout, expires, bool(flags & _INTERVAL_END))


def _value(data: bytes, start: int, end: int) -> bytes:
    for kind, s, e in attributes(data, start, end):
        if kind == nfta.DATA_VALUE:
            return data[s:e]
        for inner, first, last in attributes(data, s, e):
            if inner == nfta.VERDICT_CHAIN:
                return data[first:last].rstrip(b"\0")
    return b""


def _dump(kind: int, family: int, request: bytes, what: str, link: Netlink | None) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of the attributes of each entry; without a socket to use, through one of its own."""
    payload = GENERIC.pack(family, 0, 0) + request
    if link is not None:
        buffers = link.dump_all(kind, payload, what)
    else:
        with Netlink.open(NETLINK_NETFILTER) as own:
            buffers = own.dump_all(kind, payload, what)
    for data in buffers:
        for at in messages(data):
            if at.kind >> 8 == SUBSYSTEM:
                yield data, at.start + GENERIC.size, at.end
