"""nf_tables over netlink on a real kernel: large batches, refusals, large dumps, equality of read and written data."""

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import HEADER, Netlink, NetlinkError
from kubeproxy.kernel.nftables import elements, nfnetlink
from kubeproxy.kernel.nftables.elements import element_messages
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family
from support import nft

pytestmark = pytest.mark.usefixtures("netns")

TABLE = "t"
SET = elements.Packer.of(4, 0)
MAP = elements.Packer.of(4, 4)
SO_RCVBUFFORCE = 33


@pytest.fixture
def link(netns):
    nft.run(
        f"add table ip {TABLE}\n"
        f"add set ip {TABLE} addresses {{ type ipv4_addr ; }}\n"
        f"add map ip {TABLE} pairs {{ type ipv4_addr : ipv4_addr ; }}\n"
        f"add map ip {TABLE} verdicts {{ type ipv4_addr : verdict ; }}\n"
        f"add set ip {TABLE} spans {{ typeof ip daddr . ip saddr ; flags interval ; }}\n"
        f"add set ip {TABLE} clients {{ type ipv4_addr ; flags dynamic,timeout ; timeout 1h ; size 65536 ; }}\n"
        f"add chain ip {TABLE} target\n"
    )
    link = nfnetlink.Transactions.open()
    yield link
    link.close()


def address(n):
    return (0x0A000000 + n).to_bytes(4, "big")


def add(name, packed):
    return element_messages(nfnetlink.NEW_ELEMENT, Family.IPV4, TABLE, name, packed)


def delete(name, packed):
    return element_messages(nfnetlink.DELETE_ELEMENT, Family.IPV4, TABLE, name, packed)


def asked(question, *given, table=TABLE, family=Family.IPV4):
    """Return the answer of a TableReader with its own socket."""
    with TableReader(family, table, Netlink.open()) as reader:
        found = getattr(reader, question)(*given)
        return list(found) if isinstance(found, Iterator) else found


def keys(name, count=None):
    return {e.key for e in (asked("all_elements", name) if count is None else whole(name, count))}


def whole(name, count):
    """Return a dump without repetitions: while a hash table is resized, some elements are listed twice."""
    for _ in range(200):
        dump = asked("all_elements", name)
        assert len(dump) == count
        if len({e.key for e in dump}) == count:
            return dump
        time.sleep(0.01)
    raise AssertionError("the dump never became whole")


def refusal(link, parts):
    with pytest.raises(NetlinkError) as caught:
        link.commit(parts)
    return caught.value


# -- writing and reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 100_000], ids=["present", "missing"])
def test_answers_to_many_requests_fit_into_the_buffer_of_a_user_namespace(link, first):
    link.commit(add("addresses", [SET.pack(address(n), b"") for n in range(1200)]))
    keys = [address(first + n) for n in range(1200)]
    with Netlink.open() as small:
        small._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 212_992)  # net.core.rmem_max by default
        found = TableReader(Family.IPV4, TABLE, small).look_up("addresses", keys)
    assert found == ({} if first else dict.fromkeys(keys, b""))


def test_elements_of_every_kind_read_back(link):
    one, two = address(1), address(2)
    head, tail = elements.goto_frame(4, b"target")
    link.commit(
        [
            *add("addresses", [SET.pack(one, b"")]),
            *add("pairs", [MAP.pack(one, two)]),
            *add("verdicts", [head + one + tail]),
            *add("spans", [elements.interval_element(one + one + one + two)]),
            *add("clients", [elements.timed_element(one, 60_000, 30_000)]),
        ]
    )

    def only(name):
        (found,) = asked("all_elements", name)
        assert [*chain(*asked("pairs", name))] == [(found.key, found.data)]
        return found

    assert only("addresses") == (one, b"", 0, 0, False)
    assert only("pairs") == (one, two, 0, 0, False)
    assert only("verdicts") == (one, b"target", 0, 0, False)
    assert only("spans") == (one + one + one + two, b"", 0, 0, False)
    client = only("clients")
    assert (client.key, client.timeout) == (one, 60_000)
    assert 0 < client.expires <= 30_000


def test_an_empty_transaction_is_nothing(link):
    before = link.generation()
    link.commit([])
    assert link.generation() == before


