"""Many elements of one map of nf_tables by their keys, a microsecond each: a dump takes longer the larger the map is.

A dump is read in buffers of 32 KiB, and for each the kernel passes over all that it has told before, so a million
elements take half a minute (nft_rhash_walk). Here each key is a request; hundreds are sent, and answered, at once.
Source: nf_tables_getsetelem in net/netfilter/nf_tables_api.c of Linux 6.18, recvmmsg(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.netlink.protocol import (
    ATTRIBUTE,
    HEADER,
    NETLINK_NETFILTER,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    Closing,
    NetlinkError,
    attributes,
    message,
    nested,
    open_socket,
    understood,
)
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.elements import catch_all_element, plain_element
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, GET_ELEMENT, GET_SET, NEW_ELEMENT, element_of, in_set

_AT_ONCE: Final = 500
_ROOM: Final = 256  # bytes of an answer: one with a counter has some 150
_TAKEN: Final = 8192  # bytes of the receive buffer that an answer takes up, at most
_RECEIVE_BUFFER: Final = 4 << 20
_NAME: Final = struct.Struct("=HHII")  # struct sockaddr_nl
_KERNEL: Final = _NAME.pack(socket.AF_NETLINK, 0, 0, 0)
_CODE: Final = struct.Struct("=i")
_KIND: Final = struct.Struct("=H")
_KIND_AT: Final = 4  # nlmsg_type of struct nlmsghdr
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
    """What was received at once: so many messages, each in its own _ROOM bytes, and the addresses of their senders."""

    data: bytes
    senders: bytes
    number: int


class Fetcher(Closing):
    """A socket, and room for hundreds of answers. For one thread."""

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
            header.name_length = _NAME.size  # and so it stays: the kernel writes whole addresses
            header.vectors = ctypes.addressof(self._vectors) + at * ctypes.sizeof(_Vector)
            header.vectors_length = 1

    @classmethod
    def open(cls) -> Self:
        """Open a socket in the caller's network namespace. Raises NetlinkError."""
        opened = open_socket(NETLINK_NETFILTER, _RECEIVE_BUFFER)
        opened.setblocking(True)
        return cls(opened)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def fetch(self, family: int, table: str, name: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return what those of these keys lead to that a map of values has. Raises NetlinkError.

        All keys are of one length, of whole registers.
        """
        found: dict[bytes, bytes] = {}
        if not keys:
            return found
        self._drain()
        first = message(
            GET_ELEMENT,
            NLM_F_REQUEST,
            0,
            in_set(family, table, name) + nested(nfta.SET_ELEM_LIST_ELEMENTS, plain_element(keys[0])),
        )
        head = first[: -len(keys[0])]  # whole registers, so nothing is padded
        reader = Reader()
        for start in range(0, len(keys), self._at_once):
            batch = keys[start : start + self._at_once]
            try:
                self._socket.send(head + head.join(batch))
                answers = self._receive(len(batch))
            except OSError as error:
                raise NetlinkError(error.errno or errno.EIO, f"cannot read elements of {name}") from error
            reader.read(answers, batch, found, name)
        return found

    @understood("sets of nf_tables")
    def count(self, family: int, table: str, name: str) -> int | None:
        """Return how many elements a set has; None before Linux 6.16, or where nothing can be said of it."""
        payload = in_set(family, table, name)
        self._drain()
        try:
            self._socket.send(message(GET_SET, NLM_F_REQUEST, 0, payload))
            data, sender = self._socket.recvfrom(1 << 15, socket.MSG_DONTWAIT)  # it is there by now
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, f"cannot count the elements of {name}") from error
        if sender[0]:
            raise NetlinkError(errno.EPROTO, f"cannot count the elements of {name}", "another process answered")
        if _KIND.unpack_from(data, _KIND_AT)[0] == NLMSG_ERROR:
            return None
        found = attributes(data, HEADER.size + GENERIC.size, len(data))
        return next((int.from_bytes(data[s:e], "big") for kind, s, e in found if kind == nfta.SET_COUNT), None)

    def has_catch_all(self, family: int, table: str, name: str) -> bool:
        """Return whether a set has an element that matches what no other one does. Raises NetlinkError.

        No dump by key shows it, and the kernel does not count it.
        """
        self._drain()
        elements = nested(nfta.SET_ELEM_LIST_ELEMENTS, catch_all_element())
        try:
            self._socket.send(message(GET_ELEMENT, NLM_F_REQUEST, 0, in_set(family, table, name) + elements))
            data, sender = self._socket.recvfrom(1 << 15, socket.MSG_DONTWAIT)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, f"cannot read elements of {name}") from error
        return not sender[0] and _KIND.unpack_from(data, _KIND_AT)[0] == NEW_ELEMENT

    def _receive(self, count: int) -> Answers:
        """Return so many answers: they are there when the request was sent. Raises OSError."""
        found = _LIBC.recvmmsg(self._socket.fileno(), self._received, count, socket.MSG_DONTWAIT, None)
        if found != count:
            code = ctypes.get_errno() if found < 0 else errno.ENOBUFS
            raise OSError(code, os.strerror(code))
        return Answers(
            ctypes.string_at(self._data, count * _ROOM), ctypes.string_at(self._senders, count * _NAME.size), count
        )

    def _drain(self) -> None:
        """Read away what is left of a question that failed, so that it answers nothing else."""
        while True:
            try:
                self._socket.recv(_ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    return


class Reader:
    """Reads answers of one map. Those of one length are alike; how is learned from the first, and the keys prove it."""

    def __init__(self) -> None:
        self._length = b""
        self._key = self._value = slice(0, 0)
        self._layout = struct.Struct("")

    @understood("elements of nf_tables")
    def read(self, answers: Answers, keys: Sequence[bytes], found: dict[bytes, bytes], name: str) -> None:
        """Add what was found to the rest. Raises NetlinkError."""
        data, count = answers.data, answers.number
        if answers.senders != _KERNEL * count:
            raise NetlinkError(errno.EPROTO, f"cannot read elements of {name}", "another process answered")
        if not self._length:
            self._learn(data, count)
        alike = [data[at::_ROOM].count(self._length[at : at + 1]) == count for at in range(len(self._length))]
        if self._length and all(alike):
            pairs = list(self._layout.iter_unpack(data))
            if [key for key, _ in pairs] == list(keys):
                found.update(pairs)
                return
        for at, key in zip(range(0, count * _ROOM, _ROOM), keys, strict=True):
            self._one(data[at : at + _ROOM], key, found, name)

    def _one(self, data: bytes, key: bytes, found: dict[bytes, bytes], name: str) -> None:
        length, kind, *_ = HEADER.unpack_from(data)
        if kind == NLMSG_ERROR:
            code = -_CODE.unpack_from(data, HEADER.size)[0]
            if code != errno.ENOENT:
                raise NetlinkError(code, f"cannot read elements of {name}")
            return
        if data.startswith(self._length) and self._length and data[self._key] == key:
            found[key] = data[self._value]
            return
        if length > len(data):
            raise NetlinkError(errno.EMSGSIZE, f"cannot read elements of {name}", "an element is longer than expected")
        element = element_of(data, *_first_element(data, length))
        if element.key != key:
            raise NetlinkError(errno.EPROTO, f"cannot read elements of {name}", "another element was told")
        found[key] = element.data

    def _learn(self, data: bytes, count: int) -> None:
        """Learn from the first element that there is."""
        for at in range(0, count * _ROOM, _ROOM):
            one = data[at : at + _ROOM]
            length, kind, *_ = HEADER.unpack_from(one)
            if kind != NEW_ELEMENT or length > _ROOM:
                continue
            start, end = _first_element(one, length)
            parts = {kind: (s, e) for kind, s, e in attributes(one, start, end)}
            if nfta.SET_ELEM_DATA not in parts:
                return
            (first, last), (begin, finish) = parts[nfta.SET_ELEM_KEY], parts[nfta.SET_ELEM_DATA]
            value = element_of(one, start, end).data
            self._key = slice(first + ATTRIBUTE.size, last)
            self._value = slice(begin + ATTRIBUTE.size, begin + ATTRIBUTE.size + len(value))
            if self._key.stop > self._value.start or one[self._value] != value or self._value.stop > finish:
                return
            between = self._value.start - self._key.stop
            sizes = (self._key.start, len(one[self._key]), between, len(value), _ROOM - self._value.stop)
            self._layout = struct.Struct("{}x{}s{}x{}s{}x".format(*sizes))
            self._length = one[: _KIND_AT + _KIND.size]
            return


def _first_element(data: bytes, length: int) -> tuple[int, int]:
    """Return where the attributes of the element in an answer begin and end."""
    for kind, start, end in attributes(data, HEADER.size + GENERIC.size, length):
        if kind == nfta.SET_ELEM_LIST_ELEMENTS:
            for _, first, last in attributes(data, start, end):
                return first, last
    raise ValueError("no element in an answer")
