"""Announcements of connections that begin and end in connection tracking: all, those of a status, or a sample.

A filter in the kernel selects them, so that the others cost this process nothing. Sources: ctnetlink_conntrack_event of
net/netfilter/nf_conntrack_netlink.c, and net/core/filter.c (SKF_AD_NLATTR), of Linux 6.18.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from kubeproxy.kernel.conntrack.tracked import (
    EVERYTHING,
    FIRST_ATTRIBUTE,
    ID,
    LAYOUTS,
    STATUS,
    SUBSYSTEM,
    Tracked,
    Wanted,
)
from kubeproxy.kernel.netlink.announcements import IF_EQUAL, LOAD_WORD, Announcements, keeping
from kubeproxy.kernel.netlink.protocol import HEADER, Closing, understood

_NEW: Final = SUBSYSTEM | 0  # IPCTNL_MSG_CT_NEW
_DELETE: Final = SUBSYSTEM | 2  # IPCTNL_MSG_CT_DELETE
BEGINNINGS: Final = 1  # NFNLGRP_CONNTRACK_NEW
ENDS: Final = 3  # NFNLGRP_CONNTRACK_DESTROY
_RECEIVE_BUFFER: Final = 8 << 20  # some 8,000 events, more than a second of a busy node

_FIND_ATTRIBUTE: Final = 0xFFFFF000 + 12  # SKF_AD_OFF + SKF_AD_NLATTR
# Instructions of classic BPF (linux/bpf_common.h).
_LOAD, _LOAD_INDEX, _LOAD_AFTER = 0x00, 0x01, 0x40
_AND, _TO_INDEX = 0x54, 0x07


NOT_ANNOUNCED: Final = (
    "the kernel announces no connections (net.netfilter.nf_conntrack_events): sysctl -w "
    "net.netfilter.nf_conntrack_events=2 enables announcements while a program listens"
)


def announced(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel announces connections in the caller's network namespace."""
    try:
        return (proc / "sys/net/netfilter/nf_conntrack_events").read_text().strip() != "0"
    except OSError:  # a kernel that was built without it
        return False


class Event(NamedTuple):
    """A connection began, or its entry was removed (`ended`), after it was closed or silent for long."""

    ended: bool
    family: int
    entry: Tracked


class Events(Closing):
    """Receives the events of the caller's network namespace from `open` on.

    A connection that began before is announced only when it ends.
    """

    def __init__(self, announced: Announcements, wanted: Wanted) -> None:
        self._announced = announced
        self._wanted = wanted
        self.one_in = 1

    @classmethod
    def open(cls, wanted: Wanted = EVERYTHING, groups: tuple[int, ...] = (BEGINNINGS, ENDS)) -> Self:
        """Receive events of connections of this status, as `tracked.entries` selects them. Raises NetlinkError."""
        program = filter_program(wanted, 1)
        return cls(Announcements.open("connection tracking", groups, _RECEIVE_BUFFER, program=program), wanted)

    @property
    def lost(self) -> int:
        """How often the kernel dropped events, as too many came."""
        return self._announced.lost

    def close(self) -> None:
        """Close the socket."""
        self._announced.close()

    def sample(self, one_in: int) -> None:
        """Receive from now on both events of one connection in `one_in`, a power of two, and none of the others.

        The filter selects by the id of the entry.
        """
        self._announced.attach(filter_program(self._wanted, one_in))
        self.one_in = one_in

    def until(self, end: float) -> Iterator[Event]:
        """Yield events until `end`, of time.monotonic(). Raises NetlinkError."""
        with understood("connections that begin and end"):
            for data in self._announced.until(end):
                if (event := read(data)) is not None:
                    yield event


def read(data: bytes) -> Event | None:
    """Return the event in a message, None for a connection without ports."""
    kind = HEADER.unpack_from(data)[1]
    family = data[HEADER.size]
    if kind not in (_NEW, _DELETE) or family not in LAYOUTS:
        return None
    entry = LAYOUTS[family].read(data)
    return Event(kind == _DELETE, family, entry) if entry is not None else None


def filter_program(wanted: Wanted, one_in: int) -> bytes:
    """Return a filter that keeps messages about connections of this status, and of these one in `one_in`."""
    tests = []
    if wanted.mask:
        tests.append([*_attribute(STATUS), (_AND, wanted.mask), (IF_EQUAL, wanted.status)])
    if one_in > 1:
        tests.append([*_attribute(ID), (_AND, one_in - 1), (IF_EQUAL, 0)])
    return keeping([step for test in tests for step in test])


def _attribute(kind: int) -> list[tuple[int, int]]:
    """Return the steps that load an attribute of four bytes."""
    return [
        (_LOAD, FIRST_ATTRIBUTE),
        (_LOAD_INDEX, kind),
        (LOAD_WORD, _FIND_ATTRIBUTE),
        (_TO_INDEX, 0),
        (_LOAD_AFTER, 4),
    ]
