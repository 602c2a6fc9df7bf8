"""The pieces of netlink that every family shares: headers, attributes, acknowledgements, dumps, batches of requests.

Plain struct and socket. No family's constants (rtnetlink, ctnetlink, nf_tables) and nothing of what they mean live
here. Sources: netlink(7), include/uapi/linux/netlink.h of Linux 6.18, RFC 3549.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Final, NamedTuple, Self

from kubeproxy.errors import ApplyError

NETLINK_ROUTE: Final = 0
NETLINK_NETFILTER: Final = 12
NETLINK_GENERIC: Final = 16

NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_DUMP: Final = 0x300
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_CAPPED: Final = 0x100
NLM_F_ACK_TLVS: Final = 0x200

NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3

NLA_F_NESTED: Final = 0x8000
NLA_TYPE_MASK: Final = 0x3FFF

SOL_NETLINK: Final = 270
NETLINK_CAP_ACK: Final = 10
NETLINK_EXT_ACK: Final = 11

_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33

_NLMSGERR_ATTR_MSG: Final = 1
_NLMSGERR_ATTR_OFFS: Final = 2

HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port id
ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_CODE: Final = struct.Struct("=i")
_LENGTH: Final = struct.Struct("=I")

# A dump's datagrams are at most 32 KiB since Linux 4.10 (netlink_recvmsg grows them to what the reader offers).
_READ_SIZE: Final = 64 * 1024
_RECEIVE_BUFFER: Final = 4 * 1024 * 1024
_TIMEOUT: Final = 30.0
_DUMP_ATTEMPTS: Final = 10
# Refusals of one send must fit into the socket's receive buffer, at under 1 KiB of accounting each.
_BATCH: Final = 1000
_PADDING: Final = (b"", b"\0\0\0", b"\0\0", b"\0")
"""To four bytes, by the length's last two bits."""
_FINE: Final = (0, "")
# Answers of one send must fit into it as well, at two of about 1 KiB each.
_INQUIRIES: Final = 500
# What is sent at once must fit into the socket's send buffer: 208 KiB unless the system was told otherwise.
_BATCH_BYTES: Final = 128 * 1024


def errno_text(code: int) -> str:
    """Return what an errno means; of a number that is none (MAX_ERRNO of linux/err.h), the number."""
    return os.strerror(code) if 0 < code < 4096 else f"error {code}"


class NetlinkError(ApplyError):
    """The kernel refused a request; `code` is its errno, the text is its extended acknowledgement where it sent one."""

    def __init__(self, code: int, what: str, detail: str = "") -> None:
        self.code = code
        super().__init__(f"{what}: {errno_text(code)}" + (f" ({detail})" if detail else ""))


class DumpInterruptedError(ApplyError):
    """The table changed while it was being read (NLM_F_DUMP_INTR): what was read may miss entries; read it again."""


class Message(NamedTuple):
    """One message inside a received buffer: its header's fields and where its payload starts and ends."""

    kind: int
    flags: int
    sequence: int
    start: int
    end: int


class Inquiry(NamedTuple):
    """What a request was answered with: an errno or 0, and the payloads of messages, as (buffer, start, end)."""

    code: int
    answers: Sequence[tuple[bytes, int, int]]


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Make an ApplyError, which names `what`, of whatever a reader stumbles over in messages of another layout.

    Around a whole reader, as a `with` or a decorator: so that each attribute that must be there need not be asked for.
    """
    try:
        yield
    except (struct.error, LookupError, ValueError) as error:
        raise ApplyError(f"the kernel tells of {what} in a way that is not known ({error!r})") from error


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack one attribute, padded to four bytes."""
    length = 4 + len(payload)
    return ATTRIBUTE.pack(length, kind) + payload + b"\0" * (-length & 3)


def nested(kind: int, *attributes: bytes) -> bytes:
    """Pack an attribute that holds packed attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def message(kind: int, flags: int, sequence: int, payload: bytes) -> bytes:
    """Pack one message, padded to four bytes; the kernel fills in the port id."""
    length = HEADER.size + len(payload)
    return HEADER.pack(length, kind, flags, sequence, 0) + payload + b"\0" * (-length & 3)


def attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type without flag bits, payload start, payload end) of the attributes in data[start:end], copying nothing.

    Raises ApplyError when a length reaches outside.
    """
    while start + 4 <= end:
        length, kind = ATTRIBUTE.unpack_from(data, start)
        if length < 4 or start + length > end:
            raise ApplyError(f"malformed netlink attribute of type {kind & NLA_TYPE_MASK}: length {length}")
        yield kind & NLA_TYPE_MASK, start + 4, start + length
        start += (length + 3) & ~3


