"""Chains of any program that filter packets, and whether they let new connections pass. Reads only, changes nothing.

nf_tables is read over netlink, where iptables-nft keeps its rules too; legacy iptables where the kernel says that it
has tables, since asking for one that is not there would make it. Source: include/uapi/linux/netfilter of Linux 6.18.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables import chains as nf_chains
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.kernel.nftables.chains import HOOKS, TABLE_FAMILIES
from kubeproxy.kernel.rule_walk import NEW, Aim, Fate, extension, fate, is_established
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family, family_of

_FAMILIES: Final = {word: number for number, word in TABLE_FAMILIES.items() if word in {"inet", "ip", "ip6"}}
_MOST_RULES: Final = 2000
"""Rules that are read of one base chain and those that it leads to; a firewall's are tens."""
_TRACKED: Final = -200  # NF_IP_PRI_CONNTRACK
_TRANSLATED: Final = -100
_MASQUERADED: Final = 100  # NF_IP_PRI_NAT_SRC
_CT_STATE: Final = 0  # NFT_CT_STATE
_VERDICTS: Final = {x.DROP: "drop", x.ACCEPT: "accept"}
_SILENT: Final = frozenset({"immediate", "reject", "target", "queue", "counter", "log"})
"""Expressions that choose no packets, or that are the verdict."""
_OUR_PREFIX: Final = "KUBE-"
IP_FAMILIES: Final = {"ip": Family.IPV4, "ip6": Family.IPV6}
_IPTABLES: Final = frozenset({"filter", "nat", "mangle", "raw", "security"})
_LEGACY_TABLES: Final = {"ip": "ip_tables_names", "ip6": "ip6_tables_names"}
_COMMANDS: Final = {"ip": "iptables-legacy", "ip6": "ip6tables-legacy"}


class Chain(NamedTuple):
    """A chain: family (inet, ip, ip6), table and name; of one that filters hook, policy (accept, drop), priority."""

    family: str
    table: str
    name: str
    hook: str = ""
    policy: str = ""
    priority: int = 0


class Filter(NamedTuple):
    """What a chain at a hook does with packets that begin a connection.

    `accepts`: some rule lets new connections pass, or leads to where that cannot be told. `drops`: how many rules drop
    or reject. `closes`: what no rule takes is dropped or rejected. `where` names the table as its program does.
    """

    where: str
    family: str
    chain: str
    hook: str
    closes: bool
    accepts: bool
    drops: int


class _Rule(NamedTuple):
    """What matters of a rule: its verdict ('accept', 'drop', 'other', ''), where it leads, whether it takes all
    packets, and whether it is for connections that there are already.
    """

    verdict: str
    target: str
    takes_all: bool
    established: bool


def chains() -> list[Chain]:
    """Return the chains of all nf_tables tables of IP. Raises NetlinkError."""
    with Netlink.open(nfnetlink.NETLINK_NETFILTER) as link:
        there = list(nf_chains.chains(link))
    return [_chain(one) for one in there if TABLE_FAMILIES.get(one.family) in _FAMILIES]


def _chain(one: nf_chains.Chain) -> Chain:
    family = TABLE_FAMILIES[one.family]
    if one.base is None or one.kind != "filter":
        return Chain(family, one.table, one.name)
    hook = HOOKS[one.base.hook] if one.base.hook < len(HOOKS) else ""
    return Chain(family, one.table, one.name, hook, "drop" if one.drops else "accept", one.base.priority)


def filters(known: Iterable[Chain], without: frozenset[str]) -> list[Filter]:
    """Return what filters packets in nf_tables, but for tables of these names. Raises NetlinkError."""
    found = []
    with Netlink.open(nfnetlink.NETLINK_NETFILTER) as link:
        for chain in known:
            if chain.hook and chain.table not in without:
                rules = _Reader(chain, link)
                found.append(_judged(f"table {chain.family} {chain.table}", chain, rules))
    return found


class Drop(NamedTuple):
    """A chain that drops what begins a connection, with its hook, and the destination."""

    where: str
    chain: str
    hook: str
    destination: bytes
    port: int


def dropped(
    known: Iterable[Chain], without: frozenset[str], aims: Sequence[Aim], early: Mapping[str, Aim] | None = None
) -> list[Drop]:
    """Return which chains surely drop packets on their way to where these were translated to. Raises NetlinkError.

    `early` has what a packet is before it is translated, by the hook where that is.
    """
    found = []
    with Netlink.open(nfnetlink.NETLINK_NETFILTER) as link:
        for chain in known:
            if chain.table in without:
                continue
            rules = cache(partial(_raw_rules, chain, link))
            for aim in _passing(chain, aims, early or {}):
                ours = IP_FAMILIES.get(chain.family) in {None, family_of(aim.destination)}
                if ours and fate(chain.name, chain.policy, rules, aim) is Fate.DROPPED:
                    where = f"table {chain.family} {chain.table}"
                    found.append(Drop(where, chain.name, chain.hook, aim.destination, aim.port))
    return found


def _passing(chain: Chain, aims: Sequence[Aim], early: Mapping[str, Aim]) -> Sequence[Aim]:
    """Return the packets as a chain sees them: translation at a hook has the priority NF_IP_PRI_NAT_DST or _SRC."""
    if chain.hook == "forward" or (chain.hook == "output" and chain.priority > _TRANSLATED):
        return aims
    if chain.hook == "postrouting" and chain.priority < _MASQUERADED:
        return aims
    if chain.hook not in early or chain.priority >= _TRANSLATED:
        return ()
    return [early[chain.hook]._replace(state=NEW if chain.priority > _TRACKED else None)]


def _raw_rules(chain: Chain, link: Netlink, name: str) -> list[bytes]:
    return [rule.raw for rule in nfnetlink.rules(_FAMILIES[chain.family], chain.table, link, name)]


