"""Reads many elements of an nf_tables map by their keys, in about one microsecond per element.

Dumps of large maps are slow: for each buffer of 32 KiB the kernel skips, one by one, all elements that it has already
sent. A dump of a million elements takes half a minute (nft_rhash_walk). This module sends one request per key: one
system call sends hundreds of requests, and a second call receives the answers. Sources: nf_tables_getsetelem in
net/netfilter/nf_tables_api.c of Linux 6.18, recvmmsg(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.netlink import protocol as nl
from kubeproxy.kernel.nftables import elements, nfta
from kubeproxy.kernel.nftables.elements import ElementLayout, element_of, layout_of, plain_element
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_ELEMENT, NEW_ELEMENT, names

_AT_ONCE: Final = 500
_ROOM: Final = 256  # bytes for an answer: an answer with a counter has about 150 bytes
_TAKEN: Final = 8192  # the maximum number of bytes that the kernel counts for an answer in the receive buffer
_RECEIVE_BUFFER: Final = 4 << 20
_NAME: Final = struct.Struct("=HHII")  # struct sockaddr_nl
_KERNEL: Final = _NAME.pack(socket.AF_NETLINK, 0, 0, 0)
_CODE: Final = struct.Struct("=i")
_LENGTH_AND_KIND: Final = 6  # the size of nlmsg_len and nlmsg_type, the first fields of struct nlmsghdr
_ATTRIBUTES: Final = nl.HEADER.size + GENERIC.size
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("vectors_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Received(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


class Answers(NamedTuple):
    """Messages from one system call: `number` buffers of _ROOM bytes, and the senders' addresses."""

    data: bytes
    senders: bytes
    number: int


class Fetcher(nl.Closing):
    """A socket with buffers for hundreds of answers. Not thread-safe."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        received = opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._at_once = max(1, min(_AT_ONCE, received // _TAKEN))
        self._data = ctypes.create_string_buffer(self._at_once * _ROOM)
        self._senders = ctypes.create_string_buffer(self._at_once * _NAME.size)
        self._vectors = (_Vector * self._at_once)()
        self._received = (_Received * self._at_once)()
        for at in range(self._at_once):
            self._vectors[at].base = ctypes.addressof(self._data) + at * _ROOM
            self._vectors[at].length = _ROOM
            header = self._received[at].header
            header.name = ctypes.addressof(self._senders) + at * _NAME.size
            header.name_length = _NAME.size  # need not be reset: the kernel always writes complete addresses
            header.vectors = ctypes.addressof(self._vectors) + at * ctypes.sizeof(_Vector)
            header.vectors_length = 1

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises NetlinkError."""
        opened = nl.open_socket(nl.NETLINK_NETFILTER, _RECEIVE_BUFFER)
        opened.setblocking(True)
        return cls(opened)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fetch(self, family: int, table: str, name: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the data of each of these keys that a map of values contains. The keys have equal length. Raises
        NetlinkError."""
        found: dict[bytes, bytes] = {}
        if not keys:
            return found
        nl.discard(self._socket)  # the answers to a failed request
        where = nl.netfilter_header(family) + names(table, name)
        first = nl.message(
            GET_ELEMENT, nl.NLM_F_REQUEST, 0, where + nl.nested(nfta.SET_ELEM_LIST_ELEMENTS, plain_element(keys[0]))
        )
        head = first[: -len(keys[0])]  # the request ends with the key, without padding
        reader = AnswerReader()
        for start in range(0, len(keys), self._at_once):
            batch = keys[start : start + self._at_once]
            try:
                self._socket.send(head + head.join(batch))
                answers = self._receive(len(batch))
            except OSError as error:
                raise nl.NetlinkError(error.errno or errno.EIO, f"cannot read elements of {name}") from error
            reader.read(answers, batch, found, name)
        return found

    def _receive(self, count: int) -> Answers:
        found = _LIBC.recvmmsg(self._socket.fileno(), self._received, count, socket.MSG_DONTWAIT, None)
        if found != count:
            code = ctypes.get_errno() if found < 0 else errno.ENOBUFS
            raise OSError(code, os.strerror(code))
        return Answers(
            ctypes.string_at(self._data, count * _ROOM), ctypes.string_at(self._senders, count * _NAME.size), count
        )


class AnswerReader:
    """Reads answers about one map. The reader derives the byte layout from the first answer, applies the layout to all
    answers of the same length, and compares the keys to confirm the layout."""

    def __init__(self) -> None:
        self._head = b""  # length and type of the answers that have the layout
        self._layout: ElementLayout | None = None

    @nl.understood("elements of nf_tables")
    def read(self, answers: Answers, keys: Sequence[bytes], found: dict[bytes, bytes], name: str) -> None:
        """Add the key and data of each answer to `found`. Raises NetlinkError."""
        data, count = answers.data, answers.number
        if answers.senders != _KERNEL * count:
            raise nl.NetlinkError(errno.EPROTO, f"cannot read elements of {name}", "another process answered")
        if self._layout is None:
            self._learn(data, count)
        alike = data.startswith(self._head) and elements.equal_columns(data, _ROOM, range(_LENGTH_AND_KIND))
        if self._layout is not None and alike:
            pairs = list(self._layout.fields.iter_unpack(data))
            if [key for key, _ in pairs] == list(keys):
                found.update(pairs)
                return
        for at, key in zip(range(0, count * _ROOM, _ROOM), keys, strict=True):
            value = self._value(data[at : at + _ROOM], key, name)
            if value is not None:
                found[key] = value

    def _value(self, one: bytes, key: bytes, name: str) -> bytes | None:
        """Return the data in one answer, or None if the map has no such key."""
        if self._layout is not None and one.startswith(self._head):
            there, value = self._layout.fields.unpack(one)
            if there == key:
                return value  # type: ignore[no-any-return]
        length, kind, *_ = nl.HEADER.unpack_from(one)
        if kind == nl.NLMSG_ERROR:
            code = -_CODE.unpack_from(one, nl.HEADER.size)[0]
            if code != errno.ENOENT:
                raise nl.NetlinkError(code, f"cannot read elements of {name}")
            return None
        if length > len(one):
            raise nl.NetlinkError(
                errno.EMSGSIZE, f"cannot read elements of {name}", "an element is longer than expected"
            )
        element = element_of(one, *_first_element(one, length))
        if element.key != key:
            raise nl.NetlinkError(
                errno.EPROTO, f"cannot read elements of {name}", "the kernel answered for another key"
            )
        return element.data

    def _learn(self, data: bytes, count: int) -> None:
        for at in range(0, count * _ROOM, _ROOM):
            one = data[at : at + _ROOM]
            length, kind, *_ = nl.HEADER.unpack_from(one)
            if kind == NEW_ELEMENT and length <= _ROOM:
                self._layout = layout_of(one, 0, _ROOM, *_first_element(one, length))
                self._head = one[:_LENGTH_AND_KIND]
                return


def _first_element(data: bytes, length: int) -> tuple[int, int]:
    """Return the start and end of the element's attributes in an answer. Raises ValueError."""
    place = nl.find(data, _ATTRIBUTES, length, nfta.SET_ELEM_LIST_ELEMENTS, nfta.LIST_ELEM)
    if place is None:
        raise ValueError("no element in an answer")
    return place
