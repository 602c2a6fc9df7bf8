"""Netlink for all its families: headers, attributes, acknowledgements, dumps, batches of requests. Sources: netlink(7),
include/uapi/linux/netlink.h of Linux 6.18, RFC 3549."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any, Final, NamedTuple, Self

from kubeproxy.errors import ApplyError

NETLINK_ROUTE, NETLINK_NETFILTER, NETLINK_GENERIC = 0, 12, 16

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR, NLM_F_DUMP = 0x1, 0x4, 0x10, 0x300
NLM_F_EXCL, NLM_F_CREATE, NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x200, 0x400, 0x100, 0x200

NLMSG_ERROR, NLMSG_DONE = 2, 3
_FIRST_OF_FAMILIES: Final = 16  # NLMSG_MIN_TYPE

NLA_F_NESTED: Final = 0x8000
NLA_TYPE_MASK: Final = 0x3FFF

SOL_NETLINK: Final = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK = 10, 11

_FORCED: Final = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}  # SO_SNDBUFFORCE, SO_RCVBUFFORCE

_NLMSGERR_ATTR_MSG, _NLMSGERR_ATTR_OFFS = 1, 2

HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_CODE: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("=I")

# Since Linux 4.10 a dump's datagrams are as large as the reader's buffer, but at most 32 KiB (netlink_recvmsg).
READ_SIZE: Final = 64 * 1024
_RECEIVE_BUFFER: Final = 4 * 1024 * 1024
_TIMEOUT: Final = 30.0
_DUMP_ATTEMPTS: Final = 10
# The maximum number of requests per send. All answers to one send must fit into the socket's receive buffer, which has
# 416 KiB in a user namespace (twice the default of net.core.rmem_max); the kernel counts about 1 KiB per answer or
# refusal.
_BATCH: Final = 400
_PADDING: Final = (b"", b"\0\0\0", b"\0\0", b"\0")
"""The padding of a payload to a multiple of four bytes, by its length modulo 4."""
_SUCCESS: Final = (0, "")
_SEQUENCES: Final = 0x7FFFFFFF
"""The largest sequence number; the next number is 0."""
# The maximum size of a send, which must fit into the socket's send buffer: 208 KiB by default.
_BATCH_BYTES: Final = 128 * 1024
_NAMED_REFUSALS: Final = 3


def errno_text(code: int) -> str:
    """Return the system's text for an errno; 'error N' for a number above MAX_ERRNO (linux/err.h)."""
    return os.strerror(code) if 0 < code < 4096 else f"error {code}"


class NetlinkError(ApplyError):
    """The kernel refused a request. `code` is the errno; the text includes the extended acknowledgement, if any."""

    def __init__(self, code: int, what: str, detail: str = "") -> None:
        self.code = code
        super().__init__(f"{what}: {errno_text(code)}" + (f" ({detail})" if detail else ""))


class DumpInterruptedError(ApplyError):
    """The table changed during its dump (NLM_F_DUMP_INTR), so entries may be missing. Callers can repeat the dump."""


class Message(NamedTuple):
    """A message inside a received buffer: fields of its header, and the start and end offsets of its payload."""

    kind: int
    flags: int
    sequence: int
    start: int
    end: int


class Inquiry(NamedTuple):
    """The answer to a request: an errno or 0, the error's text, and the messages of data as (buffer, start, end)."""

    code: int
    text: str
    answers: Sequence[tuple[bytes, int, int]]


_Batch = tuple[list[int], dict[int, tuple[int, str]], dict[int, list[tuple[bytes, int, int]]]]
"""The sequence numbers of one send; errors (as in Inquiry) and messages of data by sequence number."""


