"""The capabilities of this process: makes CAP_NET_ADMIN effective, and permanently drops capabilities. Source:
capabilities(7), prctl(2)."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kubeproxy.errors import ApplyError, Unsupported

_VERSION_3: Final = 0x20080522  # linux/capability.h: 64 bits, in two rows of effective, permitted, inheritable
_HEADER: Final = struct.Struct("=Ii")
_ROWS: Final = struct.Struct("=6I")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 23, 24, 38


class Capability(IntEnum):
    """The capabilities that this program uses or checks, with their numbers in the kernel."""

    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    SETPCAP = 8
    NET_BIND_SERVICE = 10
    NET_ADMIN = 12
    NET_RAW = 13

    @property
    def label(self) -> str:
        """The usual name of the capability, such as CAP_NET_ADMIN."""
        return f"CAP_{self.name}"


class _Sets(NamedTuple):
    effective: int
    permitted: int
    inheritable: int


def raise_net_admin() -> None:
    """Make CAP_NET_ADMIN effective, if it is permitted, for the calling thread and the threads that it starts. The file
    capability of the interpreter in the image is only "permitted". If it were "effective", the kernel would not start
    the interpreter in a container without CAP_NET_ADMIN (execve(2), EPERM), not even for --version."""
    sets = _get()
    if sets is not None and sets.permitted & ~sets.effective & _bit(Capability.NET_ADMIN):
        _set(sets._replace(effective=sets.effective | _bit(Capability.NET_ADMIN)))


def held() -> frozenset[Capability]:
    """Return the effective capabilities of the calling thread."""
    sets = _get()
    return frozenset(one for one in Capability if sets is not None and sets.effective & _bit(one))


def beyond_permission(paths: Iterable[str]) -> list[str]:
    """Return those files and folders that this process can read only because of a capability."""
    sets = _get()
    overriding = _bit(Capability.DAC_OVERRIDE) | _bit(Capability.DAC_READ_SEARCH)
    if sets is None or not sets.effective & overriding:
        return []
    _set(sets._replace(effective=sets.effective & ~overriding))
    try:
        return [path for path in paths if not _readable(path)]
    finally:
        _set(sets)


def keep_only(wanted: AbstractSet[Capability]) -> None:
    """Drop all capabilities except `wanted`, for this process and all programs that it starts. Raises ApplyError. Call
    it while there is only one thread, because each thread has its own capabilities."""
    if (running := threads()) > 1:
        raise ApplyError(f"cannot drop capabilities: {running} threads run already")
    mask = sum(_bit(one) for one in wanted)
    sets = _get()
    if sets is None:
        raise ApplyError("cannot drop capabilities: the kernel does not list them")
    if sets.effective & _bit(Capability.SETPCAP):
        _lower_bounds(mask)
    # The kernel also removes these capabilities from the ambient set (cap_capset).
    _set(_Sets(sets.effective & mask, sets.permitted & mask, sets.inheritable & mask))


def threads() -> int:
    """Return the number of threads of this process; for a moment the kernel still counts a thread that has ended."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def forbid_new_privileges() -> None:
    """Prevent programs that this process starts from gaining privileges. Raises ApplyError."""
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        raise ApplyError(f"cannot set no_new_privs: {os.strerror(ctypes.get_errno())}")


def gives_rights(path: str) -> bool:
    """Return whether a program file grants privileges: set-user-ID, set-group-ID or capabilities."""
    try:
        set_id = Path(path).stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
        return set_id != 0 or "security.capability" in os.listxattr(path)
    except OSError:
        return False


def _lower_bounds(mask: int) -> None:
    number = 0
    # For the number after the kernel's last capability the call fails with EINVAL.
    while (bounded := _LIBC.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:
        if bounded and not mask & 1 << number and _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            raise ApplyError(f"cannot drop the bounding capability {number}: {os.strerror(ctypes.get_errno())}")
        number += 1


def _readable(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _get() -> _Sets | None:
    rows = ctypes.create_string_buffer(_ROWS.size)
    if _LIBC.capget(_header(), rows) < 0:
        return None
    low, high = _ROWS.unpack(rows.raw)[:3], _ROWS.unpack(rows.raw)[3:]
    return _Sets(*(below | above << 32 for below, above in zip(low, high, strict=True)))


def _set(sets: _Sets) -> None:
    low, high = [one & 0xFFFFFFFF for one in sets], [one >> 32 for one in sets]
    if _LIBC.capset(_header(), ctypes.create_string_buffer(_ROWS.pack(*low, *high))) < 0:
        raise ApplyError(f"cannot set capabilities: {os.strerror(ctypes.get_errno())}")


def _header() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(_HEADER.pack(_VERSION_3, 0), _HEADER.size)


def _bit(one: Capability) -> int:
    return 1 << one


T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000


def in_empty_network(work: Callable[[], T]) -> T:
    """Call `work` in a thread in a new network namespace, and return the result. Sockets and child processes of `work`
    are in that namespace, too. Rules in the namespace affect no traffic, and are deleted after the namespace's last
    socket is closed. Source: unshare(2). Raises Unsupported if this process may not create a namespace."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_alone, work).result()


def _alone(work: Callable[[], T]) -> T:
    if _LIBC.unshare(_CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise Unsupported(f"cannot create a network namespace ({why}): give the process the capability CAP_SYS_ADMIN")
    return work()
