"""The rules of a kube-proxy, this one or the Go one, read from the kernel of this network namespace."""

from __future__ import annotations

import subprocess
from typing import Final

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.tables import listed_chains
from kubeproxy.kernel.xtables import xtables
from kubeproxy.meaning import iptables, nft_tables, nftables
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family

_TABLE: Final = "kube-proxy"


def rules_of_kube_proxy(family: Family, place: NodePlace) -> CompiledRules:
    """Return the rules of kube-proxy in the kernel: of its own table, and of those of iptables."""
    found = []
    with Netlink.open() as link:
        if any(chain.table == _TABLE for chain in listed_chains(link, family)):
            found += nftables.compiled(nft_tables.read(family, _TABLE, link), place)
    return CompiledRules([*found, *iptables.compiled(iptables.of_kube_proxy(_saved(family)), place)])


def _saved(family: Family) -> str:
    """Return the output of iptables-save; '' if iptables is not installed."""
    try:
        commands = xtables.variant_commands(family, xtables.chosen())
    except ApplyError:
        return ""
    done = subprocess.run([f"{commands.name}-save"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ApplyError(f"cannot read the rules: {commands.name}-save: {done.stderr.strip()}")
    return done.stdout
