"""Generic netlink: finding the number of a family, which the kernel gives out when the family's module is loaded.

What a family's commands mean lives with the family. Source: include/uapi/linux/genetlink.h of Linux 6.18.
"""

from __future__ import annotations

import struct
from typing import Final

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.netlink.protocol import Netlink, attribute, attributes, messages, understood

# A family's messages start with its command and version: struct genlmsghdr.
GENERIC: Final = struct.Struct("=BBH")

_CONTROL: Final = 0x10  # GENL_ID_CTRL
_GET_FAMILY: Final = 3  # CTRL_CMD_GETFAMILY
_FAMILY_ID: Final = 1
_FAMILY_NAME: Final = 2


@understood("generic netlink")
def family_id(netlink: Netlink, name: str) -> int:
    """Return the message type of a family. Raises Unsupported when the kernel has none of that name."""
    wanted = name.encode() + b"\0"
    request = GENERIC.pack(_GET_FAMILY, 1, 0) + attribute(_FAMILY_NAME, wanted)
    # A dump has every family in it, and does not fail for a missing one.
    for data in netlink.dump_all(_CONTROL, request, "the generic netlink families"):
        for at in messages(data):
            if at.kind != _CONTROL:
                continue
            found = {kind: data[s:e] for kind, s, e in attributes(data, at.start + GENERIC.size, at.end)}
            if found.get(_FAMILY_NAME) == wanted:
                return int.from_bytes(found[_FAMILY_ID], "little")
    raise Unsupported(f"the kernel has no generic netlink family {name}: its module is not loaded")
