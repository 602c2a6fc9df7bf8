"""Removes leftover iptables rules of a kube-proxy in another mode, which would send connections to deleted endpoints.
The rules are removed after our own rules are in place, so that Services always work. Chains of kubelet, and chains of
other programs with the prefix KUBE-, are not removed. Source: docs/reference.md "Start" 2; kube-proxy v1.36
CleanupLeftovers of iptables and ipvs mode."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from itertools import pairwise
from typing import Final, NamedTuple

from kubeproxy.backends.mode import Keeps, Sight, Trace, keeps_nothing
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel import chains as kernel_chains
from kubeproxy.kernel.chains import IP_FAMILIES, RuleChain, iptables_nft_chains
from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import TABLE_FAMILIES
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES, Family, family_of, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.wording import counted

log = logging.getLogger("kubeproxy.backends")

IPVS_CHAINS: Final = frozenset(
    {"KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"}
)
"""The chains that exist only in ipvs mode."""
MARK: Final = "KUBE-MARK-MASQ"
"""A chain of kube-proxy to which rules of other programs, such as the CNI plugin portmap, may jump too."""

_OWN: Final = "kube-proxy's own"
_TABLES: Final = frozenset({"nat", "filter", "mangle"})
_DECISIONS: Final = {
    "KUBE-SERVICES": "finds the Service of this address",
    "KUBE-EXTERNAL-SERVICES": "checks whether a Service has this address",
    "KUBE-NODEPORTS": "finds the Service of this NodePort",
    "KUBE-NODE-PORT": "finds the Service of this NodePort",
    "KUBE-LOAD-BALANCER": "checks the client against the source ranges",
    "KUBE-SOURCE-RANGES-FIREWALL": "checks the client against the source ranges",
    "KUBE-PROXY-FIREWALL": "checks the client against the source ranges",
    "KUBE-POSTROUTING": "masquerades packets with the mark",
    "KUBE-FORWARD": "accepts forwarded packets of Services",
    **dict.fromkeys(("KUBE-PROXY-CANARY", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"), _OWN),
    MARK: "marks the packet for masquerade",
    "KUBE-SVC-": "an endpoint is picked",
    "KUBE-SVL-": "an endpoint on this node is picked",
    "KUBE-SEP-": "the endpoint",
    "KUBE-EXT-": "the address is external",
    "KUBE-FW-": "checks the client against the source ranges",
    "KUBE-XLB-": _OWN,
}
"""The effect of each chain of a kube-proxy; a key that ends with - is the beginning of many chains' names."""
PREFIXES: Final = tuple(name for name in _DECISIONS if name.endswith("-"))
CHAINS: Final = _DECISIONS.keys() - {MARK, *PREFIXES}


def decision(table: str, chain: str) -> str | None:
    """Describe the effect of a kube-proxy's chain; None for a chain of another program."""
    key = next((prefix for prefix in PREFIXES if chain.startswith(prefix)), chain)
    return _DECISIONS.get(key) if table in _TABLES else None


def is_ours(chain: str) -> bool:
    """Return whether an iptables chain with this name belongs to a kube-proxy."""
    return chain in CHAINS or chain.startswith(PREFIXES)


def chain_traces(chains: Iterable[RuleChain]) -> list[Trace]:
    """Return a trace for each family and iptables variant that has chains; the text of the trace contains the number of
    chains."""
    found: defaultdict[tuple[str, Family], set[RuleChain]] = defaultdict(set)
    for chain in chains:
        found[chain.variant, chain.family].add(chain)
    return [
        Trace(
            f"{counted(len(each), 'chain')} KUBE-... of {name}",
            family,
            partial(_chains_catch, name, each),
            program=name,
        )
        for (variant, family), each in sorted(found.items())
        for name in (f"{xtables.NAMES[family]}-{variant}",)
    ]