def test_a_message_stays_under_the_length_of_an_attribute(link):
    parts = add("addresses", [SET.pack(address(n), b"") for n in range(20_000)])
    assert len(parts) > 5
    assert all(HEADER.unpack_from(part)[0] == len(part) < 0x10000 for part in parts)
    link.commit(parts)
    assert keys("addresses", 20_000) == {address(n) for n in range(20_000)}


def test_pieces_of_one_size_are_cut_between_elements(link):
    packed = b"".join(SET.pack(address(n), b"") for n in range(20_000))
    pieces = [packed[:30_000], packed[30_000:30_001], packed[30_001:]]
    parts = element_messages(nfnetlink.NEW_ELEMENT, Family.IPV4, TABLE, "addresses", pieces, SET.size)
    link.commit(parts)
    assert keys("addresses", 20_000) == {address(n) for n in range(20_000)}


@pytest.mark.slow("120,000 elements")
def test_a_big_transaction_and_a_big_dump_are_whole(link):
    count = 120_000
    link.commit(add("pairs", [MAP.pack(address(n), address(n + 1)) for n in range(count)]))
    found = {e.key: e.data for e in whole("pairs", count)}
    assert found == {address(n): address(n + 1) for n in range(count)}
    link.commit(delete("pairs", [SET.pack(address(n), b"") for n in range(count)]))
    assert keys("pairs") == set()


def test_a_value_is_replaced_in_one_transaction(link):
    link.commit(add("pairs", [MAP.pack(address(1), address(2))]))
    link.commit([*delete("pairs", [SET.pack(address(1), b"")]), *add("pairs", [MAP.pack(address(1), address(3))])])
    assert [e.data for e in asked("all_elements", "pairs")] == [address(3)]


# -- refusals ------------------------------------------------------------------------------------------------------


def test_deleting_a_missing_element_aborts_the_whole_transaction(link):
    error = refusal(
        link, [*add("addresses", [SET.pack(address(1), b"")]), *delete("pairs", [SET.pack(address(9), b"")])]
    )
    assert error.code == errno.ENOENT
    assert isinstance(error, ApplyError)
    assert keys("addresses") == set()


@pytest.mark.parametrize("first", [True, False])
def test_a_refusal_anywhere_in_the_transaction_is_noticed(link, first):
    good, bad = add("addresses", [SET.pack(address(1), b"")]), delete("addresses", [SET.pack(address(9), b"")])
    assert refusal(link, [*bad, *good] if first else [*good, *bad]).code == errno.ENOENT
    assert keys("addresses") == set()


def test_another_value_for_a_key_is_refused(link):
    link.commit(add("pairs", [MAP.pack(address(1), address(2))]))
    link.commit(add("pairs", [MAP.pack(address(1), address(2))]))  # a repetition is no error
    assert refusal(link, add("pairs", [MAP.pack(address(1), address(3))])).code == errno.EEXIST


def test_an_unknown_set_table_or_chain_is_refused(link):
    assert refusal(link, add("nobody", [SET.pack(address(1), b"")])).code == errno.ENOENT
    missing = element_messages(nfnetlink.NEW_ELEMENT, Family.IPV4, "nobody", "s", [SET.pack(address(1), b"")])
    assert refusal(link, missing).code == errno.ENOENT
    head, tail = elements.goto_frame(4, b"nobody")
    assert refusal(link, add("verdicts", [head + address(1) + tail])).code == errno.ENOENT


def test_many_refusals_in_one_transaction_are_one_error(link):
    """Each message may be answered; these answers must not be taken for those of the next transaction."""
    bad = [part for n in range(2000) for part in delete("addresses", [SET.pack(address(n), b"")])]
    for _ in range(3):
        assert refusal(link, bad).code == errno.ENOENT
    link.commit(add("addresses", [SET.pack(address(1), b"")]))
    assert keys("addresses") == {address(1)}
    assert link.generation() > 0


