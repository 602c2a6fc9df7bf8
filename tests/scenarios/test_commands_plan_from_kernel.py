"""`kube-proxy plan --from-kernel`: the present rules are equivalent to the planned ones, or it names a packet."""

from __future__ import annotations

import pytest

from support.live import Live
from support.modes import modes

pytestmark = modes("nftables", "iptables-nft")


async def test_the_present_rules_equal_the_planned_rules(live: Live) -> None:
    live.service("plain", "a1 b1", type="NodePort")
    live.service("sticky", "a1 b1", sessionAffinity="ClientIP")
    live.service("none", "")
    await live.programmed(live.front("plain"), "a1 b1")
    await live.programmed(live.front("sticky"), "a1 b1")
    status, text = await live.ask("plan", "--from-kernel")
    assert (status, text.count("proved for all packets")) == (0, 2), text


@pytest.mark.slow("several questions")
async def test_another_pod_network_has_a_witness(live: Live) -> None:
    live.service("elsewhere", "a1 b1")
    await live.programmed(live.front("elsewhere"), "a1 b1")
    status, text = await live.ask("plan", "--from-kernel", "--cluster-cidr", "10.245.0.0/16,fd00:245::/32")
    assert status == 1, text
    assert "masqueraded" in text


async def test_the_rule_of_a_kubelet_is_no_difference(live: Live) -> None:
    """A kubelet drops packets from other hosts to 127.0.0.0/8; iptables mode writes the same rule."""
    of_kubelet = live.mode.name == "nftables"
    jump = ("OUTPUT", "-j", "KUBE-FIREWALL")
    if of_kubelet:
        await live.run("iptables-nft", "-N", "KUBE-FIREWALL")
        martians = ("!", "-s", "127.0.0.0/8", "-d", "127.0.0.0/8")
        await live.run("iptables-nft", "-A", "KUBE-FIREWALL", *martians, "-j", "DROP")
        await live.run("iptables-nft", "-A", *jump)
    try:
        status, text = await live.ask("plan", "--from-kernel")
        assert (status, text.count("proved for all packets")) == (0, 2), text
    finally:
        if of_kubelet:
            await live.run("iptables-nft", "-D", *jump)
            await live.run("iptables-nft", "-F", "KUBE-FIREWALL")
            await live.run("iptables-nft", "-X", "KUBE-FIREWALL")


@pytest.mark.parametrize("variant", ["nft", "legacy"])
async def test_rules_of_two_kube_proxies_are_not_proved(live: Live, variant: str) -> None:
    if live.mode.name == f"iptables-{variant}":
        return  # one ruleset
    command, jump = f"iptables-{variant}", "PREROUTING -j KUBE-SERVICES"

    async def nat(*commands: str) -> None:
        for words in commands:
            await live.cluster.exec("node", [command, "-t", "nat", *words.split()])

    async def check() -> str:
        await nat("-N KUBE-SERVICES", f"-D {jump}", f"-I {jump}")  # repeated: a newly started proxy removes such rules
        status, text = await live.ask("plan", "--from-kernel")
        named = f"the chains KUBE-* of {command} both have rules for Services" in text
        return "" if (status, text.count("proved for all packets"), named) == (2, 1, True) else text

    try:
        await live.eventually(check)
    finally:
        await nat(f"-D {jump}", "-X KUBE-SERVICES")