def leftover_chains(chains: Iterable[RuleChain], keeps: Keeps) -> tuple[list[Trace], list[Trace]]:
    """Return two groups of leftover chains of a kube-proxy: chains that the running mode removes at its start, and
    chains of an iptables variant that is not installed. Raises ApplyError, Unsupported."""

    @cache
    def commands(variant: str, family: Family) -> xtables.Commands | None:
        each = map(xtables.commands, xtables.installed_for(family))
        return next((one for one in each if one.uses_nft is (variant == "nft")), None)

    removed, stuck = [], []
    for chain in (one for one in chains if is_ours(one.name)):
        used = commands(chain.variant, chain.family)
        if used is None:
            stuck.append(chain)
        elif not keeps(used, chain.table, chain.name):
            removed.append(chain)
    return chain_traces(removed), chain_traces(stuck)


def _chains_catch(name: str, chains: Collection[RuleChain], packet: Packet, forwarded: bool) -> bool:
    """Return whether these chains affect a packet: a rule in a chain, or a jump to a chain, names the packet's address
    and port. The packet's hooks must lead to this rule, and this rule must lead to a translation or a refusal. If the
    packet is `forwarded`, only the table nat is searched. Returns True if the rules cannot be read."""
    names, tables = {chain.name for chain in chains}, {chain.table for chain in chains}
    tables &= {"nat"} if forwarded else tables
    try:
        return any(_rules_catch(xtables.commands(name).saved(table), names, packet) for table in tables)
    except (ApplyError, Unsupported):
        return True


def _rules_catch(lines: Iterable[str], names: Collection[str], packet: Packet) -> bool:
    wanted = {"-d": f"{unpack(packet.destination)}/{8 * len(packet.destination)}", "--dport": str(packet.port)}
    wanted["-p"] = PROTOCOL_NAMES[packet.protocol].lower()
    targets: defaultdict[str, set[str]] = defaultdict(set)
    matching = []
    for line in lines:
        words = line.split()
        if words[0] != "-A":
            continue
        given = dict(pairwise(words))
        target = given.get("-j") or given.get("-g", "")
        targets[words[1]].add(target)
        named = "-d" in given or (words[1] == "KUBE-NODEPORTS" and "--dport" in given)
        ours = words[1] in names or target in names
        if (
            ours
            and named
            and given.get("!") != "-d"
            and all(given.get(at, value) == value for at, value in wanted.items())
        ):
            matching.append((words[1], target))
    reached = _reached(_OWN_HOOKS if packet.source is None else _HOOKS, targets)
    return any(chain in reached and not _DECIDING.isdisjoint(_reached({end}, targets)) for chain, end in matching)


def _reached(chains: Iterable[str], targets: Mapping[str, Collection[str]]) -> set[str]:
    """Return these chains, and all targets to which their rules lead."""
    found: set[str] = set()
    left = list(chains)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += targets.get(one, ())
    return found


_OWN_HOOKS: Final = frozenset({"OUTPUT", "POSTROUTING"})
"""The hooks of a packet from this node, which is a Packet without a source. Other packets pass _HOOKS."""
_HOOKS: Final = frozenset({"PREROUTING", "INPUT", "FORWARD", "POSTROUTING"})
_DECIDING: Final = frozenset({"DNAT", "REDIRECT", "REJECT", "DROP"})


def table_traces(sight: Sight, table: str) -> list[Trace]:
    """Return a trace for each nf_tables table of this name that contains chains."""
    families = {chain.family for chain in sight.nf_tables if chain.table == table}
    return [
        Trace(f"nf_tables table {family} {table}", IP_FAMILIES.get(family), partial(_table_catches, family, table))
        for family in sorted(families)
    ]


def _table_catches(family: str, table: str, packet: Packet, _: bool) -> bool:
    if IP_FAMILIES.get(family) not in {None, family_of(packet.destination)}:
        return False
    number = next(number for number, word in TABLE_FAMILIES.items() if word == family)
    port = bytes((packet.protocol, 0, 0, 0)) + PORT_BYTES[packet.port] + bytes(2)
    with Netlink.open() as link:
        reader = TableReader(number, table, link)
        for name in reader.sets():
            for key in (packet.destination + port, port) if not name.startswith("affinity-") else ():
                with suppress(NetlinkError):  # the keys of the set have another type
                    if reader.look_up(name, [key]):
                        return True
    return False