def test_more_refusals_than_fit_the_buffer_are_one_error(link, monkeypatch):
    monkeypatch.setattr(nfnetlink, "_RECEIVE_BUFFER", 1 << 16)
    small = nfnetlink.Transactions.open()
    bad = [part for n in range(2000) for part in delete("addresses", [SET.pack(address(n), b"")])]
    for n in range(3):
        assert refusal(small, bad).code == errno.ENOBUFS
        small.commit(add("addresses", [SET.pack(address(n), b"")]))
    assert keys("addresses") == {address(n) for n in range(3)}
    small.close()


def test_in_a_user_namespace_buffers_are_smaller():
    code = (
        "from kubeproxy.kernel.nftables.nfnetlink import Transactions as T; t = T.open(); print(t.generation(), t.room)"
    )
    done = subprocess.run(["unshare", "-Urn", sys.executable, "-c", code], capture_output=True, text=True, check=True)
    generation, room = map(int, done.stdout.split())
    assert generation > 0
    assert 0 < room < nfnetlink._SEND_BUFFER


def test_the_error_names_the_refused_request(link):
    error = refusal(link, delete("addresses", [SET.pack(address(9), b"")]))
    assert "No such file" in str(error)


# -- reading -------------------------------------------------------------------------------------------------------


def test_every_transaction_adds_one_to_the_generation(link):
    before = link.generation()
    link.commit(add("addresses", [SET.pack(address(1), b"")]))
    assert link.generation() == before + 1
    refusal(link, delete("addresses", [SET.pack(address(9), b"")]))
    assert link.generation() == before + 1
    nft.run(f"add element ip {TABLE} addresses {{ 10.0.0.7 }}\nadd element ip {TABLE} addresses {{ 10.0.0.8 }}\n")
    assert link.generation() == before + 2


def test_tables_and_their_comments(link):
    assert asked("header", table="nobody") is None
    assert asked("header", family=Family.IPV6) is None
    bare = asked("header")
    assert bare is not None
    assert bare.comment == ""
    nft.run('add table ip said { comment "what we say" ; }\n')
    said = asked("header", table="said")
    assert said is not None
    assert said.comment == "what we say"
    nft.run(f"delete table ip {TABLE}\nadd table ip {TABLE}\n")
    again = asked("header")
    assert again is not None
    assert again.handle != bare.handle


def test_chains_and_rules_of_one_table_only(link):
    nft.run(
        "add table ip other\nadd chain ip other c\nadd set ip other s { type ipv4_addr ; }\nadd rule ip other c drop\n"
    )
    nft.run(f"add table ip6 {TABLE}\nadd chain ip6 {TABLE} six\n")
    assert asked("chains") == {"target"}
    assert asked("chains", family=Family.IPV6) == {"six"}
    assert asked("chains", table="nobody") == frozenset()
    assert asked("rules") == []
    assert len(asked("rules", table="other")) == 1


def test_rules_are_alike_when_they_do_the_same(link):
    rule = "ip daddr @addresses meta l4proto { tcp, udp } meta mark set meta mark or 0x4000 goto target"
    nft.run("add table ip other\nadd chain ip other target\nadd set ip other addresses { type ipv4_addr ; }\n")
    for table, text in ((TABLE, rule), ("other", rule)):
        nft.run(f"add chain ip {table} c\nadd rule ip {table} c {text}\n")

    def rules(table):
        return asked("contents", table=table).chains["c"].rules

    assert rules(TABLE) == rules("other")
    nft.run(f"replace rule ip {TABLE} c handle {asked('rules')[0].handle} ip daddr @addresses drop\n")
    assert rules(TABLE) != rules("other")


def test_a_missing_set_is_an_error(link):
    with pytest.raises(NetlinkError) as caught:
        asked("all_elements", "nobody")
    assert caught.value.code == errno.ENOENT


def test_a_transaction_above_the_send_buffer_is_an_error_that_names_the_limit(netns, monkeypatch):
    """As in a user namespace, where a buffer has at most net.core.wmem_max."""
    monkeypatch.setattr(
        "kubeproxy.kernel.netlink.protocol.grow_buffer", lambda opened, *_: opened.setsockopt(1, 7, 100_000)
    )
    small = nfnetlink.Transactions.open()
    error = refusal(small, add("addresses", [SET.pack(address(n), b"") for n in range(20_000)]))
    small.close()
    assert error.code == errno.EMSGSIZE
    assert "net.core.wmem_max" in str(error)
