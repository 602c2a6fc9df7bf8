"""nf_tables over netlink: commits transactions, and reads tables, their rules and the names of their chains. Sources:
include/uapi/linux/netfilter/nf_tables.h and net/netfilter/nfnetlink.c of Linux 6.18."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.netlink.protocol import parts
from kubeproxy.kernel.nftables import nfta

SUBSYSTEM: Final = 10  # NFNL_SUBSYS_NFTABLES
NLM_F_APPEND: Final = 0x800
CREATE: Final = nl.NLM_F_REQUEST | nl.NLM_F_CREATE

NEW_TABLE, GET_TABLE, DELETE_TABLE = SUBSYSTEM << 8 | 0, SUBSYSTEM << 8 | 1, SUBSYSTEM << 8 | 2
NEW_CHAIN, GET_CHAIN, DELETE_CHAIN = SUBSYSTEM << 8 | 3, SUBSYSTEM << 8 | 4, SUBSYSTEM << 8 | 5
NEW_RULE, GET_RULE, DELETE_RULE = SUBSYSTEM << 8 | 6, SUBSYSTEM << 8 | 7, SUBSYSTEM << 8 | 8
NEW_SET, GET_SET, DELETE_SET = SUBSYSTEM << 8 | 9, SUBSYSTEM << 8 | 10, SUBSYSTEM << 8 | 11
NEW_ELEMENT, GET_ELEMENT, DELETE_ELEMENT = SUBSYSTEM << 8 | 12, SUBSYSTEM << 8 | 13, SUBSYSTEM << 8 | 14
_GET_GENERATION: Final = SUBSYSTEM << 8 | 16
NEW_OBJECT, GET_OBJECT, DELETE_OBJECT = SUBSYSTEM << 8 | 18, SUBSYSTEM << 8 | 19, SUBSYSTEM << 8 | 20
NEW_FLOWTABLE, GET_FLOWTABLE, DELETE_FLOWTABLE = SUBSYSTEM << 8 | 22, SUBSYSTEM << 8 | 23, SUBSYSTEM << 8 | 24
_BATCH_BEGIN, _BATCH_END = 16, 17

GENERIC: Final = struct.Struct("=BBH")
"""struct nfgenmsg, the start of each message: family, version, resource id."""
_SEND_BUFFER, _RECEIVE_BUFFER = 512 << 20, 16 << 20
_TIMEOUT: Final = 60.0  # seconds
_TRANSACTION: Final = "an nf_tables transaction"


def nft_message(kind: int, family: int, payload: bytes, flags: int = nl.NLM_F_REQUEST) -> bytes:
    """Pack a message for `Transactions.commit`, which sets the sequence numbers."""
    return nl.message(kind, flags, 0, nl.netfilter_header(family) + payload)


def exclusive(message: bytes) -> bytes:
    """Set NLM_F_EXCL in a message, so that the kernel refuses the message (EEXIST) if the object exists."""
    length, kind, flags, *_ = nl.HEADER.unpack_from(message)
    return nl.HEADER.pack(length, kind, flags | nl.NLM_F_EXCL, 0, 0) + message[nl.HEADER.size :]


@lru_cache(1024)
def names(table: str, name: str, number: int = 2) -> bytes:
    """Pack two attributes: attribute 1 with the name of a table, and attribute `number` with the name of an object in
    it."""
    return nl.text_attribute(1, table) + nl.text_attribute(number, name)


class Transactions(nl.Netlink):
    """The socket that commits batches. A backend keeps its socket open."""

    @classmethod
    def open(cls, protocol: int = nl.NETLINK_NETFILTER) -> Self:
        """Open a socket in the caller's network namespace. Raises NetlinkError."""
        opened = nl.open_socket(protocol, _RECEIVE_BUFFER)
        nl.grow_buffer(opened, socket.SO_SNDBUF, _SEND_BUFFER)
        opened.settimeout(_TIMEOUT)
        return cls(protocol, opened)

    @property
    def port(self) -> int:
        """The netlink port of this socket in its network namespace."""
        return int(self._socket.getsockname()[0])

    @property
    def room(self) -> int:
        """The approximate maximum size of a transaction in bytes. net.core.wmem_max limits it in a user namespace."""
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def commit(self, parts: Sequence[bytes]) -> None:
        """Commit messages as one atomic transaction. Raises NetlinkError with the kernel's first refusal."""
        if not parts:
            return
        begin, last = next(self._sequence), next(self._sequence)
        subsystem = GENERIC.pack(0, 0, socket.htons(SUBSYSTEM))
        head, tail = (nl.message(kind, nl.NLM_F_REQUEST, begin, subsystem) for kind in (_BATCH_BEGIN, _BATCH_END))
        length, kind, flags, _, _ = nl.HEADER.unpack_from(parts[-1])
        # The last message requests an acknowledgement, because kernels before 6.10 do not acknowledge the end of a
        # batch.
        final = nl.HEADER.pack(length, kind, flags | nl.NLM_F_ACK, last, 0) + parts[-1][nl.HEADER.size :]
        self._send(b"".join((head, *parts[:-1], final, tail)), _TRANSACTION)
        try:
            self._settle(begin, last)
        except nl.NetlinkError:
            nl.discard(self._socket)
            raise

    def generation(self) -> int:
        """Return the ruleset's generation number, which each transaction of any program increments."""
        (place,) = self.ask(_GET_GENERATION, nl.netfilter_header(), "the nf_tables generation")
        return int.from_bytes(parts(*place)[nfta.GEN_ID], "big")

    def _settle(self, begin: int, last: int) -> None:
        """Read the answers up to the answer to the last message. A refusal of the begin message ends the transaction as
        well."""
        complaint: tuple[int, str] | None = None
        while True:
            data = self._read(_TRANSACTION)
            for at in nl.messages(data):
                if at.kind != nl.NLMSG_ERROR:
                    continue
                code, text = nl.acknowledgement(data, at)
                if code and complaint is None and at.sequence in (0, begin, last):
                    complaint = code, text
                if at.sequence == last or (at.sequence == begin and code):
                    if complaint is not None:
                        raise nl.NetlinkError(complaint[0], f"the kernel refused {_TRANSACTION}", complaint[1])
                    return


class TableHeader(NamedTuple):
    """A table. A table that is deleted and created again has another handle. A dormant table has no effect. `owner` is
    the netlink port of the only socket that may change the table (flag owner); 0 if every socket may change the table.
    A program can choose its socket's port; the default is the process ID."""

    handle: int
    comment: str
    dormant: bool
    owner: int = 0


class Rule(NamedTuple):
    """A rule's chain and handle; `raw` are its packed expressions."""

    chain: str
    handle: int
    raw: bytes


def has_chain(family: int, table_name: str, chain: str) -> bool:
    """Return whether a table contains a chain, without a dump of all chains. Raises NetlinkError."""
    with nl.Netlink.open() as link:
        try:
            request = nl.netfilter_header(family) + names(table_name, chain, nfta.CHAIN_NAME)
            link.ask(GET_CHAIN, request, f"chain {chain}")
        except nl.NetlinkError as error:
            if error.code != errno.ENOENT:
                raise
            return False
    return True


def dump(kind: int, family: int, request: bytes, what: str, link: nl.Netlink) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of the attributes of each entry of a dump. Raises NetlinkError."""
    return nl.answers(link.dump_all(kind, nl.netfilter_header(family) + request, what), GENERIC.size)