def remove_iptables_rules(keeps: Keeps = keeps_nothing, sets: Collection[str] = ()) -> list[str]:
    """Remove the rules of kube-proxy's iptables and ipvs modes from every installed variant; return the failures.
    `keeps` returns whether a chain, given by commands, table and name, belongs to the running mode. Rules of other
    chains that match one of these ipsets are removed as well."""
    failures = []
    names = xtables.installed()
    nft_chains = cache(lambda: iptables_nft_chains(kernel_chains.chains()))
    if not names:
        log.info("iptables is not installed: leftover rules of iptables and ipvs mode were not searched for")
    for name in names:
        try:
            commands = xtables.commands(name)
            is_kept = partial(keeps, commands)
            # Without ipsets and leftover chains, no rules are read: iptables-nft-save starts again after each change of
            # the rules, and would never end during frequent syncs.
            if commands.uses_nft and not sets and not _are_unkept(nft_chains(), commands.family, is_kept):
                continue
            if found := list(owned(xtables.tables(name), is_kept, sets)):
                with closing(RuleWriter.open(commands)) as writer:
                    for text in removals(found, writer.chains_at_once if commands.uses_nft else sys.maxsize):
                        writer.prepared(text)()
                log.info("Removed the rules of another kube-proxy mode variant=%s", name)
        except (ApplyError, Unsupported) as error:  # `keeps` may run commands to detect the variant in use
            failures.append(str(error))
    return failures


def _are_unkept(chains: Iterable[RuleChain], family: Family, keeps: Callable[[str, str], bool]) -> bool:
    ours = (chain for chain in chains if chain.family is family and (is_ours(chain.name) or chain.name == MARK))
    return any(not keeps(chain.table, chain.name) for chain in ours)


class Owned(NamedTuple):
    """The chains of a kube-proxy in one table, and the rules of other chains ("-A ...") that jump to these chains."""

    table: str
    chains: Sequence[str]
    jumps: Sequence[str]


def owned(
    tables: Iterable[xtables.SavedTable], keeps: Callable[[str, str], bool], sets: Collection[str] = ()
) -> Iterator[Owned]:
    """Yield the chains and rules to remove. `keeps` gets table and chain; `sets` are names of ipsets."""
    used = frozenset(sets)
    for table in tables:
        ours = [c for c in table.chains if is_ours(c) and not keeps(table.name, c)]
        gone = frozenset(ours)
        others = [rule for rule in table.rules if xtables.chain_of(rule) not in gone]
        jumps = [r for r in others if xtables.target_of(r) in gone or not used.isdisjoint(r.split(" "))]
        marked = MARK in map(xtables.target_of, others)
        if MARK in table.chains and not marked and not keeps(table.name, MARK):
            ours.append(MARK)
        if ours or jumps:
            yield Owned(table.name, sorted(ours, key=lambda chain: chain.startswith(PREFIXES)), jumps)


def removals(found: Iterable[Owned], most: int) -> Iterator[str]:
    """Yield the inputs of iptables-restore that remove chains and jumps, each with at most `most` chains. From a table
    with more chains, first the jumps and the rules of shared chains are removed, then the rules of all other chains,
    and the chains last, because iptables refuses to remove a chain to which a rule jumps. The time of iptables-nft
    grows with the square of the number of chains in one restore."""
    for table, chains, jumps in found:
        if len(chains) <= most:
            yield xtables.removal(table, chains, jumps)
            continue
        shared = sum(not chain.startswith(PREFIXES) for chain in chains)
        starts = (0, *range(shared, len(chains), most), len(chains))
        pieces = [chains[start:end] for start, end in pairwise(starts)]
        for number, piece in enumerate(pieces):
            yield xtables.removal(table, piece, () if number else jumps, delete=False)
        for piece in pieces:
            yield xtables.removal(table, piece, ())
