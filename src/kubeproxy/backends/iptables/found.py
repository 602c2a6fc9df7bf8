"""The found state of iptables mode: chains and rules as iptables-save prints them, compared with the desired rules. For
most chains only a hash of the rules is stored. Our rules are compared in the form that iptables 1.8.9 prints. Other
versions of the kernel and of iptables print some rules differently. If a chain seems to differ, its wanted rules are
written to a copy under another name, and compared in the form in which the node prints the copy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.skeleton import COPY, JUMPS, OWN_CHAINS, SEP, Place, SharedChain
from kubeproxy.backends.rules import Jump
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName

MOST_PLACES: Final = 20
"""Maximum number of chains to read one by one. One chain takes 3 ms; a full listing takes a second for 36,000 rules."""
MOST: Final = 1000  # maximum number of chains to write under another name at a time

Chains = Mapping[str, Sequence[str]]
"""Chains and their rules, each '-A CHAIN ...' with a newline."""

Printer = Callable[[str, Mapping[str, str]], Chains]
"""Converts the rules of a table's chains to the form of iptables-save. The result may contain further chains."""

ReadRules = Callable[[str, str], Sequence[str] | None]
"""Returns the rules of a chain, by table and chain, without newlines; None if the chain does not exist."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_PROBABILITY: Final = re.compile(r"(?<= --probability )[0-9.]+")
_RECENT: Final = re.compile(r' -m recent [^"\n]*?--name \S+')
_INTERFACE: Final = re.compile(r"^(-A \S+) ((?:! )?-i \S+) (-d \S+)", re.MULTILINE)
_SOURCE: Final = re.compile(r"(?<= -s )\S+(?= )")
_ANYWHERE: Final = re.compile(r"(?<!!) -s (?:0\.0\.0\.0|::)/0(?= )")
_MARK: Final = re.compile(r"--(or|xor)-mark (\S+)")


class FoundTable(NamedTuple):
    """Chains of a table. `numbers` contains a hash of the rules of each readable chain, `rules` contains the rules of
    some chains. `asked` are the chains that were read, or None if all were read. A chain that was not read is reported
    as equal."""

    family: Family
    chains: AbstractSet[str] = frozenset()
    numbers: Mapping[str, int] = _NOTHING
    rules: Chains = _NOTHING
    asked: AbstractSet[str] | None = None

    def is_asked(self, chain: str) -> bool:
        """Return whether a chain was read."""
        return self.asked is None or chain in self.asked

    def present(self, chain: str) -> Sequence[str] | None:
        """Return the stored rules of a chain (may be none), or None if the chain does not exist."""
        return self.rules.get(chain, ()) if chain in self.chains else None

    def has_jump(self, jump: Jump) -> bool:
        """Return whether the jump exists; True if the jump's chain was not read."""
        return not self.is_asked(jump.chain) or f"-A {jump.rule}\n" in self.rules.get(jump.chain, ())

    def holds(self, chain: str, rules: str) -> bool:
        """Return whether the chain has exactly these rules; True if the chain was not read."""
        return not self.is_asked(chain) or self.numbers.get(chain) == hash(as_saved(rules, self.family))

    def holds_shared(self, chain: str, wanted: SharedChain) -> bool:
        """Return whether a chain consists of the blocks of `wanted`, in any order, followed by the `last` rules of
        `wanted`."""
        if not self.is_asked(chain):
            return True
        if chain not in self.numbers:
            return False
        there, ending = list(self.rules.get(chain, ())), _lines(wanted.last, self.family)
        body = there[: len(there) - len(ending)]
        printed = [_lines(block, self.family) for block in wanted.blocks]
        if there[len(body) :] != ending or sorted(body) != sorted([line for lines in printed for line in lines]):
            return False
        at = {line: number for number, line in enumerate(body)}
        return all(at[first] <= at[second] for lines in printed for first, second in pairwise(lines))


def _lines(rules: str, family: Family) -> list[str]:
    return as_saved(rules, family).splitlines(keepends=True)


# -- reading ------------------------------------------------------------------------------------------------------


def read(commands: Commands, table: str, keep: Callable[[str], bool] | None = None) -> FoundTable:
    """Read a table. `keep` selects the chains whose rules are stored, by default shared chains. Raises ApplyError."""
    common = OWN_CHAINS | {jump.chain for jump in JUMPS if jump.table == table}
    keep = keep or common.__contains__
    numbers: dict[str, int] = {}
    kept: dict[str, list[str]] = {}
    for chain, rules in by_chain(commands.saved(table)):
        numbers[chain] = hash("".join(rules or ()))
        if rules is not None and keep(chain):
            kept[chain] = rules
    return FoundTable(commands.family, numbers.keys(), numbers, kept)


def read_some(
    commands: Commands, table: str, names: AbstractSet[str], read_rules: ReadRules | None = None
) -> FoundTable:
    """Return these chains of a table with their rules. iptables-legacy lists whole tables. Raises ApplyError."""
    if not commands.uses_nft or len(names) > 2 * MOST_PLACES:
        return read(commands, table, names.__contains__)._replace(asked=names)
    found = {name: (read_rules or commands.rules)(table, name) for name in sorted(names)}
    kept = {name: [f"{rule}\n" for rule in rules] for name, rules in found.items() if rules is not None}
    numbers = {name: hash("".join(rules)) for name, rules in kept.items()}
    return FoundTable(commands.family, numbers.keys(), numbers, kept, names)


