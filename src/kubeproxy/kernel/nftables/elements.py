"""Elements of nf_tables' sets and maps, as they are packed for netlink. What they mean is a backend's affair.

Source: nf_tables_newsetelem in net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import attribute, nested
from kubeproxy.kernel.nftables import nfta

_GOTO: Final = struct.pack(">i", -4)  # NFT_GOTO
_CATCH_ALL: Final = struct.pack(">I", 2)  # NFT_SET_ELEM_CATCHALL


class Packer(NamedTuple):
    """Packs the elements of one set: the bytes around the key and around the data never change.

    `key_size` and `data_size` are in bytes; data_size 0 is a plain set, or an element that is removed. `size` is that
    of the whole element.
    """

    before_key: bytes
    before_data: bytes
    after_data: bytes
    size: int

    @classmethod
    def of(cls, key_size: int, data_size: int) -> Packer:
        """Return the packer of a set, or of a map to fixed-size values."""
        data = nested(nfta.SET_ELEM_DATA, attribute(nfta.DATA_VALUE, bytes(data_size))) if data_size else b""
        element = nested(nfta.LIST_ELEM, _value_of(nfta.SET_ELEM_KEY, bytes(key_size)), data)
        padding = bytes(-data_size % 4)
        before_data = data[: len(data) - data_size - len(padding)]
        return cls(element[: len(element) - len(data) - key_size], before_data, padding, len(element))

    def pack(self, key: bytes, data: bytes) -> bytes:
        """Return one element; the size of a key is a multiple of four, as the kernel pads its registers."""
        return self.before_key + key + self.before_data + data + self.after_data


def goto_frame(key_size: int, chain: bytes) -> tuple[bytes, bytes]:
    """Return what stands before and after the key in the element of a verdict map whose verdict is `goto chain`."""
    code, name = attribute(nfta.VERDICT_CODE, _GOTO), attribute(nfta.VERDICT_CHAIN, chain + b"\0")
    verdict = nested(nfta.SET_ELEM_DATA, nested(nfta.DATA_VERDICT, code, name))
    element = nested(nfta.LIST_ELEM, _value_of(nfta.SET_ELEM_KEY, bytes(key_size)), verdict)
    return element[: len(element) - len(verdict) - key_size], verdict


def interval_element(key: bytes) -> bytes:
    """Return the element of a concatenated interval set. `key` is its first key followed by its last one."""
    half = len(key) // 2
    first, last = _value_of(nfta.SET_ELEM_KEY, key[:half]), _value_of(nfta.SET_ELEM_KEY_END, key[half:])
    return nested(nfta.LIST_ELEM, first, last)


def plain_element(key: bytes, data: bytes = b"") -> bytes:
    """Return the element of a set, or of a map to values."""
    value = _value_of(nfta.SET_ELEM_DATA, data) if data else b""
    return nested(nfta.LIST_ELEM, _value_of(nfta.SET_ELEM_KEY, key), value)


def catch_all_element() -> bytes:
    """Return the element, without a key, that matches what no other element of its set does (nft writes it as `*`)."""
    return nested(nfta.LIST_ELEM, attribute(nfta.SET_ELEM_FLAGS, _CATCH_ALL))


def _value_of(kind: int, value: bytes) -> bytes:
    return nested(kind, attribute(nfta.DATA_VALUE, value))


def timed_element(key: bytes, timeout: int, expires: int) -> bytes:
    """Return the element of a set with timeouts; both in milliseconds.

    A timeout of 0 is the set's own: kernels from 6.12 on leave that one out of a dump, and refuse a 0 with an expiry.
    """
    lasts = attribute(nfta.SET_ELEM_TIMEOUT, timeout.to_bytes(8, "big")) if timeout else b""
    ends = attribute(nfta.SET_ELEM_EXPIRATION, expires.to_bytes(8, "big"))
    return nested(nfta.LIST_ELEM, _value_of(nfta.SET_ELEM_KEY, key), lasts, ends)
