"""IP sets in the kernel: entries of every type are read as written, many at once; refusals name the entry."""

from __future__ import annotations

import errno
import socket
import subprocess

import pytest

from kubeproxy.kernel.ipset import (
    BITMAP_PORT,
    HASH_IP,
    HASH_IP_PORT,
    HASH_IP_PORT_IP,
    HASH_IP_PORT_NET,
    IpsetError,
    Ipsets,
    SetEntry,
    SetKind,
)
from kubeproxy.kernel.netlink.protocol import RefusedError

IPV4, IPV6, ANY = socket.AF_INET, socket.AF_INET6, socket.AF_UNSPEC
TCP, UDP, SCTP = socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_SCTP


def four(text: str) -> bytes:
    return socket.inet_pton(IPV4, text)


def six(text: str) -> bytes:
    return socket.inet_pton(IPV6, text)


CASES = {
    SetKind(HASH_IP, IPV4): {SetEntry(four("10.0.0.1")): "10.0.0.1"},
    SetKind(HASH_IP, IPV6): {SetEntry(six("fd00::1")): "fd00::1"},
    SetKind(HASH_IP_PORT, IPV4): {
        SetEntry(four("10.0.0.1"), TCP, 80): "10.0.0.1,tcp:80",
        SetEntry(four("10.0.0.1"), UDP, 80): "10.0.0.1,udp:80",
        SetEntry(four("10.0.0.2"), SCTP, 65535): "10.0.0.2,sctp:65535",
    },
    SetKind(HASH_IP_PORT, IPV6): {SetEntry(six("fd00::1"), UDP, 53): "fd00::1,udp:53"},
    SetKind(HASH_IP_PORT_IP, IPV4): {SetEntry(four("10.0.0.1"), TCP, 80, four("10.0.0.2")): "10.0.0.1,tcp:80,10.0.0.2"},
    SetKind(HASH_IP_PORT_IP, IPV6): {SetEntry(six("fd00::1"), SCTP, 9, six("fd00::1")): "fd00::1,sctp:9,fd00::1"},
    SetKind(HASH_IP_PORT_NET, IPV4): {
        SetEntry(four("10.0.0.1"), TCP, 80, four("10.1.0.0"), 16): "10.0.0.1,tcp:80,10.1.0.0/16",
        SetEntry(four("10.0.0.1"), TCP, 80, four("10.1.2.3"), 32): "10.0.0.1,tcp:80,10.1.2.3",
    },
    SetKind(HASH_IP_PORT_NET, IPV6): {SetEntry(six("fd00::1"), TCP, 80, six("fd01::"), 16): "fd00::1,tcp:80,fd01::/16"},
    SetKind(BITMAP_PORT, ANY): {SetEntry(port=0): "0", SetEntry(port=80): "80", SetEntry(port=65535): "65535"},
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: f"{kind.type} {kind.family}")
def test_entries_are_read_back_as_written_and_as_ipset_prints_them(kind: SetKind) -> None:
    entries = list(CASES[kind])
    with Ipsets.open() as sets:
        sets.create("KUBE-TEST", kind)
        assert {name: counts.kind for name, counts in sets.counts().items()} == {"KUBE-TEST": kind}
        assert sets.entries("KUBE-TEST") == set()
        sets.add("KUBE-TEST", entries)
        sets.add("KUBE-TEST", entries)  # a repetition is no error
        assert sets.entries("KUBE-TEST") == set(entries)
        printed = subprocess.run(["ipset", "list", "KUBE-TEST"], capture_output=True, text=True, check=True).stdout
        assert set(printed.partition("Members:\n")[2].split()) == set(CASES[kind].values())
        sets.remove("KUBE-TEST", entries[:1])
        sets.remove("KUBE-TEST", entries[:1])
        assert sets.entries("KUBE-TEST") == set(entries[1:])
        sets.destroy("KUBE-TEST")
        sets.destroy("KUBE-TEST")
        assert sets.counts() == {}


def test_ten_thousand_entries_at_once() -> None:
    wanted = [SetEntry(bytes([10, n >> 16, n >> 8 & 255, n & 255]), TCP, n % 65536) for n in range(10_000)]
    with Ipsets.open() as sets:
        sets.create("A", SetKind(HASH_IP_PORT, IPV4), maxelem=20_000)
        sets.add("A", wanted)
        assert sets.entries("A") == set(wanted)
        sets.remove("A", wanted[1:])
        assert sets.entries("A") == set(wanted[:1])
        sets.create("B", SetKind(HASH_IP_PORT, IPV4))
        sets.swap("A", "B")
        assert (sets.entries("A"), sets.entries("B")) == (set(), set(wanted[:1]))


def test_a_bad_entry_costs_only_itself() -> None:
    good = [SetEntry(four(f"10.0.0.{n}"), TCP, 80) for n in range(1, 9)]
    bad = SetEntry(six("fd00::1"), TCP, 80)
    with Ipsets.open() as sets:
        sets.create("A", SetKind(HASH_IP_PORT, IPV4))
        with pytest.raises(RefusedError, match=r"cannot add fd00::1,6:80 to ip set A") as caught:
            sets.add("A", [*good[:4], bad, *good[4:]])
        assert [entry for entry, _ in caught.value.refused] == [bad]
        assert sets.entries("A") == set(good)


def test_a_full_set_is_an_error_that_names_the_limit() -> None:
    with Ipsets.open() as sets:
        sets.create("A", SetKind(HASH_IP, IPV4), hashsize=64, maxelem=2)
        with pytest.raises(RefusedError, match="full"):
            sets.add("A", [SetEntry(four(f"10.0.0.{n}")) for n in range(1, 5)])
        assert len(sets.entries("A")) == 2


def test_refusals_have_codes_and_reasons() -> None:
    kind = SetKind(HASH_IP, IPV4)
    with Ipsets.open() as sets:
        sets.create("A", kind)
        for call, code, text in (
            (lambda: sets.create("A", kind), errno.EEXIST, "cannot create ip set A"),
            (lambda: sets.entries("B"), errno.ENOENT, "cannot read ip set B"),
            (lambda: sets.create("B", SetKind("hash:nonsense", IPV4)), 4098, "lacks this set type"),
        ):
            with pytest.raises(IpsetError, match=text) as caught:
                call()
            assert caught.value.code == code
        with pytest.raises(RefusedError):
            sets.remove("B", [SetEntry(four("10.0.0.1"))])


def test_a_set_that_a_rule_uses_stays() -> None:
    with Ipsets.open() as sets:
        sets.create("A", SetKind(HASH_IP, IPV4))
        rule = ["-A", "INPUT", "-m", "set", "--match-set", "A", "src", "-j", "DROP"]
        subprocess.run(["iptables-legacy", "-w", *rule], check=True)
        with pytest.raises(IpsetError, match="a rule uses the set"):
            sets.destroy("A")