def by_chain(lines: Iterable[str]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield (chain, None) for each declaration, and (chain, rules) for each chain with rules."""
    current, start = "", "\n"
    rules: list[str] = []
    for line in lines:
        if line.endswith(" \n"):  # iptables-nft 1.8.7 appends a blank to a rule without a target
            line = f"{line.rstrip()}\n"  # noqa: PLW2901
        if line.startswith(start):
            rules.append(line)
        elif line.startswith("-A "):
            chain = next(iter(line[3:].split(None, 1)), "")
            if chain != current:
                if rules:
                    yield current, rules
                current, start, rules = chain, f"-A {chain} ", []
            rules.append(line)
        elif line.startswith(":"):
            yield line[1:].partition(" ")[0], None
    if rules:
        yield current, rules


# -- comparison with the desired rules ----------------------------------------------------------------------------


class Suspect(NamedTuple):
    """A chain that seems to differ, and its Service (None for a shared chain). `ordered`: the order of rules matters.
    `wanted` are the rules in the form that we write, `present` are the found rules, or None if the chain does not
    exist."""

    place: Place
    service: ServiceName | None
    wanted: str
    present: Sequence[str] | None = None
    ordered: bool = True


def shared_suspects(wanted: Mapping[Place, SharedChain], tables: Mapping[str, FoundTable]) -> Iterator[Suspect]:
    """Yield the shared chains that are missing or seem to differ."""
    for (table, chain), rules in wanted.items():
        if not tables[table].holds_shared(chain, rules):
            yield Suspect((table, chain), None, rules.text, tables[table].present(chain))


def own_suspects(contents: Contents, nat: FoundTable) -> Iterator[Suspect]:
    """Yield the chains of Services that are missing or seem to differ. Comments about endpoints are no difference,
    because the cluster may have become large or small after a chain was written."""
    for name in contents.entries:
        for chain, rules in contents.chains_of(name, contents.commented).items():
            if nat.holds(chain, rules):
                continue
            alternative = contents.chains_of(name, not contents.commented)[chain]
            if nat.holds(chain, alternative):
                continue
            present = nat.present(chain)
            commented = [" -> " in text for text in (rules, alternative, "".join(present or ()))]
            wanted = alternative if present and commented[1] == commented[2] != commented[0] else rules
            yield Suspect(("nat", chain), name, wanted, present)


def as_printed(suspects: Sequence[Suspect], printer: Printer) -> Iterator[tuple[Suspect, list[str], Chains]]:
    """Yield each suspect, its wanted rules in the form of this node's iptables-save, and all printed chains."""
    for table in sorted({suspect.place[0] for suspect in suspects}):
        copies = {f"{COPY}{n}": suspect for n, suspect in enumerate([s for s in suspects if s.place[0] == table])}
        texts = {
            copy: suspect.wanted.replace(f"-A {suspect.place[1]} ", f"-A {copy} ") for copy, suspect in copies.items()
        }
        printed = printer(table, texts)
        for copy, suspect in copies.items():
            rules = [rule.replace(f"-A {copy} ", f"-A {suspect.place[1]} ") for rule in printed.get(copy, ())]
            yield suspect, rules, printed


def as_saved(rules: str, family: Family) -> str:
    """Return our rules as iptables-save 1.8.9 prints them, in both variants."""
    if " --probability " in rules:
        rules = _PROBABILITY.sub(lambda found: _rounded(found[0]), rules)
    if " -m recent " in rules:
        mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff" if family is Family.IPV6 else "255.255.255.255"
        rules = _RECENT.sub(lambda found: f"{found[0]} --mask {mask} --rsource", rules)
    if " -j REJECT\n" in rules:
        kind = "icmp6-port-unreachable" if family is Family.IPV6 else "icmp-port-unreachable"
        rules = rules.replace(" -j REJECT\n", f" -j REJECT --reject-with {kind}\n")
    if " --nfacct-name " in rules:
        rules = rules.replace(" --nfacct-name ", " --nfacct-name  ")
    if " -i " in rules:
        rules = _INTERFACE.sub(r"\1 \3 \2", rules)
    if not rules.startswith(f"-A {SEP}"):  # iptables-save prints addresses of endpoints in our form
        rules = _SOURCE.sub(lambda found: _network(found[0]), rules)
    if "/0 " in rules:
        rules = _ANYWHERE.sub("", rules)
    if "or-mark " in rules:
        rules = _MARK.sub(lambda f: f"--set-xmark {f[2]}/{f[2] if f[1] == 'or' else '0x0'}", rules)
    return rules


@lru_cache(maxsize=4096)
def _rounded(probability: str) -> str:
    return f"{round(float(probability) * 2**31) / 2**31:.11f}"


@lru_cache(maxsize=4096)
def _network(source: str) -> str:
    try:
        return str(ipaddress.ip_network(source, strict=False))
    except ValueError:
        return source
