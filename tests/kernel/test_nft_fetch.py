"""Elements of a map read by their keys, hundreds at once, compared with a dump."""

import errno
from contextlib import closing, contextmanager

import pytest

from kubeproxy.kernel.netlink import protocol
from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.nftables import fetch
from kubeproxy.kernel.nftables.fetch import AnswerReader, Answers, Fetcher
from kubeproxy.kernel.nftables.reader import TableReader
from support import nft
from support.own_network import own_network

IP, IP6 = 2, 10


@contextmanager
def a_map(of, count=0, more="", family="ip"):
    """A map `t m` with elements of `of(0)`, `of(1)` and so on."""
    word = "ipv4_addr" if family == "ip" else "ipv6_addr"
    kind = f"{word} . inet_proto . inet_service . mark : {word} . inet_service"
    with own_network(), closing(Fetcher.open()) as fetcher:
        lines = [f"add table {family} t", f"add map {family} t m {{ type {kind} ; {more}}}"]
        for start in range(0, count, 1000):
            some = ", ".join(of(number) for number in range(start, min(count, start + 1000)))
            lines.append(f"add element {family} t m {{ {some} }}")
        nft.run("\n".join(lines) + "\n")
        yield fetcher


def dumped(family):
    with TableReader(family, "t", Netlink.open()) as reader:
        return {key: data for part in reader.pairs("m") for key, data in part}


def counted(family):
    with TableReader(family, "t", Netlink.open()) as reader:
        return reader.count("m")


def element(number):
    return f"10.0.{number >> 8}.{number & 255} . tcp . 80 . {number} : 10.1.{number >> 8}.{number & 255} . 8080"


def element6(number):
    return f"fd00::{number + 1:x} . udp . 53 . {number} : fd00:1::{number + 1:x} . 5353"


def keys(number, first=0):
    return [
        bytes([10, 0, n >> 8, n & 255, 6, 0, 0, 0, 0, 80, 0, 0]) + n.to_bytes(4, "little")
        for n in range(first, first + number)
    ]


@pytest.mark.parametrize("more", ["", "counter ; "])
def test_all_elements_are_those_of_a_dump(more):
    with a_map(element, 1700, more) as fetcher:
        found = fetcher.fetch(IP, "t", "m", keys(1700))
        assert found == dumped(IP)
        assert len(found) == counted(IP) == 1700


def test_all_elements_of_ipv6_are_those_of_a_dump():
    with a_map(element6, 600, family="ip6") as fetcher:
        there = dumped(IP6)
        assert fetcher.fetch(IP6, "t", "m", sorted(there)) == there
        assert counted(IP6) == 600


@pytest.mark.parametrize("first", [0, 1, 250, 999, 1000])
def test_those_that_are_missing_are_left_out(first):
    with a_map(element, 1000) as fetcher:
        asked = keys(1500, first)
        there = dumped(IP)
        assert fetcher.fetch(IP, "t", "m", asked) == {key: there[key] for key in asked if key in there}
        every_other = [key for pair in zip(keys(500), keys(500, 5000), strict=True) for key in pair]
        assert fetcher.fetch(IP, "t", "m", every_other) == {key: there[key] for key in keys(500)}


def test_without_keys_nothing_is_read():
    with a_map(element) as fetcher:
        assert fetcher.fetch(IP, "t", "m", []) == {}
        assert fetcher.fetch(IP, "t", "m", keys(3)) == {}
        assert counted(IP) == 0


def test_a_map_that_is_missing_has_nothing():
    with own_network(), closing(Fetcher.open()) as fetcher:
        assert fetcher.fetch(IP, "t", "m", keys(2)) == {}
        assert counted(IP) is None


def test_a_refusal_is_an_error_that_names_the_map():
    with a_map(element, 10) as fetcher:
        with pytest.raises(NetlinkError, match="cannot read elements of m: Invalid argument"):
            fetcher.fetch(IP, "t", "m", [bytes(64)])
        assert len(fetcher.fetch(IP, "t", "m", keys(10))) == 10  # no element of it remains


def test_a_small_receive_buffer_takes_fewer_at_once(monkeypatch):
    def small(sock, *_):
        sock.setsockopt(1, 8, 64 << 10)  # SO_RCVBUF, as in a user namespace

    monkeypatch.setattr(protocol, "grow_buffer", small)
    with a_map(element, 1000) as fetcher:
        assert fetcher.fetch(IP, "t", "m", keys(1000)) == dumped(IP)


def test_answers_that_did_not_fit_are_an_error_and_answer_nothing_else(monkeypatch):
    def small(sock, *_):
        sock.setsockopt(1, 8, 16 << 10)

    monkeypatch.setattr(protocol, "grow_buffer", small)
    monkeypatch.setattr(fetch, "_TAKEN", 64)
    with a_map(element, 1000) as fetcher:
        with pytest.raises(NetlinkError) as raised:
            fetcher.fetch(IP, "t", "m", keys(1000))
        assert raised.value.code == errno.ENOBUFS
        assert fetcher.fetch(IP, "t", "m", keys(2, 5)) == {
            key: value for key, value in dumped(IP).items() if key in keys(2, 5)
        }


def test_messages_of_another_process_are_not_taken_as_the_kernels():
    senders = b"\x10\0\0\0" + (4711).to_bytes(4, "little") + bytes(4)
    with pytest.raises(NetlinkError, match="another process answered"):
        AnswerReader().read(Answers(bytes(256), senders, 1), keys(1), {}, "m")
