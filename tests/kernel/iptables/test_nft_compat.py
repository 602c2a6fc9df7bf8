"""Rules written over netlink are the same as those of iptables-nft-restore, according to iptables-nft-save."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest
from hypothesis import example, given
from msgspec import structs

from kubeproxy.backends.iptables.skeleton import LOCALHOST_COUNTER
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.xtables import nft_compat, xtables
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from support.effort import examples
from support.fake_tables import backend as fake_backend
from support.iptables_kernel import OPTIONS, WORLD, check, opened, plans, state
from support.namespaces import run
from support.own_network import own_network
from support.random_plans import histories

SKELETON = ("-m conntrack", "-m mark", "-I ")
"""The command still writes rules that belong to no Service."""


class Refusing:
    """Commands without an effect."""

    uses_nft = True

    def __init__(self, family: Family) -> None:
        self.family = family
        self.name = "iptables-refusing"
        self.asked: list[str] = []

    def restore(self, pieces) -> None:
        self.asked += pieces


def commands(family: Family) -> Commands:
    return xtables.variant_commands(family, "nft")


def inputs(world, family: Family, states) -> list[str]:
    """Return the input of iptables-nft-restore for syncs of these states in turn."""
    made = fake_backend(world, family, uses_nft=True, options=OPTIONS)
    list(made.resync(states[0]))
    for before, after in pairwise(states):
        list(made.sync([(name, after.get(name, ())) for name in before | after if before.get(name) != after.get(name)]))
    return made.tables.inputs


def saved(family: Family) -> list[str]:
    text = run("iptables-nft-save" if family is Family.IPV4 else "ip6tables-nft-save")
    return [line for line in text.splitlines() if not line.startswith("#")]


@examples(15)
@given(histories())
@example((WORLD, [state(), {("default", "b"): plans("b", 2, "10.244.0.9"), ("default", "c"): plans("c", 3)}]))
def test_netlink_and_the_command_write_the_same_rules(history):
    world, states = history
    family = world.families[0]
    ours = structs.replace(world.of(family), nodeport_ips=None)
    world = structs.replace(world, **{family.label.lower(): ours})
    texts = inputs(world, family, states)
    with own_network():
        for text in texts:
            commands(family).restore([text])
        wanted = saved(family)
    with own_network():
        by_netlink = 0
        for text in texts:
            if any(word in text for word in SKELETON):
                commands(family).restore([text])
                continue
            refusing = Refusing(family)
            made = RuleWriter.open(refusing)
            made.prepared(text)()
            made.close()
            assert refusing.asked == []
            by_netlink += 1
        assert saved(family) == wanted
    assert by_netlink


@pytest.mark.parametrize(
    "line",
    [
        "-A A -m mark --mark 0x4000/0x4000 -j ACCEPT",
        "-A A -m tcp --sport 80 -j ACCEPT",
        "-A A -m addrtype --dst-type UNICAST -j ACCEPT",
        "-A A -m statistic --mode nth --every 2 --packet 0 -j ACCEPT",
        "-A A -m recent --update --name x -j ACCEPT",
        "-A A -m nfacct --nfacct-name x --nfacct-name y -j ACCEPT",
        "-A A -m nfacct --nfacct-name " + "x" * 32 + " -j ACCEPT",
        "-A A -o eth0 -j ACCEPT",
        "-A A ! -p tcp -j ACCEPT",
        "-A A -p icmp -j ACCEPT",
        "-A A -s fd00::1/128 -j ACCEPT",
        "-A A -s 10.0.0.0/33 -j ACCEPT",
        "-A A -j DNAT --to-destination 10.0.0.1:80 --random",
        "-A A -j DNAT --to-destination [fd00::1]:80",
        "-A A -j REJECT --reject-with tcp-reset",
        "-A A -j LOG",
        "-A A -g B",
        "-I A -j ACCEPT",
        "-D A -j ACCEPT",
        ":INPUT ACCEPT [0:0]",
        "-A A -m comment --comment " + "x" * 256 + " -j ACCEPT",
    ],
)
def test_rules_of_others_are_not_guessed(line):
    with pytest.raises(nft_compat.Unknown):
        nft_compat.encode(f"*nat\n{line}\nCOMMIT\n", Family.IPV4)


def check_written_alike(text: str) -> None:
    """Let the command write chains, and then netlink: iptables-nft-save prints the same."""
    commands(Family.IPV4).restore([text])
    wanted = saved(Family.IPV4)
    made = RuleWriter.open(Refusing(Family.IPV4))
    made.prepared(text)()
    made.close()
    assert saved(Family.IPV4) == wanted


def test_hosts_of_a_network_are_taken_for_the_network(netns):
    text = "*nat\n:A - [0:0]\n-A A -s 10.1.2.3/9 -j ACCEPT\n-A A ! -d 10.255.2.3/9 -j ACCEPT\nCOMMIT\n"
    check_written_alike(text)


def test_counters_are_those_of_the_command(netns):
    assert xtables.ensure_counter(LOCALHOST_COUNTER)
    text = (
        f"*nat\n:A - [0:0]\n-A A -d 127.0.0.0/8 -p tcp -m nfacct --nfacct-name {LOCALHOST_COUNTER} -j ACCEPT\nCOMMIT\n"
    )
    check_written_alike(text)


def test_one_socket_reads_all_counters(netns):
    assert xtables.ensure_counter(LOCALHOST_COUNTER)
    with Netlink.open() as link:
        assert xtables.counted_packets(LOCALHOST_COUNTER, link) == 0
        with pytest.raises(NetlinkError):
            xtables.counted_packets("missing", link)
        run("iptables-nft", "-A", "OUTPUT", "-m", "nfacct", "--nfacct-name", LOCALHOST_COUNTER)
        run("ip", "link", "set", "lo", "up")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", ("127.0.0.1", 9))
        assert xtables.counted_packets(LOCALHOST_COUNTER, link) >= 1


def test_tables_that_are_done_are_not_left_to_the_command(netns):
    run("iptables-nft", "-t", "filter", "-N", "KUBE-SERVICES")
    refusing = Refusing(Family.IPV4)
    made = RuleWriter.open(refusing)
    first, second = (f"*{table}\n:KUBE-SERVICES - [0:0]\nCOMMIT\n" for table in ("filter", "nat"))
    made.prepared(first + second)()
    made.close()
    assert refusing.asked == [second]


def test_transactions_are_no_larger_than_the_buffer(netns, monkeypatch, caplog):
    caplog.set_level("DEBUG", "kubeproxy.iptables")
    monkeypatch.setattr(nfnetlink, "_SEND_BUFFER", 212992)  # as without CAP_NET_ADMIN, by default
    made = opened("nft")
    pods = [f"10.244.0.{n}" for n in range(1, 41)]
    wanted = {("default", f"s{n}"): plans(f"s{n}", n, *pods) for n in range(1, 41)}
    assert len(list(made.resync(wanted))) > 10
    check("nft", wanted)
    assert "Message too long" not in caplog.text
    made.close()


def test_the_command_writes_rules_that_the_kernel_refuses_over_netlink(netns):
    text = "*nat\n:KUBE-SVC-A - [0:0]\n:KUBE-SEP-A - [0:0]\n-A KUBE-SVC-A -j KUBE-SEP-A\nCOMMIT\n"
    made = RuleWriter.open(commands(Family.IPV4))
    made.prepared(text)()  # the table does not exist yet
    assert "-A KUBE-SVC-A -j KUBE-SEP-A" in saved(Family.IPV4)
    with pytest.raises(ApplyError, match="KUBE-SEP-B"):
        made.prepared(text.replace("-j KUBE-SEP-A", "-j KUBE-SEP-B"))()
    assert "-A KUBE-SVC-A -j KUBE-SEP-A" in saved(Family.IPV4)
    made.close()