class RefusedError(ApplyError):
    """The kernel refused some objects of a batch, and all other objects are in effect. `refused` contains the refused
    objects with their errors. The text contains the first three errors and the number of further errors."""

    def __init__(self, refused: Sequence[tuple[Any, NetlinkError]]) -> None:
        self.refused = list(refused)
        more = len(refused) - _NAMED_REFUSALS
        errors = "; ".join(str(error) for _, error in refused[:_NAMED_REFUSALS])
        super().__init__(errors + (f"; and {more} more" if more > 0 else ""))


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Convert an error of a parser about a message's layout to an ApplyError that contains `what`. With this context
    manager or decorator a parser need not check that each attribute is present."""
    try:
        yield
    except (struct.error, LookupError, ValueError) as error:
        raise ApplyError(f"the kernel describes {what} in an unknown layout ({error!r})") from error


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack one attribute, padded to four bytes."""
    length = 4 + len(payload)
    return ATTRIBUTE.pack(length, kind) + payload + _PADDING[length & 3]


def nested(kind: int, *attributes: bytes) -> bytes:
    """Pack an attribute that contains packed attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def number_attribute(kind: int, value: int, size: int = 4) -> bytes:
    """Pack an attribute that contains a number in network byte order."""
    return attribute(kind, value.to_bytes(size, "big"))


def host_number(payload: bytes) -> int:
    """Return the number in an attribute's payload in the byte order of this machine; 0 if the payload is empty."""
    return int.from_bytes(payload, sys.byteorder)


def text_attribute(kind: int, text: str) -> bytes:
    """Pack an attribute that contains a name; the inverse of `text_of`."""
    return attribute(kind, text.encode(errors="surrogateescape") + b"\0")


def text_of(payload: bytes) -> str:
    """Return the name in an attribute's payload. A name may contain any bytes, which `text_attribute` restores."""
    return payload.rstrip(b"\0").decode(errors="surrogateescape")


def netfilter_header(family: int = 0) -> bytes:
    """Pack struct nfgenmsg, which follows the netlink header in each message of netfilter's subsystems."""
    return bytes((family, 0, 0, 0))


def message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    """Pack one message, padded to four bytes; the kernel sets the port id."""
    length = HEADER.size + len(payload)
    return HEADER.pack(length, kind, flags, sequence, 0) + payload + _PADDING[length & 3]


def attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type without flag bits, payload start, payload end) of the attributes in data[start:end], without copies.
    Raises ApplyError when a length exceeds the data."""
    while start + 4 <= end:
        length, kind = ATTRIBUTE.unpack_from(data, start)
        if length < 4 or start + length > end:
            raise _malformed(kind, length)
        yield kind & NLA_TYPE_MASK, start + 4, start + length
        start += (length + 3) & ~3


def parts(data: bytes, start: int = 0, end: int | None = None) -> dict[int, bytes]:
    """Return the payloads of the attributes in data[start:end] by type. Raises ApplyError like `attributes`. `parts`
    does not call `attributes`, for speed: a read of a table makes 4,000 calls."""
    found: dict[int, bytes] = {}
    end = len(data) if end is None else end
    while start + 4 <= end:
        length, kind = ATTRIBUTE.unpack_from(data, start)
        if length < 4 or start + length > end:
            raise _malformed(kind, length)
        found[kind & NLA_TYPE_MASK] = data[start + 4 : start + length]
        start += (length + 3) & ~3
    return found


def numbers(data: bytes, start: int = 0, end: int | None = None) -> dict[int, int]:
    """Return the attributes in data[start:end] by type, as numbers in network byte order. Raises ApplyError."""
    return {kind: int.from_bytes(value, "big") for kind, value in parts(data, start, end).items()}


def _malformed(kind: int, length: int) -> ApplyError:
    return ApplyError(f"malformed netlink attribute of type {kind & NLA_TYPE_MASK}: length {length}")


def find(data: bytes, start: int, end: int, *path: int) -> tuple[int, int] | None:
    """Return the start and end of the payload of the first attribute at a path of types; None if it is missing."""
    for kind in path:
        place = next((place[1:] for place in attributes(data, start, end) if place[0] == kind), None)
        if place is None:
            return None
        start, end = place
    return start, end


def messages(data: bytes) -> Iterator[Message]:
    """Yield the messages of one received buffer, without copies. Raises ApplyError when a length exceeds the data."""
    offset, size = 0, len(data)
    while offset + HEADER.size <= size:
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        if length < HEADER.size or offset + length > size:
            raise ApplyError(f"malformed netlink message of type {kind}: length {length}, {size - offset} bytes left")
        yield Message(kind, flags, sequence, offset + HEADER.size, offset + length)
        offset += (length + 3) & ~3


def answers(buffers: Iterable[bytes], header: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (buffer, start, end) of each message's attributes, except netlink's control messages. `header` is the size
    of the family's header, which precedes the attributes. Raises ApplyError like `messages`."""
    for data in buffers:
        for at in messages(data):
            if at.kind >= _FIRST_OF_FAMILIES:
                yield data, at.start + header, at.end


