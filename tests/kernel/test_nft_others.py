"""The kernel's announcements of other programs' nf_tables transactions, and how lost announcements are detected."""

import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kubeproxy.kernel.netlink import announcements
from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, open_socket
from kubeproxy.kernel.nftables import changes
from kubeproxy.kernel.nftables.changes import monitor_table
from kubeproxy.kernel.nftables.messages import chain_message
from kubeproxy.kernel.nftables.nfnetlink import Transactions
from support import nft
from support.own_network import own_network

V4, V6 = 2, 10
GROUP = 7  # NFNLGRP_NFTABLES
TABLES = """add table ip ours
add set ip ours addresses { type ipv4_addr ; }
add chain ip ours first
add table ip6 ours
add table ip theirs
add set ip theirs addresses { type ipv4_addr ; }
"""


class Listening:
    def __init__(self, link, others):
        self.link, self.others = link, others
        self.look(V4)
        self.look(V6)

    def look(self, family=V4):
        self.others.reset(family, self.link.generation)

    def heard(self, family=V4):
        return self.others.changes(family, self.link.generation)

    def unheard(self):
        return self.others.paused(self.link.generation)

    def commit(self, name):
        self.link.commit([chain_message(V4, "ours", name)])
        self.others.count_own()


@contextmanager
def listening():
    with own_network(), closing(Transactions.open()) as link:
        nft.run(TABLES)
        with closing(monitor_table("ours")) as others:
            others.ignore(link.port)
            yield Listening(link, others)


def test_nothing_is_waited_for_before_the_first_look(monkeypatch):
    monkeypatch.setattr(changes, "_LATE", (0.0, 3600.0))
    with listening() as here:
        assert here.heard().nothing


def test_foreign_changes_are_reported_with_family_name_and_program():
    with listening() as here:
        nft.run("add element ip ours addresses { 10.0.0.1 }\nadd element ip theirs addresses { 10.0.0.2 }\n")
        heard = here.heard()
        assert (heard.complete, heard.elements, heard.rules) == (True, {"addresses"}, False)
        assert heard.by == {"nft"}
        assert here.heard(V6).nothing
        nft.run("delete table ip6 ours\n")
        assert here.heard(V6).rules
        assert here.heard() == heard  # until the table is inspected
        here.look()
        assert here.heard().nothing


@pytest.mark.parametrize(
    "lines",
    [
        "add rule ip ours first accept",
        "add chain ip ours second",
        "delete chain ip ours first",
        "add set ip ours more { type ipv4_addr ; }",
        "add map ip ours more { type ipv4_addr : ipv4_addr ; }",
        "delete set ip ours addresses",
        "add counter ip ours some",
        "add table ip ours { flags dormant ; }",
        "flush ruleset",
        "flush ruleset\nadd table ip theirs\nadd chain ip theirs some\nadd rule ip theirs some accept",
    ],
)
def test_other_changes_of_the_table_are_reported_as_rules(lines):
    with listening() as here:
        nft.run(lines + "\n")
        heard = here.heard()
        assert (heard.complete, heard.elements, heard.rules) == (True, set(), True)


def test_our_transactions_and_changes_of_other_tables_are_not_reported():
    with listening() as here:
        for number in range(10):
            here.commit(f"chain-{number}")
            nft.run(f"add element ip theirs addresses {{ 10.0.0.{number} }}\n")
        assert here.heard().nothing
        with closing(Transactions.open()) as second:
            here.others.ignore(second.port)
            second.commit([chain_message(V4, "ours", "another")])
            here.others.count_own()
            assert here.heard().nothing


def test_changes_of_other_tables_are_not_received(monkeypatch):
    monkeypatch.setattr(changes, "_RECEIVE_BUFFER", 1 << 17)
    with listening() as here:
        elements = ", ".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(50_000))
        nft.run(f"add element ip theirs addresses {{ {elements} }}\n")
        assert here.heard().nothing
        assert here.others._announced.lost == 0
        # Our transaction may be anywhere among the announcements, so it may be anywhere in a buffer.
        for at in range(60):
            some = [f"add element ip theirs addresses {{ 11.0.{at}.{n} }}" for n in range(60)]
            some.insert(at, f"add element ip ours addresses {{ 10.1.0.{at} }}")
            nft.run("\n".join(some) + "\n")
            heard = here.heard()
            assert (heard.complete, heard.elements, heard.rules) == (True, {"addresses"}, False)
            here.look()
        assert here.others._announced.lost == 0


def test_where_a_filter_has_no_room_everything_is_received(monkeypatch):
    monkeypatch.setattr(announcements, "_MOST_MESSAGES", 400)  # more instructions than the kernel accepts
    with listening() as here:
        nft.run("add element ip theirs addresses { 10.0.0.1 }\n")
        here.commit("chain")
        assert here.heard().nothing
        nft.run("add element ip ours addresses { 10.0.0.1 }\n")
        assert here.heard().elements == {"addresses"}