def messages(data: bytes) -> Iterator[Message]:
    """Yield the messages of one received buffer, copying nothing. Raises ApplyError when a length reaches outside."""
    offset, size = 0, len(data)
    while offset + HEADER.size <= size:
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        if length < HEADER.size or offset + length > size:
            raise ApplyError(f"malformed netlink message of type {kind}: length {length}, {size - offset} bytes left")
        yield Message(kind, flags, sequence, offset + HEADER.size, offset + length)
        offset += (length + 3) & ~3


def acknowledgement(data: bytes, at: Message) -> tuple[int, str]:
    """Return (errno or 0, text) of an NLMSG_ERROR or NLMSG_DONE message.

    The text is the extended acknowledgement's message and the offset of the attribute it complains of (kernel >= 4.12).
    """
    if at.end - at.start < 4:
        return 0, ""
    code = -_CODE.unpack_from(data, at.start)[0]
    if not at.flags & NLM_F_ACK_TLVS:
        return code, ""
    start = at.start + 4
    if at.kind == NLMSG_ERROR:
        # The request's header follows, and all of the request unless NETLINK_CAP_ACK cut it off.
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
    """A context manager that is closed at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of the kernel."""


class Netlink(Closing):
    """A netlink socket in the caller's network namespace, for one dump or for batches of requests. A context manager.

    Blocking, with a timeout of 30 s. After a `dump` that was not read to its end it can only be closed.
    """

    def __init__(self, protocol: int, opened: socket.socket) -> None:
        self._protocol = protocol
        self._socket = opened
        self._sequence = count(1)

    @classmethod
    def open(cls, protocol: int) -> Self:
        """Open a socket of a protocol (NETLINK_ROUTE and the like). Raises NetlinkError."""
        return cls(protocol, _opened(protocol))

    def close(self) -> None:
        """Close the socket; the kernel then forgets an unfinished dump."""
        self._socket.close()

    def dump(self, kind: int, payload: bytes, what: str) -> Iterator[bytes]:
        """Send a dump request and yield each received buffer until the kernel is done; read them with `messages`.

        The last buffer ends with NLMSG_DONE, the others hold entries only. `what` names the dump in errors. Raises
        NetlinkError when the kernel refuses, and DumpInterruptedError after the last buffer when the table changed.
        """
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
                    raise NetlinkError(code, f"cannot read {what}", text)
            yield data
            if done:
                break
        if interrupted:
            raise DumpInterruptedError(f"{what} changed while being read")

    def dump_all(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        """Return all buffers of a dump, read again while the table changes under it. Raises as `dump`."""
        for attempt in range(_DUMP_ATTEMPTS):
            try:
                return list(self.dump(kind, payload, what))
            except DumpInterruptedError:
                if attempt == _DUMP_ATTEMPTS - 1:
                    raise
            except ApplyError:
                # The kernel may not be done, and would refuse the next dump of this socket.
                self._socket.close()
                self._socket = _opened(self._protocol)
                raise
        raise AssertionError("unreachable")

    def dump_once(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        """Return all buffers of a dump, of which some may lack entries as the table changed. Raises NetlinkError."""
        found: list[bytes] = []
        with suppress(DumpInterruptedError):
            found.extend(self.dump(kind, payload, what))
        return found

    def inquire(self, kind: int, payloads: Sequence[bytes], what: str) -> Iterator[Inquiry]:
        """Send each payload as one request and yield what it was answered with, in order. Raises NetlinkError."""
        for start in range(0, len(payloads), _INQUIRIES):
            yield from self._inquire(kind, payloads[start : start + _INQUIRIES], what)

    def _inquire(self, kind: int, payloads: Sequence[bytes], what: str) -> Iterator[Inquiry]:
        sequences = [next(self._sequence) for _ in payloads]
        asked = zip(sequences, payloads, strict=True)
        self._send(b"".join([message(kind, NLM_F_REQUEST | NLM_F_ACK, number, p) for number, p in asked]), what)
        answers: dict[int, list[tuple[bytes, int, int]]] = {number: [] for number in sequences}
        codes: dict[int, int] = {}
        while len(codes) < len(sequences):
            data = self._read(what)
            for at in messages(data):
                if at.sequence in answers and at.kind == NLMSG_ERROR:
                    codes[at.sequence] = acknowledgement(data, at)[0]
                elif at.sequence in answers:
                    answers[at.sequence].append((data, at.start, at.end))
        return (Inquiry(codes[number], answers[number]) for number in sequences)

    def ask(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        """Send one request that is answered with messages; return the buffers, which end with an acknowledgement.

        Raises NetlinkError when the kernel refuses.
        """
        sequence = next(self._sequence)
        self._send(message(kind, NLM_F_REQUEST | NLM_F_ACK, sequence, payload), what)
        buffers = []
        while True:
            data = self._read(what)
            buffers.append(data)
            for at in messages(data):
                if at.kind == NLMSG_ERROR and at.sequence == sequence:
                    code, text = acknowledgement(data, at)
                    if code:
                        raise NetlinkError(code, f"cannot read {what}", text)
                    return buffers

    def requests(self, kind: int, payloads: Sequence[bytes], what: str, flags: int = 0) -> list[tuple[int, str]]:
        """Send each payload as one request; return (errno or 0, text) of each, in order. `flags` may hold NLM_F_CREATE.

        Raises NetlinkError only when the socket fails or an answer gets lost.
        """
        results: list[tuple[int, str]] = []
        start = 0
        while start < len(payloads):
            end, size = start, 0
            while end < len(payloads) and end - start < _BATCH and (end == start or size < _BATCH_BYTES):
                size += HEADER.size + len(payloads[end])
                end += 1
            results += self._batch(kind, payloads[start:end], what, NLM_F_REQUEST | flags)
            start = end
        return results

    def _batch(self, kind: int, payloads: Sequence[bytes], what: str, flags: int) -> list[tuple[int, str]]:
        sequences = list(islice(self._sequence, len(payloads)))
        pack, size = HEADER.pack, HEADER.size  # as `message` does, for full syncs: without a call for each
        packed = [
            pack(size + len(p), kind, flags, sequence, 0) + p + _PADDING[len(p) & 3]
            for sequence, p in zip(sequences, payloads, strict=True)
        ]
        # The kernel works them off in order and answers refusals anyway: the last one's answer ends the batch.
        packed[-1] = message(kind, flags | NLM_F_ACK, sequences[-1], payloads[-1])
        self._send(b"".join(packed), what)
        results: dict[int, tuple[int, str]] = {}
        while sequences[-1] not in results:
            data = self._read(what)
            for at in messages(data):
                if at.kind == NLMSG_ERROR and at.sequence >= sequences[0]:
                    results[at.sequence] = acknowledgement(data, at)
        if len(results) == 1:
            return [_FINE] * (len(sequences) - 1) + [results[sequences[-1]]]
        return [results.get(sequence, _FINE) for sequence in sequences]

    def _send(self, data: bytes, what: str) -> None:
        try:
            self._socket.sendto(data, (0, 0))
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, f"cannot ask the kernel for {what}") from error

    def _read(self, what: str) -> bytes:
        while True:
            try:
                data, _, flags, sender = self._socket.recvmsg(_READ_SIZE)
            except TimeoutError as error:
                raise NetlinkError(errno.ETIMEDOUT, f"no answer from the kernel for {what}") from error
            except OSError as error:
                raise NetlinkError(error.errno or errno.EIO, f"cannot read {what}") from error
            if flags & socket.MSG_TRUNC:
                raise NetlinkError(errno.EMSGSIZE, f"cannot read {what}", "the kernel sent more than fits one read")
            # Port 0 is the kernel: another process may send to our port id as well.
            if sender[0] == 0 and len(data) >= HEADER.size:
                return data


def _opened(protocol: int) -> socket.socket:
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise NetlinkError(error.errno or errno.EIO, f"cannot open a netlink socket of protocol {protocol}") from error
    try:
        opened.bind((0, 0))
        opened.settimeout(_TIMEOUT)
        opened.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        opened.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        grow_receive_buffer(opened)
    except OSError as error:
        opened.close()
        raise NetlinkError(error.errno or errno.EIO, "cannot set up a netlink socket") from error
    return opened


def netfilter_socket(receive_buffer: int) -> socket.socket:
    """Return a bound socket of netfilter with a receive buffer of so many bytes. Raises OSError."""
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        opened.bind((0, 0))
        grow_receive_buffer(opened, receive_buffer)
    except OSError:
        opened.close()
        raise
    return opened


def grow_receive_buffer(sock: socket.socket, size: int = _RECEIVE_BUFFER) -> None:
    """Give a socket a receive buffer of so many bytes, or what the system allows without CAP_NET_ADMIN.

    In a user namespace nobody has that capability, as far as buffers go (sockopt_capable).
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def grow_send_buffer(sock: socket.socket, size: int) -> None:
    """Give a socket a send buffer of so many bytes, or what the system allows; see `grow_receive_buffer`."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


def _last_message(data: bytes) -> Message:
    """Return the last message of a buffer, where a dump says that it is over.

    Only lengths are looked at on the way: a dump of 100,000 entries is walked in 10 ms.
    """
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