def acknowledgement(data: bytes, at: Message) -> tuple[int, str]:
    """Return (errno or 0, text) of an NLMSG_ERROR or NLMSG_DONE message. The text comes from the extended
    acknowledgement, with the offset of the refused attribute."""
    if at.end - at.start < 4:
        return 0, ""
    code = -_CODE.unpack_from(data, at.start)[0]
    if not at.flags & NLM_F_ACK_TLVS:
        return code, ""
    start = at.start + 4
    if at.kind == NLMSG_ERROR:
        # The request's header follows, and then the request's payload, unless NETLINK_CAP_ACK omits the payload.
        if at.end - start < HEADER.size:
            return code, ""
        request_length = HEADER.unpack_from(data, start)[0]
        start += HEADER.size if at.flags & NLM_F_CAPPED else (request_length + 3) & ~3
    text = ""
    for kind, begin, end in attributes(data, start, at.end):
        if kind == _NLMSGERR_ATTR_MSG:
            text = data[begin:end].rstrip(b"\0").decode(errors="replace")
        elif kind == _NLMSGERR_ATTR_OFFS and end - begin == 4:
            text += f" at offset {int.from_bytes(data[begin:end], 'little')}"
    return code, text.strip()


class Closing(ABC):
    """A context manager that calls `close` at the end of its block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close sockets and other descriptors."""


