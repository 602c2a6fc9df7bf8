"""The comparison of two tables: their common parts, and the visible changes of a chain or a set."""

from contextlib import contextmanager

import pytest

from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.nftables.expressions import Lookup
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import listed_chains
from support import nft
from support.own_network import own_network

IP = 2
TEXT = """add table ip {0}
add chain ip {0} base {{ type filter hook forward priority 0 ; }}
add chain ip {0} other
add set ip {0} addresses {{ type ipv4_addr ; }}
add map ip {0} ports {{ type inet_service : verdict ; }}
add rule ip {0} other tcp dport {{ 80, 443 }} accept
add rule ip {0} other tcp dport vmap {{ 81 : drop, 82 : goto base-2 }}
"""


@contextmanager
def tables(*names):
    with own_network(), Netlink.open() as link:
        for name in names:
            nft.run(TEXT.format(name).replace("\nadd rule", f"\nadd chain ip {name} base-2\nadd rule", 1))
        yield link


def bases(link, table):
    return {chain.name: chain.hook for chain in listed_chains(link, IP, table)}


def contents(link, table):
    return TableReader(IP, table, link).contents()


def test_two_tables_that_are_alike():
    with tables("one", "two") as link:
        assert bases(link, "one") == bases(link, "two")
        assert bases(link, "one").keys() == {"base", "base-2", "other"}
        assert [name for name, base in bases(link, "one").items() if base] == ["base"]
        assert contents(link, "one") == contents(link, "two")
        assert contents(link, "one").sets.keys() == {"addresses", "ports"}
        rules = contents(link, "one").chains["other"].rules
        assert [len(each.set.elements) for rule in rules for each in rule if isinstance(each, Lookup)] == [2, 2]


@pytest.mark.parametrize(
    "line",
    [
        "add chain ip one base { policy drop ; }",
        "delete chain ip one base\nadd chain ip one base { type filter hook forward priority 1 ; }",
        "delete chain ip one base\nadd chain ip one base { type filter hook input priority 0 ; }",
        "delete chain ip one base\nadd chain ip one base { type route hook output priority 0 ; }",
        "delete chain ip one base\nadd chain ip one base",
    ],
)
def test_where_a_chain_hangs_shows(line):
    with tables("one", "two") as link:
        nft.run(f"{line}\n")
        assert bases(link, "one") != bases(link, "two")


@pytest.mark.parametrize(
    "kind", ["set ip one addresses { type ipv6_addr ; }", "set ip one addresses { type ipv4_addr ; flags interval ; }"]
)
def test_the_type_of_a_set_shows(kind):
    with tables("one", "two") as link:
        nft.run(f"delete set ip one addresses\nadd {kind}\n")
        assert contents(link, "one").sets != contents(link, "two").sets


@pytest.mark.parametrize("verdict", ["accept", "goto base-2", "jump base-2"])
def test_the_elements_of_a_rules_set_show(verdict):
    with tables("one", "two") as link:
        handle = TableReader(IP, "one", link).rules()[1].handle
        nft.run(f"replace rule ip one other handle {handle} tcp dport vmap {{ 81 : {verdict}, 82 : goto base-2 }}\n")
        assert contents(link, "one").chains != contents(link, "two").chains


def test_missing_objects_and_requirements():
    with tables("one") as link:
        assert listed_chains(link, IP, "none") == []
        with pytest.raises(NetlinkError, match="No such file"):
            contents(link, "none")