def test_a_program_may_call_itself_anything():
    with listening() as here, closing(Transactions.open()) as stranger:
        own = Path("/proc/thread-self/comm")
        name = own.read_bytes()
        try:
            own.write_bytes(b"a\nb\x1b[1m")
            stranger.commit([chain_message(V4, "ours", "another")])
        finally:
            own.write_bytes(name)
        assert here.heard().by == {"a?b?[1m"}


def test_a_commit_by_an_unknown_socket_is_reported():
    with listening() as here, closing(Transactions.open()) as stranger:
        stranger.commit([chain_message(V4, "ours", "another")])
        assert here.heard().rules


def ahead(here, transactions):
    """Return the changes while this number of counted transactions is not announced yet."""
    return here.others.changes(V4, lambda: here.link.generation() + transactions)


def test_a_transaction_under_way_is_awaited():
    with listening() as here:
        seen = ahead(here, 1)
        assert (seen.complete, seen.pending, seen.nothing, seen.nothing_yet) == (False, True, False, True)
        assert here.heard().nothing
        nft.run("add chain ip ours second\n")
        assert not ahead(here, 1).nothing_yet
        here.look()
        with here.unheard():
            nft.run("add chain ip theirs first\n")
        assert not ahead(here, 1).nothing_yet


@pytest.mark.parametrize(("transactions", "slowest"), [(2, 10.0), (1, 0.0), (-1, 10.0)])
def test_a_number_that_no_transaction_under_way_explains_is_something_missed(monkeypatch, transactions, slowest):
    monkeypatch.setattr(changes, "_SLOWEST", slowest)
    with listening() as here:
        seen = ahead(here, transactions)
        assert (seen.complete, seen.pending) == (False, False)
        assert not here.heard().complete


def test_that_something_was_missed_shows_until_it_is_looked_at():
    with listening() as here:
        with here.unheard():
            nft.run("add element ip theirs addresses { 10.0.0.1 }\n")
        assert not here.heard().complete
        assert not here.heard().complete
        assert not here.heard(V6).complete
        here.look()
        assert here.heard().nothing
        assert not here.heard(V6).complete


def test_own_changes_during_a_pause_are_not_missed():
    with listening() as here:
        with here.unheard(), here.unheard():
            here.commit("another")
            nft.run("add chain ip ours third\n")
            here.others.count_own()
        assert here.heard().nothing
        nft.run("add chain ip ours fourth\n")
        assert here.heard().rules


@contextmanager
def recorded():
    """A list of the messages announced in the meantime, to be announced once more."""
    messages = []
    with closing(Announcements.open("nf_tables", (GROUP,), 1 << 20)) as recorder:
        yield messages
        messages += recorder.waiting()


def announce(message):
    with closing(open_socket(NETLINK_NETFILTER, 1 << 16)) as sender:
        sender.sendto(message, (0, 1 << GROUP - 1))


def test_the_end_of_an_unseen_beginning_is_reported_without_duration():
    with listening() as here:
        with recorded() as told, here.unheard():
            nft.run("add element ip ours addresses { 10.0.0.1 }\n")
        announce(told[-1])
        assert not here.heard().complete
        here.look()
        nft.run("add element ip theirs addresses { 10.0.0.2 }\n")
        assert here.heard().nothing


def test_a_late_announcement_does_not_replace_a_lost_one():
    with listening() as here:
        with recorded() as told, here.unheard():
            nft.run("add element ip theirs addresses { 10.0.0.1 }\n")
        assert not here.heard().complete
        here.look()
        announce(told[-1])
        with here.unheard():
            nft.run("add element ip ours addresses { 10.0.0.1 }\n")
        assert not here.heard().complete


def test_more_than_can_be_kept_is_known_to_be_missing(monkeypatch):
    monkeypatch.setattr(changes, "_RECEIVE_BUFFER", 1 << 14)
    with listening() as here:
        many = ", ".join(f"10.{n >> 8}.{n & 255}.1" for n in range(5000))
        nft.run(f"add element ip ours addresses {{ {many} }}\n")
        assert not here.heard().complete
        here.look()
        assert here.heard().nothing


def test_thirty_thousand_elements_of_others_at_once_can_be_kept():
    with listening() as here:
        many = ", ".join(f"10.{n >> 8}.{n & 255}.1" for n in range(30_000))
        nft.run(f"add element ip theirs addresses {{ {many} }}\n")
        assert here.heard().nothing


def test_parallel_commits_of_threads_are_all_counted():
    with listening() as here, closing(Transactions.open()) as second:
        here.others.ignore(second.port)
        other = Listening(second, here.others)
        both = [
            threading.Thread(target=lambda by=by, word=word: [by.commit(f"{word}-{n}") for n in range(50)])
            for by, word in ((here, "a"), (other, "b"))
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert here.heard().nothing
