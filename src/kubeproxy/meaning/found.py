"""Reads the rules in this node's kernel: tables of other programs, and, to compare whole rulesets, the rules of a
kube-proxy (this program or the Go kube-proxy). Rules of nf_tables, including iptables-nft, are read over netlink. Rules
of legacy iptables, and of the table nat of iptables-nft, are read from the output of iptables-save."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from typing import Final

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.chains import LEGACY, NFT, Chain, chains, iptables_chains, legacy_tables
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.tables import TABLE_FAMILIES, listed_chains
from kubeproxy.kernel.route import local_addresses
from kubeproxy.kernel.xtables import xtables
from kubeproxy.meaning import iptables, nft_tables, nftables, rules
from kubeproxy.meaning.firewall import Firewall
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family

_NUMBERS: Final = {word: number for number, word in TABLE_FAMILIES.items()}
_KUBELETS: Final = "KUBE-FIREWALL"
_MASQUERADES: Final = "KUBE-POSTROUTING"
_SERVICES: Final = "KUBE-SERVICES"
_TABLE: Final = "kube-proxy"
_MOST: Final = 2000
"""The maximum number of evaluated rules of a table, and of elements of a set. Firewalls usually have tens of rules. A
larger table has no certain result."""


def place_of(family: Family) -> NodePlace:
    """Return the node's own addresses of one family. Raises NetlinkError."""
    own = [int.from_bytes(address.ip, "big") for address in local_addresses(family)]
    bits = 8 * family.address_size
    return NodePlace(bits, rules.union([*rules.LOOPBACK[bits], *((each, each) for each in own)]))


def firewalls(
    known: Iterable[Chain], without: frozenset[str], owns: Callable[[str], bool] = lambda _: False
) -> list[Firewall]:
    """Return the tables with base chains, except the nf_tables tables in `without`. The table nat of iptables-nft and
    all tables of legacy iptables are read from iptables-save, if it is installed. In the table nat, chains that the
    running proxy `owns` end the evaluation, except the chain that masquerades. Raises NetlinkError or ApplyError."""
    tables = sorted({(chain.family, chain.table) for chain in known if chain.hook and chain.table not in without})
    place, found = cache(place_of), []
    saved = [(command, family, table) for family, command in LEGACY.items() for table in legacy_tables(family)]
    saved += [(NFT[family], family, table) for family, table in tables if table == "nat" and family in NFT]
    for command, family, table in saved:
        if command in xtables.installed():
            with suppress(xtables.Incompatible):  # rules that iptables cannot print
                found.append(_printed(command, family, table, place, owns))
                tables = [one for one in tables if (NFT.get(one[0]), *one) != (command, family, table)]
    with Netlink.open() as link:
        return [*(_read(*table, link, place) for table in tables), *found]


def _read(family: str, name: str, link: Netlink, place: Callable[[Family], NodePlace]) -> Firewall:
    table, whole = _first_rules(nft_tables.read(_NUMBERS[family], name, link, _MOST))
    return Firewall(f"table {family} {name}", family, partial(nftables.compiled, table), place, whole=whole)


def _first_rules(table: nft_tables.NftTable) -> tuple[nft_tables.NftTable, bool]:
    left, chains = _MOST, {}
    for name, chain in table.chains.items():
        chains[name] = chain._replace(rules=chain.rules[:left])
        left -= len(chains[name].rules)
    return table._replace(chains=chains), chains == table.chains


def _printed(
    command: str, family: str, table: str, place: Callable[[Family], NodePlace], owns: Callable[[str], bool]
) -> Firewall:
    head, lines, own = [], [], {}
    for line in xtables.commands(command).saved(table):
        if line.startswith("-A ") and line.split(" ", 2)[1] not in own:
            lines.append(line)
        elif line.startswith(("*", ":")):
            head.append(line)
            name = line[1:].partition(" ")[0]
            if table == "nat" and owns(name) and name != _MASQUERADES:
                own[name] = f"-A {name} -j ACCEPT"
    compiled = partial(iptables.compiled, "\n".join([*head, *own.values(), *lines[:_MOST], "COMMIT"]))
    where, whole = f"{command} -t {table}", len(lines) <= _MOST
    return Firewall(where, family, compiled, place, whole=whole, shared=bool(own))


def rules_of_kube_proxy(family: Family, place: NodePlace) -> CompiledRules:
    """Return kube-proxy's rules in the kernel, from its own table and from the tables of iptables."""
    found = []
    with Netlink.open() as link:
        if any(chain.table == _TABLE for chain in listed_chains(link, family)):
            found += nftables.compiled(nft_tables.read(family, _TABLE, link), place)
    return CompiledRules([*found, *iptables.compiled(iptables.of_kube_proxy(_iptables_save(family)), place)])


def rulesets_of_kube_proxies(family: Family) -> list[str]:
    """Return the places that have rules for Services: the table kube-proxy, and the tables nat of iptables. Raises
    ApplyError."""
    known = chains()
    of_iptables = (one for one in iptables_chains(known) if (one.family, one.table) == (family, "nat"))
    found = [f"the chains KUBE-* of iptables-{one.variant}" for one in of_iptables if one.name == _SERVICES]
    own = any(_NUMBERS[one.family] == family and one.table == _TABLE for one in known)
    return [f"the table {_TABLE}"] * own + found


def rules_of_kubelet(family: Family) -> str:
    """Return input for iptables-restore with the kubelet's chain KUBE-FIREWALL, which remains in every mode, and the
    jumps to this chain; '' without the chain."""
    saved = _iptables_save(family, "-t", "filter")
    lines = [line for line in saved.splitlines() if _KUBELETS in line and line.startswith((":", "-A "))]
    return "\n".join(("*filter", *lines, "COMMIT", "")) if lines else ""


def _iptables_save(family: Family, *arguments: str) -> str:
    try:
        commands = xtables.variant_commands(family, xtables.chosen())
    except ApplyError:
        return ""
    done = subprocess.run([f"{commands.name}-save", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ApplyError(f"cannot read the rules: {commands.name}-save: {done.stderr.strip()}")
    return done.stdout
