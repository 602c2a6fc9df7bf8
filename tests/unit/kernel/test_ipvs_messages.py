"""Real servers in the kernel's lists: attributes in any order, unknown attributes, and changes during the list."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.ipvs import (
    RealServer,
    RealServerReader,
    ServerChange,
    Verb,
    VirtualServer,
    packed_key,
    pieces,
    server_key,
)
from kubeproxy.kernel.ipvs import packed as packed_operation
from kubeproxy.kernel.netlink.protocol import attribute, nested

KINDS = {1: "address", 2: "port", 3: "forwarding", 4: "weight", 7: "active", 8: "inactive"}
# Thresholds, persistent connections, family, tunnel type, port and flags, statistics.
OTHERS = {
    5: bytes(4),
    6: bytes(4),
    9: bytes(4),
    11: b"\2\0",
    13: b"\1",
    14: bytes(2),
    15: bytes(2),
    10: nested(1, bytes(60)),
}

numbers = st.integers(0, 2**32 - 1)


@st.composite
def real_servers(draw: st.DrawFn) -> RealServer:
    return RealServer(
        draw(st.binary(min_size=6, max_size=6)), *(draw(numbers) for _ in range(3)), forwarding=draw(st.integers(0, 7))
    )


def packed(real: RealServer, order: list[int]) -> bytes:
    values = {
        1: real.key[:-2].ljust(16, b"\0"),
        2: real.key[-2:],
        **{kind: struct.pack("=I", getattr(real, KINDS[kind])) for kind in (3, 4, 7, 8)},
    }
    return b"".join(attribute(kind, (values | OTHERS)[kind]) for kind in order)


@given(st.lists(st.tuples(real_servers(), st.permutations([*KINDS, *OTHERS])), max_size=4), st.integers(1, 3))
def test_any_order_is_read(entries: list[tuple[RealServer, list[int]]], times: int) -> None:
    reader = RealServerReader()
    wanted = [real for real, _ in entries for _ in range(times)]
    lists = [packed(real, order) for real, order in entries for _ in range(times)]
    found = reader.read(((b"head" + data + b"tail", 4, 4 + len(data)) for data in lists), 4)
    assert list(found) == wanted


@pytest.mark.parametrize("missing", KINDS)
def test_an_entry_that_lacks_something_is_an_error(missing: int) -> None:
    real = RealServer(b"\1\2\3\4\0\x50")
    data = packed(real, [kind for kind in KINDS if kind != missing])
    with pytest.raises(ApplyError, match="lacks an attribute"):
        list(RealServerReader().read([(data, 0, len(data))], 4))


@given(
    st.sampled_from([Verb.ADD_SERVER, Verb.SET_SERVER, Verb.DELETE_SERVER]),
    st.sampled_from([4, 16]).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    st.integers(0, 65535),
    st.integers(0, 1),
)
def test_messages_of_pieces_are_those_that_are_packed_whole(
    command: int, address: bytes, port: int, weight: int
) -> None:
    server = VirtualServer(server_key(bytes(len(address)), 6, 80))
    number = port.to_bytes(2, "big")
    whole = packed_operation(ServerChange(command, server, RealServer(address + number, weight)))
    head, front, middle, end = pieces(command, 2 if len(address) == 4 else 10, weight)
    assert head + packed_key(server.key) + front + address + middle + number + end == whole
