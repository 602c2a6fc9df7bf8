"""The iptables rules that ipvs mode reads without running a command, compared with the output of iptables-save."""

from __future__ import annotations

import pytest

from kubeproxy.backends.ipvs.layout import JUMPS, Rules
from kubeproxy.backends.ipvs.wire import NodeKernel
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.registry import CounterMetric
from support.cluster_objects import world
from support.namespaces import run

COMMANDS = {Family.IPV4: "iptables-nft", Family.IPV6: "ip6tables-nft"}


def kernel(family: Family) -> NodeKernel:
    """A backend that is used only for rules."""
    return NodeKernel(xtables.commands(COMMANDS[family]), None, None, None, CounterMetric())


def write_jumps(family: Family, without: int = -1) -> None:
    """Write the jumps except one, and the chains that they lead to."""
    jumps = [jump for number, jump in enumerate(JUMPS) if number != without]
    text = ""
    for table in ("filter", "nat"):
        chains = {jump.target for jump in JUMPS if jump.table == table}
        text += f"*{table}\n" + "".join(f":{chain} - [0:0]\n" for chain in chains)
        text += "".join(f"-A {jump.rule}\n" for jump in jumps if jump.table == table) + "COMMIT\n"
    xtables.commands(COMMANDS[family]).restore([text])


@pytest.mark.parametrize("family", list(Family), ids=["IPv4", "IPv6"])
def test_missing_jumps_are_those_that_the_command_does_not_list(netns, family):
    ours = Rules(family, world())
    assert list(kernel(family).missing_jumps(ours)) == list(JUMPS)
    write_jumps(family, without=3)
    assert list(kernel(family).missing_jumps(ours)) == [JUMPS[3]]


@pytest.mark.parametrize("family", list(Family), ids=["IPv4", "IPv6"])
def test_rules_read_otherwise_when_they_are_changed_and_only_then(netns, family):
    command, ours, seen = COMMANDS[family], Rules(family, world()), kernel(family)
    write_jumps(family)
    before = seen.rules(ours)
    assert len(before) == len(JUMPS)
    run(command, "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
    run(command, "-t", "nat", "-N", "OTHERS")
    first = next(jump for jump in JUMPS if jump[:2] == ("nat", "OUTPUT"))
    run(command, "-t", "nat", "-R", "OUTPUT", "1", *first_words(first), "-c", "7", "4242")
    assert seen.rules(ours) == before, "others' rules and counters are no change"
    run(command, "-t", "nat", "-A", "KUBE-SERVICES", "-p", "tcp", "--dport", "80", "-j", "RETURN")
    changed = seen.rules(ours)
    assert changed != before
    run(command, "-t", "nat", "-R", "KUBE-SERVICES", "1", "-p", "tcp", "--dport", "81", "-j", "RETURN")
    assert seen.rules(ours) not in (before, changed)
    run(command, "-t", "nat", "-F", "KUBE-SERVICES")
    assert seen.rules(ours) == before
    run(command, "-t", "nat", "-D", "OUTPUT", "1")
    assert len(seen.rules(ours)) == len(JUMPS) - 1


def first_words(jump) -> list[str]:
    return ["-m", "comment", "--comment", jump.comment, "-j", jump.target]
