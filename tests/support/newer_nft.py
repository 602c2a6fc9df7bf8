"""Makes a set like a newer nft does: with userdata that makes older versions of nft crash."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from kubeproxy.kernel.netlink.protocol import HEADER, NLM_F_CREATE, NLM_F_REQUEST, attribute, text_attribute
from kubeproxy.kernel.nftables import nfnetlink

FAMILIES: Final = {"inet": 1, "ip": 2, "ip6": 10}

_NEW_SET: Final = nfnetlink.SUBSYSTEM << 8 | 9
_TYPE_MARK: Final = 19
# As recorded from nft 1.1.3: the byte order, and a key type of "typeof" without an expression.
_USERDATA: Final = bytes.fromhex("000402000000 03080004040000000100")


def typed_set(family: str, table: str, name: str) -> None:
    """Create the set of `nft add set FAMILY TABLE NAME { type mark ; }` of nft 1.1.3, in an existing table."""
    numbers = {3: 0, 4: _TYPE_MARK, 5: 4, 10: 1}  # flags, type and length of keys, id
    parts = text_attribute(1, table) + text_attribute(2, name)
    parts += b"".join(attribute(kind, value.to_bytes(4, "big")) for kind, value in numbers.items())
    parts += attribute(13, _USERDATA)
    payload = nfnetlink.GENERIC.pack(FAMILIES[family], 0, 0) + parts
    flags = NLM_F_REQUEST | NLM_F_CREATE
    with closing(nfnetlink.Transactions.open()) as transactions:
        transactions.commit([HEADER.pack(HEADER.size + len(payload), _NEW_SET, flags, 0, 0) + payload])