def legacy_filters(net: Path = Path("/proc/thread-self/net")) -> list[Filter]:
    """Return what the filter tables of legacy iptables do. Raises ApplyError."""
    found = []
    for family in _LEGACY_TABLES:
        if "filter" not in legacy_tables(family, net) or _COMMANDS[family] not in xtables.installed():
            continue
        saved = [line.rstrip() for line in xtables.commands(_COMMANDS[family]).saved("filter")]
        rules = _legacy_rules(saved)
        for line in saved:
            if (policy := re.match(r":(INPUT|FORWARD|OUTPUT) (ACCEPT|DROP) ", line)) is not None:
                chain = Chain(family, "filter", policy[1], policy[1].lower(), policy[2].lower())
                found.append(_judged(f"{_COMMANDS[family]} -t filter", chain, rules))
    return found


class RuleChain(NamedTuple):
    """A chain of iptables: its variant ('nft', 'legacy'), family, table and name."""

    variant: str
    family: Family
    table: str
    name: str


def iptables_chains(known: Iterable[Chain], net: Path = Path("/proc/thread-self/net")) -> list[RuleChain]:
    """Return the chains of iptables, of which those of its variant nft are among the `known`. Raises ApplyError."""
    found = [
        RuleChain("nft", IP_FAMILIES[chain.family], chain.table, chain.name)
        for chain in known
        if chain.family in IP_FAMILIES and chain.table in _IPTABLES
    ]
    for family, number in IP_FAMILIES.items():
        if _COMMANDS[family] not in xtables.installed():
            continue
        for table in legacy_tables(family, net):
            for line in xtables.commands(_COMMANDS[family]).saved(table):
                if line.startswith("-A "):  # after the chains; there may be many
                    break
                if line.startswith(":"):
                    found.append(RuleChain("legacy", number, table, line[1:].split(" ", 1)[0]))
    return found


def legacy_tables(family: str, net: Path = Path("/proc/thread-self/net")) -> list[str]:
    """Return the tables that legacy iptables has of a family, 'ip' or 'ip6'; none where its modules are not loaded."""
    try:
        return (net / _LEGACY_TABLES[family]).read_text(encoding="ascii").split()
    except OSError:
        return []


class _Reader(dict[str, list[_Rule]]):
    """The rules of the chains of one table, each read when it is asked for."""

    def __init__(self, chain: Chain, link: Netlink) -> None:
        super().__init__()
        self._number = _FAMILIES[chain.family]
        self._table, self._link = chain.table, link

    def __missing__(self, name: str) -> list[_Rule]:
        found = nfnetlink.rules(self._number, self._table, self._link, name)
        self[name] = rules = [_rule(rule.raw) for rule in found[:_MOST_RULES]]
        return rules


def _judged(where: str, chain: Chain, rules: Mapping[str, list[_Rule]]) -> Filter:
    """Follow a base chain's rules to where they lead, but into no chains of Kubernetes."""
    reached, seen, accepts, drops, left = [chain.name], {chain.name}, False, 0, _MOST_RULES
    while reached and left > 0:
        for rule in rules[reached.pop()]:
            left -= 1
            accepts |= rule.verdict == "other" or (rule.verdict == "accept" and not rule.established)
            drops += rule.verdict == "drop"
            if rule.target and rule.target not in seen and not rule.target.startswith(_OUR_PREFIX):
                seen.add(rule.target)
                reached.append(rule.target)
    own = rules[chain.name]
    closes = chain.policy == "drop" or any(rule.verdict == "drop" and rule.takes_all for rule in own)
    return Filter(where, chain.family, chain.name, chain.hook, closes, accepts or left <= 0, drops)


def _rule(raw: bytes) -> _Rule:
    """Read the expressions of a rule."""
    verdict = target = ""
    established, state, silent = False, False, True
    for one in x.parse(raw):
        silent &= (one.name if isinstance(one, x.Opaque) else one.KIND) in _SILENT
        match one:
            case x.Ct(key=key):
                state = key == _CT_STATE
            case x.Bitwise(mask=mask) if state:
                established |= not int.from_bytes(mask, sys.byteorder) & NEW
            case x.Lookup(dreg=dreg):
                established |= state  # a set or map of states: of connections that there are, wherever this was seen
                # What is found there is a value, and here always a verdict.
                verdict = verdict if dreg is None or state else "other"
            case x.Immediate(value=x.RuleVerdict(code=code, chain=chain)):
                verdict, target = _VERDICTS.get(code, ""), chain
            case x.Reject():
                verdict, target = "drop", ""
            case x.Opaque(name="queue"):
                verdict, target = "other", ""
            case x.Opaque(name="target", raw=body):
                verdict, target = "drop" if extension(body)[0] == "REJECT" else "", ""
            case x.Opaque(name="match", raw=body):
                kind, info = extension(body)
                established |= kind == "conntrack" and is_established(info)
    return _Rule(verdict, target, silent, established)


def _legacy_rules(lines: Iterable[str]) -> Mapping[str, list[_Rule]]:
    """Read what iptables-save prints of one table."""
    found: defaultdict[str, list[_Rule]] = defaultdict(list)
    for line in lines:
        if line.startswith("-A "):
            target = xtables.target_of(line)
            verdict = {"ACCEPT": "accept", "DROP": "drop", "REJECT": "drop", "NFQUEUE": "other"}.get(target, "")
            words = line.split()
            states = words[words.index("--ctstate") + 1].split(",") if "--ctstate" in words else ()
            established = bool(states) and "NEW" not in states
            bare = words[2:4] == ["-j", target]
            found[xtables.chain_of(line)].append(_Rule(verdict, "" if verdict else target, bare, established))
    return found
