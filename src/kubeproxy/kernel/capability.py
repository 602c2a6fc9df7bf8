"""Puts into effect the capability that the kernel permits. Not here: what needs it, and what it means to lack it.

The image's interpreter has CAP_NET_ADMIN as "permitted" only. With "effective" on the file the kernel would refuse to
start it at all wherever a container may not have that capability (execve(2), EPERM), even for --version.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

_VERSION_3: Final = 0x20080522  # linux/capability.h: 64 bits, in two rows of effective, permitted, inheritable
_HEADER: Final = struct.Struct("=Ii")
_ROWS: Final = struct.Struct("=6I")
_NET_ADMIN: Final = 1 << 12


def raise_net_admin() -> None:
    """Put CAP_NET_ADMIN into effect for the calling thread and those it starts, if permitted; else nothing happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(_HEADER.pack(_VERSION_3, 0), _HEADER.size)
    rows = ctypes.create_string_buffer(_ROWS.size)
    if libc.capget(header, rows) < 0:
        return
    effective, permitted, *others = _ROWS.unpack(rows.raw)
    if permitted & ~effective & _NET_ADMIN:
        libc.capset(header, ctypes.create_string_buffer(_ROWS.pack(effective | _NET_ADMIN, permitted, *others)))
