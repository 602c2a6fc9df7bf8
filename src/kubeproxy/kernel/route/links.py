"""Dummy interfaces over rtnetlink, and the many addresses that one can carry.

Which addresses those are is a backend's affair. Source: rtnetlink(7), include/uapi/linux/if_link.h of Linux 6.18.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection
from typing import Final

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_ROUTE,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Netlink,
    NetlinkError,
    attribute,
    messages,
    nested,
    understood,
)
from kubeproxy.kernel.route.addresses import local_addresses

_NEW_LINK: Final = 16
_DELETE_LINK: Final = 17
_GET_LINK: Final = 18
_NEW_ADDRESS: Final = 20
_DELETE_ADDRESS: Final = 21

_LINK_NAME: Final = 3  # IFLA_IFNAME
_LINK_INFO: Final = 18
_LINK_INFO_KIND: Final = 1
_FAMILY_SPECIFIC: Final = 26  # IFLA_AF_SPEC
_ADDRESS_GENERATION: Final = 8  # IFLA_INET6_ADDR_GEN_MODE
_NO_GENERATED_ADDRESS: Final = 1
_ADDRESS: Final = 1  # IFA_ADDRESS
_LOCAL: Final = 2
_CACHE: Final = 6  # IFA_CACHEINFO: preferred and valid lifetime, two more that the kernel fills in
_FLAGS: Final = 8
_UP: Final = 1  # IFF_UP
_NO_DUPLICATE_DETECTION: Final = 0x02  # IFA_F_NODAD
_NO_PREFIX_ROUTE: Final = 0x200
_FOREVER: Final = 0xFFFFFFFF

_LINK: Final = struct.Struct("=BxHiII")  # family, type, index, flags, which flags: struct ifinfomsg
_ADDRESS_HEAD: Final = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface index
_NAMED_REFUSALS: Final = 3


def link_index(name: str) -> int | None:
    """Return an interface's index; None when there is none of that name."""
    with Netlink.open(NETLINK_ROUTE) as netlink:
        return _index(netlink, name)


@understood("interfaces")
def _index(netlink: Netlink, name: str) -> int | None:
    """Ask by netlink: for a name that is missing, the other ways have the kernel run modprobe first (dev_load)."""
    request = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(_LINK_NAME, name.encode() + b"\0")
    try:
        buffers = netlink.ask(_GET_LINK, request, f"the interface {name}")
    except NetlinkError as error:
        if error.code == errno.ENODEV:
            return None
        raise
    found = (_LINK.unpack_from(data, at.start) for data in buffers for at in messages(data) if at.kind == _NEW_LINK)
    return next((int(index) for _, _, index, _, _ in found), None)


def ensure_dummy(name: str) -> int:
    """Return the index of a dummy interface, which is made when it is missing, and set it up.

    It gets no link-local address of its own. Raises NetlinkError: with code EOPNOTSUPP the module dummy is missing.
    """
    with Netlink.open(NETLINK_ROUTE) as netlink:
        index = _index(netlink, name) or _make(netlink, name)
        # Refused without IPv6, where there is nothing to generate.
        mode = nested(socket.AF_INET6, attribute(_ADDRESS_GENERATION, bytes([_NO_GENERATED_ADDRESS])))
        _one(netlink, _NEW_LINK, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0) + nested(_FAMILY_SPECIFIC, mode), 0)
        up = _LINK.pack(socket.AF_UNSPEC, 0, index, _UP, _UP)
        code, text = _one(netlink, _NEW_LINK, up, 0)
    if code:
        raise NetlinkError(code, f"cannot set {name} up", text)
    return index


def _make(netlink: Netlink, name: str) -> int:
    kind = nested(_LINK_INFO, attribute(_LINK_INFO_KIND, b"dummy\0"))
    request = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(_LINK_NAME, name.encode() + b"\0") + kind
    code, text = _one(netlink, _NEW_LINK, request, NLM_F_CREATE | NLM_F_EXCL)
    if code not in (0, errno.EEXIST):
        raise NetlinkError(code, f"cannot make the dummy interface {name}", text)
    return socket.if_nametoindex(name)


def delete_link(name: str) -> bool:
    """Remove an interface; return whether there was one. Raises NetlinkError."""
    index = link_index(name)
    if index is None:
        return False
    with Netlink.open(NETLINK_ROUTE) as netlink:
        code, text = _one(netlink, _DELETE_LINK, _LINK.pack(socket.AF_UNSPEC, 0, index, 0, 0), 0)
    if code not in (0, errno.ENODEV):
        raise NetlinkError(code, f"cannot remove the interface {name}", text)
    return code == 0


def link_addresses(name: str, family: int) -> set[bytes]:
    """Return an interface's packed addresses of a family. Raises NetlinkError."""
    return {address.ip for address in local_addresses(family) if address.interface == name}


def add_addresses(index: int, ips: Collection[bytes]) -> None:
    """Give an interface packed addresses, as /32 and /128; those that it has are fine. Raises ApplyError."""
    _change(_NEW_ADDRESS, index, ips, "add", errno.EEXIST)


def remove_addresses(index: int, ips: Collection[bytes]) -> None:
    """Take packed addresses from an interface; those that it does not have are fine. Raises ApplyError."""
    _change(_DELETE_ADDRESS, index, ips, "remove", errno.EADDRNOTAVAIL)


def _change(kind: int, index: int, ips: Collection[bytes], verb: str, fine: int) -> None:
    flags = NLM_F_CREATE | NLM_F_EXCL if kind == _NEW_ADDRESS else 0
    wanted = list(ips)
    with Netlink.open(NETLINK_ROUTE) as netlink:
        results = netlink.requests(kind, [_pack(index, ip) for ip in wanted], "addresses", flags)
    refused = [
        str(NetlinkError(code, f"cannot {verb} the address {_name(ip)} (interface {index})", text))
        for ip, (code, text) in zip(wanted, results, strict=True)
        if code not in (0, fine)
    ]
    if refused:
        more = f"; and {len(refused) - _NAMED_REFUSALS} more" if len(refused) > _NAMED_REFUSALS else ""
        raise ApplyError("; ".join(refused[:_NAMED_REFUSALS]) + more)


def _pack(index: int, ip: bytes) -> bytes:
    family = socket.AF_INET if len(ip) == 4 else socket.AF_INET6
    payload = _ADDRESS_HEAD.pack(family, 8 * len(ip), 0, 0, index) + attribute(_LOCAL, ip) + attribute(_ADDRESS, ip)
    if family == socket.AF_INET6:
        # Usable without waiting for answers, and without a route beside the one that each has in the local table.
        payload += attribute(_FLAGS, struct.pack("=I", _NO_DUPLICATE_DETECTION | _NO_PREFIX_ROUTE))
        # Deprecated, so that it is nobody's source address by being the most similar one (RFC 6724, rules 3 and 8).
        payload += attribute(_CACHE, struct.pack("=IIII", 0, _FOREVER, 0, 0))
    return payload


def _one(netlink: Netlink, kind: int, payload: bytes, flags: int) -> tuple[int, str]:
    return netlink.requests(kind, [payload], "an interface", flags)[0]


def _name(ip: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(ip) == 4 else socket.AF_INET6, ip)