class Netlink(Closing):
    """A netlink socket in the caller's network namespace, for dumps and batches of requests. A context manager. Calls
    block, for at most 30 s. After an incomplete `dump` the caller must close the socket."""

    refusal: type[NetlinkError] = NetlinkError
    """The error for a request that the kernel refuses."""

    def __init__(self, protocol: int, opened: socket.socket) -> None:
        self._protocol = protocol
        self._socket = opened
        self._sequence = map(_SEQUENCES.__and__, count(1))

    @classmethod
    def open(cls, protocol: int = NETLINK_NETFILTER) -> Self:
        """Open a socket of a protocol (NETLINK_...). Raises NetlinkError."""
        return cls(protocol, open_socket(protocol))

    def close(self) -> None:
        """Close the socket; this ends an unfinished dump."""
        self._socket.close()

    def dump(self, kind: int, payload: bytes, what: str) -> Iterator[bytes]:
        """Send a dump request and yield each received buffer until the dump ends; `answers` reads the buffers. Only the
        last buffer contains NLMSG_DONE, at its end. `what` names the dump in errors. Raises NetlinkError when the
        kernel refuses, and, after the last buffer, DumpInterruptedError when the table changed."""
        sequence = next(self._sequence)
        self._send(message(kind, NLM_F_REQUEST | NLM_F_DUMP, sequence, payload), what)
        interrupted = False
        while True:
            data = self._read(what)
            last = _last_message(data)
            if last.sequence != sequence:
                continue
            interrupted = interrupted or bool(last.flags & NLM_F_DUMP_INTR)
            done = last.kind in {NLMSG_DONE, NLMSG_ERROR}
            if done:
                code, text = acknowledgement(data, last)
                if code:
                    raise self.refusal(code, f"cannot read {what}", text)
            yield data
            if done:
                break
        if interrupted:
            raise DumpInterruptedError(f"{what} changed while being read")

    def dump_all(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        """Return all buffers of a dump; try up to ten times if the table changes. Raises the errors of `dump`."""
        for attempt in range(_DUMP_ATTEMPTS):
            try:
                return list(self.dump(kind, payload, what))
            except DumpInterruptedError:
                if attempt == _DUMP_ATTEMPTS - 1:
                    raise
            except ApplyError:
                # If the dump is incomplete, the kernel refuses the next dump on this socket.
                self._socket.close()
                self._socket = open_socket(self._protocol)
                raise
        raise AssertionError("unreachable")

    def dump_once(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        """Return all buffers of one dump; entries may be missing if the table changed. Raises NetlinkError."""
        found: list[bytes] = []
        with suppress(DumpInterruptedError):
            found.extend(self.dump(kind, payload, what))
        return found

    def inquire(self, kind: int, payloads: Sequence[bytes], what: str) -> Iterator[Inquiry]:
        """Send each payload as one request and yield its answer, in order. Raises NetlinkError."""
        for sequences, codes, answers in self._batches(kind, payloads, what, 0):
            for number in sequences:
                yield Inquiry(*codes.get(number, _SUCCESS), answers.get(number, ()))

    def ask(self, kind: int, payload: bytes, what: str, header: int = 4) -> list[tuple[bytes, int, int]]:
        """Send one request; return (buffer, start, end) of the attributes in each message of the answer. `header` is
        the size of the family's header, as in `answers`. Raises NetlinkError when the kernel refuses."""
        ((code, text, places),) = self.inquire(kind, [payload], what)
        if code:
            raise self.refusal(code, f"cannot read {what}", text)
        return [(data, start + header, end) for data, start, end in places]

    def request(self, kind: int, payload: bytes, what: str, flags: int = 0, accepted: Sequence[int] = ()) -> int:
        """Send one request; return 0 or an `accepted` errno. Any other errno raises NetlinkError: "cannot WHAT"."""
        ((code, text),) = self.requests(kind, [payload], f"the request to {what}", flags)
        if code and code not in accepted:
            raise self.refusal(code, f"cannot {what}", text)
        return code

    def requests(self, kind: int, payloads: Sequence[bytes], what: str, flags: int = 0) -> list[tuple[int, str]]:
        """Send each payload as one request; return (errno or 0, text) per request, in order. `flags` may be
        NLM_F_CREATE. Raises NetlinkError only when the socket fails or an answer is lost."""
        batches = self._batches(kind, payloads, what, flags)
        return [codes.get(number, _SUCCESS) for sequences, codes, _ in batches for number in sequences]

    def _batches(self, kind: int, payloads: Sequence[bytes], what: str, flags: int) -> Iterator[_Batch]:
        start = 0
        while start < len(payloads):
            end, size = start, 0
            while end < len(payloads) and end - start < _BATCH and (end == start or size < _BATCH_BYTES):
                size += HEADER.size + len(payloads[end])
                end += 1
            yield self._batch(kind, payloads[start:end], what, NLM_F_REQUEST | flags)
            start = end

    def _batch(self, kind: int, payloads: Sequence[bytes], what: str, flags: int) -> _Batch:
        sequences = list(islice(self._sequence, len(payloads)))
        pack, size = HEADER.pack, HEADER.size  # `message` is inlined, because a full sync packs 100,000 messages
        packed = [
            pack(size + len(p), kind, flags, sequence, 0) + p + _PADDING[len(p) & 3]
            for sequence, p in zip(sequences, payloads, strict=True)
        ]
        # The kernel handles requests in order, and acknowledges only refused requests and the last request. The
        # acknowledgement of the last request ends the batch.
        packed[-1] = message(kind, flags | NLM_F_ACK, sequences[-1], payloads[-1])
        self._send(b"".join(packed), what)
        codes: dict[int, tuple[int, str]] = {}
        answers: dict[int, list[tuple[bytes, int, int]]] = {}
        while sequences[-1] not in codes:
            data = self._read(what)
            for at in messages(data):
                if (at.sequence - sequences[0]) & _SEQUENCES >= len(sequences):
                    continue  # the answer to an earlier request
                if at.kind == NLMSG_ERROR:
                    codes[at.sequence] = acknowledgement(data, at)
                else:
                    answers.setdefault(at.sequence, []).append((data, at.start, at.end))
        return sequences, codes, answers

    def _send(self, data: bytes, what: str) -> None:
        try:
            self._socket.sendto(data, (0, 0))
        except OSError as error:
            limit = "raise net.core.wmem_max, or leave the user namespace" if error.errno == errno.EMSGSIZE else ""
            raise NetlinkError(error.errno or errno.EIO, f"cannot ask the kernel for {what}", limit) from error

    def _read(self, what: str) -> bytes:
        while True:
            try:
                data, _, flags, sender = self._socket.recvmsg(READ_SIZE)
            except TimeoutError as error:
                raise NetlinkError(errno.ETIMEDOUT, f"no answer from the kernel for {what}") from error
            except OSError as error:
                raise NetlinkError(error.errno or errno.EIO, f"cannot read {what}") from error
            if flags & socket.MSG_TRUNC:
                raise NetlinkError(errno.EMSGSIZE, f"cannot read {what}", "the answer is larger than one read")
            # Only the kernel sends from port 0; other processes can also send to our port id.
            if sender[0] == 0 and len(data) >= HEADER.size:
                return data


class LastingLink(Closing):
    """A netfilter socket that the first use opens. The socket remains open, because after the close of a netfilter
    socket the next nf_tables transaction of any program waits for 10 to 30 ms (nft_rcv_nl_event)."""

    _link: Netlink | None = None

    def close(self) -> None:
        """Close the socket; the next use opens it again."""
        if self._link is not None:
            self._link.close()
            self._link = None

    @contextmanager
    def link(self) -> Iterator[Netlink]:
        """Yield the socket. Close it after a failure, because further answers may be in its receive buffer."""
        if self._link is None:
            self._link = Netlink.open()
        try:
            yield self._link
        except BaseException:
            self.close()
            raise


def open_socket(protocol: int, receive_buffer: int = _RECEIVE_BUFFER) -> socket.socket:
    """Return a bound socket with extended acknowledgements, and a timeout of 30 s. Raises NetlinkError."""
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise NetlinkError(error.errno or errno.EIO, f"cannot open a netlink socket of protocol {protocol}") from error
    try:
        opened.bind((0, 0))
        opened.settimeout(_TIMEOUT)
        opened.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        opened.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        grow_buffer(opened, socket.SO_RCVBUF, receive_buffer)
    except OSError as error:
        opened.close()
        raise NetlinkError(error.errno or errno.EIO, "cannot set up a netlink socket") from error
    return opened


def discard(sock: socket.socket) -> None:
    """Discard the messages in a socket's receive buffer, such as answers to a failed request. Until an overfull buffer
    is empty, the kernel drops further answers without notice (NETLINK_S_CONGESTED)."""
    timeout = sock.gettimeout()
    sock.setblocking(False)
    while True:
        try:
            sock.recv(READ_SIZE)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                break
    sock.settimeout(timeout)


def grow_buffer(sock: socket.socket, option: int, size: int) -> None:
    """Set the size of a socket's buffer (SO_RCVBUF, SO_SNDBUF) in bytes. If CAP_NET_ADMIN is missing, the limit is
    net.core.rmem_max or net.core.wmem_max. In a user namespace CAP_NET_ADMIN has no effect on buffers
    (sockopt_capable)."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _FORCED[option], size)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, option, size)


def _last_message(data: bytes) -> Message:
    read = _LENGTH.unpack_from
    at, following, size = 0, 0, len(data)
    while following + HEADER.size <= size:
        at = following
        length: int = read(data, at)[0]
        if length < HEADER.size or at + length > size:
            raise ApplyError(f"malformed netlink message: length {length}, {size - at} bytes left")
        following = at + ((length + 3) & ~3)
    length, kind, flags, sequence, _ = HEADER.unpack_from(data, at)
    return Message(kind, flags, sequence, at + HEADER.size, at + length)
