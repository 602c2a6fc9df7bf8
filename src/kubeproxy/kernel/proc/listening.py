"""The ports with listening sockets in this network namespace. Source: proc(5), /proc/net/tcp and its like."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family

_FILES: Final = {
    (Family.IPV4, socket.IPPROTO_TCP): "tcp",
    (Family.IPV4, socket.IPPROTO_UDP): "udp",
    (Family.IPV6, socket.IPPROTO_TCP): "tcp6",
    (Family.IPV6, socket.IPPROTO_UDP): "udp6",
}
_LISTENS: Final = "0A"  # TCP_LISTEN
_UNCONNECTED: Final = "07"  # TCP_CLOSE, as UDP sockets that have no peer


class Listening(NamedTuple):
    """A packed address, zeros for any, and a port."""

    address: bytes
    port: int


def listening(family: Family, protocol: int) -> frozenset[Listening]:
    """Return the listening addresses of a family for TCP or UDP. Raises ApplyError."""
    path = Path("/proc/thread-self/net", _FILES[family, protocol])
    try:
        lines = path.read_text().splitlines()[1:]
    except FileNotFoundError:  # the kernel has no IPv6
        return frozenset()
    except OSError as error:
        raise ApplyError(f"cannot read {path}: {error.strerror}") from error
    wanted = _LISTENS if protocol == socket.IPPROTO_TCP else _UNCONNECTED
    rows = (line.split(None, 4) for line in lines)
    return frozenset(_read(row[1]) for row in rows if row[3] == wanted)


def _read(text: str) -> Listening:
    """Parse an address, which is in 32-bit words in host byte order, and a port."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(address), 8))
    return Listening(b"".join(words), int(port, 16))
