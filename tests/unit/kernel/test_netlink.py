"""Packing and parsing of netlink messages, compared with hand-written bytes and with each other."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import (
    NETLINK_ROUTE,
    NLM_F_ACK_TLVS,
    NLM_F_CAPPED,
    NLMSG_DONE,
    NLMSG_ERROR,
    Message,
    Netlink,
    NetlinkError,
    acknowledgement,
    attribute,
    attributes,
    message,
    messages,
    nested,
)


def walk(data: bytes) -> list[tuple[int, bytes]]:
    return [(kind, data[a:b]) for kind, a, b in attributes(data, 0, len(data))]


@pytest.mark.parametrize(
    ("payload", "packed"),
    [
        (b"", "04000700"),
        (b"\x01", "0500070001000000"),
        (b"\x01\x02\x03\x04", "0800070001020304"),
    ],
)
def test_attributes_are_padded_to_four_bytes_but_say_their_own_length(payload: bytes, packed: str) -> None:
    assert attribute(7, payload).hex() == packed
    assert walk(attribute(7, payload)) == [(7, payload)]


def test_nested_attributes_carry_the_flag_and_parse_without_it() -> None:
    packed = nested(3, attribute(1, b"a"), attribute(2, b"bc"))
    assert packed[2:4] == b"\x03\x80"
    ((kind, inner),) = walk(packed)
    assert kind == 3
    assert walk(inner) == [(1, b"a"), (2, b"bc")]


@given(st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=40)), max_size=8))
def test_attributes_survive_a_round_trip(items: list[tuple[int, bytes]]) -> None:
    assert walk(b"".join(attribute(kind, payload) for kind, payload in items)) == items


@given(st.lists(st.tuples(st.integers(16, 0xFFFF), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=8))
def test_messages_survive_a_round_trip(items: list[tuple[int, int, bytes]]) -> None:
    data = b"".join(message(kind, 5, sequence, payload) for kind, sequence, payload in items)
    found = [(at.kind, at.sequence, data[at.start : at.end]) for at in messages(data)]
    assert found == items


@given(st.binary(max_size=64))
def test_garbage_is_refused_or_parsed_but_never_read_past_its_end(data: bytes) -> None:
    for parse in (
        lambda: [(at.start, at.end) for at in messages(data)],
        lambda: [(a, b) for _, a, b in attributes(data, 0, len(data))],
    ):
        try:
            spans = parse()
        except ApplyError:
            continue
        assert all(0 <= start <= end <= len(data) for start, end in spans)


REQUEST = struct.pack("=IHHII", 20, 0x101, 5, 9, 0) + b"body"
TEXT = attribute(1, b"no such chain\0") + attribute(2, struct.pack("=I", 16))


@pytest.mark.parametrize(
    ("kind", "flags", "payload", "expected"),
    [
        (NLMSG_ERROR, 0, struct.pack("=i", 0) + REQUEST, (0, "")),
        (NLMSG_ERROR, 0, struct.pack("=i", -errno.EPERM) + REQUEST, (errno.EPERM, "")),
        (NLMSG_ERROR, NLM_F_ACK_TLVS, struct.pack("=i", -2) + REQUEST + TEXT, (2, "no such chain at offset 16")),
        (
            NLMSG_ERROR,
            NLM_F_ACK_TLVS | NLM_F_CAPPED,
            struct.pack("=i", -2) + REQUEST[:16] + TEXT,
            (2, "no such chain at offset 16"),
        ),
        (NLMSG_DONE, NLM_F_ACK_TLVS, struct.pack("=i", -2) + TEXT, (2, "no such chain at offset 16")),
        (NLMSG_DONE, 0, b"", (0, "")),
    ],
)
def test_acknowledgements_are_read_with_their_text(
    kind: int, flags: int, payload: bytes, expected: tuple[int, str]
) -> None:
    assert acknowledgement(payload, Message(kind, flags, 1, 0, len(payload))) == expected


RTM_GETLINK = 18


def link(index: int) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, 0, 0)


def test_refusals_of_the_kernel_carry_its_errno_and_text() -> None:
    with Netlink.open(NETLINK_ROUTE) as netlink:
        assert netlink.requests(RTM_GETLINK, [link(1), link(99999)], "links")[1][0] == errno.ENODEV
        with pytest.raises(NetlinkError, match="cannot read what is not there: Operation not supported") as caught:
            netlink.dump_all(0x3F2, link(0), "what is not there")
        assert caught.value.code == errno.EOPNOTSUPP
        # The socket can be used for the next dump.
        assert netlink.dump_all(RTM_GETLINK, link(0), "links")


def test_a_protocol_that_the_kernel_does_not_have_is_named() -> None:
    with pytest.raises(NetlinkError, match="protocol 31"):
        Netlink.open(31)


def test_more_requests_than_fit_one_batch_are_answered_in_order() -> None:
    indexes = [1 if n % 100 == 0 else 100000 + n for n in range(2500)]
    with Netlink.open(NETLINK_ROUTE) as netlink:
        results = netlink.requests(RTM_GETLINK, [link(index) for index in indexes], "links")
    assert [code for code, _ in results] == [0 if index == 1 else errno.ENODEV for index in indexes]


class FakeSocket:
    """A socket that returns recorded datagrams."""

    def __init__(self, *datagrams: bytes) -> None:
        self.datagrams = list(datagrams)
        self.sent: list[bytes] = []

    def sendto(self, data: bytes, _: object) -> None:
        self.sent.append(data)

    def recvmsg(self, _: int) -> tuple[bytes, list[object], int, tuple[int, int]]:
        if not self.datagrams:
            raise TimeoutError
        return self.datagrams.pop(0), [], 0, (0, 0)

    def close(self) -> None:
        pass


def playing(*datagrams: bytes) -> Netlink:
    netlink = Netlink.open(NETLINK_ROUTE)
    netlink.close()
    netlink._socket = FakeSocket(*datagrams)  # type: ignore[assignment]
    return netlink


ENTRY, DONE = b"entry", struct.pack("=i", 0)


def test_a_dump_that_was_interrupted_is_read_again() -> None:
    interrupted = message(20, 0x10, 1, ENTRY) + message(NLMSG_DONE, 0x10, 1, DONE)
    whole = message(20, 0, 2, ENTRY + b"2") + message(NLMSG_DONE, 0, 2, DONE)
    (data,) = playing(interrupted, whole).dump_all(22, b"", "addresses")
    assert data == whole
    with pytest.raises(ApplyError, match="addresses changed while being read"):
        list(playing(interrupted).dump(22, b"", "addresses"))


def test_a_dump_may_end_in_a_datagram_of_its_own_and_passes_over_older_answers() -> None:
    stale = message(20, 0, 77, b"old!") + message(NLMSG_DONE, 0, 77, DONE)
    first, done = message(20, 0, 1, ENTRY), message(NLMSG_DONE, 0, 1, DONE)
    assert playing(stale, first, done).dump_all(22, b"", "addresses") == [first, done]


def test_a_dump_that_fails_at_its_end_raises_an_error() -> None:
    failed = message(20, 0, 1, ENTRY) + message(NLMSG_DONE, 0, 1, struct.pack("=i", -errno.ENOMEM))
    with pytest.raises(NetlinkError, match="cannot read addresses: Cannot allocate memory"):
        list(playing(failed).dump(22, b"", "addresses"))


def test_a_kernel_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(NetlinkError, match="no answer from the kernel for addresses"):
        list(playing().dump(22, b"", "addresses"))
