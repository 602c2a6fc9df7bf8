"""What iptables-save says of our chains beside what was written: what another program changed inside of them.

Rules are read as they are printed, and nothing of them is kept but a number for each chain. A chain that seems to
differ is written once more under another name, since it is the kernel and this version of iptables that say how a rule
is printed; the table that is compared with is theirs then.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.names import COPY, SEP, SERVICE_PREFIXES
from kubeproxy.backends.iptables.render import Detail
from kubeproxy.backends.iptables.restores import declarations
from kubeproxy.backends.iptables.skeleton import CANARY, CANARY_TABLES, JUMPS
from kubeproxy.backends.mode import ForeignChange
from kubeproxy.backends.rules import Jump
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, RestoreError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName

MOST_PLACES: Final = 20
"""Chains that are read one by one, as iptables-nft does in 3 ms; it takes a second for 36,000 rules."""
MOST: Final = 1000  # chains that are looked at closely in one audit

_UNORDERED: Final = frozenset({"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"})
"""Chains in which the order of Services depends on what changed when."""

_PROBABILITY: Final = re.compile(r"(?<= --probability )[0-9.]+")
_RECENT: Final = re.compile(r' -m recent [^"\n]*?--name \S+')
_INTERFACE: Final = re.compile(r"^(-A \S+) ((?:! )?-i \S+) (-d \S+)", re.MULTILINE)
_SOURCE: Final = re.compile(r"(?<= -s )\S+(?= )")
_ANYWHERE: Final = re.compile(r"(?<!!) -s (?:0\.0\.0\.0|::)/0(?= )")
_MARK: Final = re.compile(r"--(or|xor)-mark (\S+)")

Place = tuple[str, str]
"""A table and a chain."""


class Harm(NamedTuple):
    """A difference, and the Services whose own chains have it; none when others have it as well."""

    difference: ForeignChange
    services: frozenset[ServiceName] = frozenset()


class Suspect(NamedTuple):
    """A chain that does not read as was expected, and whose it is (None: of all)."""

    place: Place
    rules: str
    service: ServiceName | None


class Saved(NamedTuple):
    """What iptables-save printed: a number for each chain of ours with its rules, one for each name, and the jumps.

    `unread` are tables of which it prints nothing, as others have rules of nft itself in there.
    """

    chains: set[int]
    names: set[int]
    jumps: set[Place]
    unread: set[str]


def as_saved(rules: str, family: Family) -> str:
    """Return rules of ours as iptables-save prints them (1.8.9, the same for both variants)."""
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
    if not rules.startswith(f"-A {SEP}"):  # an endpoint's own address is as we wrote it
        rules = _SOURCE.sub(lambda found: _network(found[0]), rules)
    if "/0 " in rules:
        rules = _ANYWHERE.sub("", rules)
    if "or-mark " in rules:
        rules = _MARK.sub(lambda f: f"--set-xmark {f[2]}/{f[2] if f[1] == 'or' else '0x0'}", rules)
    return rules


@lru_cache(maxsize=4096)
def _rounded(probability: str) -> str:
    """Return a probability as the kernel keeps it, in 31 bits."""
    return f"{round(float(probability) * 2**31) / 2**31:.11f}"


@lru_cache(maxsize=4096)
def _network(source: str) -> str:
    """Return a range of sources without the bits of a host, and in its shortest form."""
    try:
        return str(ipaddress.ip_network(source, strict=False))
    except ValueError:
        return source


def survey(table: str, lines: Iterable[str], seen: Saved) -> None:
    """Add to `seen` what iptables-save printed of a table."""
    for chain, rules in by_chain(lines):
        if rules is None:
            seen.names.add(hash((table, chain)))
            seen.chains.add(_number((table, chain), ""))
        elif chain.startswith("KUBE-"):
            seen.chains.discard(_number((table, chain), ""))
            seen.chains.add(_number((table, chain), "".join(rules)))
        else:
            seen.jumps.update((table, rule[3:-1]) for rule in rules if " -j KUBE-" in rule)


def by_chain(lines: Iterable[str]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each chain with None where it is declared, and those that have rules with their rules."""
    current, start = "", "\n"
    rules: list[str] = []
    for line in lines:
        if line.endswith(" \n"):  # a rule without a target, by iptables-nft 1.8.7
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


def _number(place: Place, rules: str) -> int:
    if place[1] in _UNORDERED:
        rules = "".join(sorted(rules.splitlines(keepends=True)))
    return hash((place, rules))


class Audit:
    """Reads the tables of one family and compares them with what was written. Calls block."""

    def __init__(self, commands: Commands, restore: Callable[[str], None]) -> None:
        self._commands = commands
        self._family = commands.family
        self._change = restore
        self._rest: float | None = None  # times as long as the last audit took, none follows; None when none is due
        self._places: frozenset[Place] | None = None
        self._ended = 0.0
        self._took = 0.0

    def suspect(self, rest: float, places: frozenset[Place] | None = None) -> None:
        """Take that another program may have changed something in these places, None for any.

        It is looked at when so many times as long as the last look took have passed since that.
        """
        known = frozenset[Place]() if self._rest is None else self._places
        self._places = None if known is None or places is None else known | places
        self._rest = rest if self._rest is None else min(self._rest, rest)

    def due(self) -> bool:
        """Return whether it is time for a look."""
        return self._rest is not None and time.monotonic() >= self._ended + self._rest * self._took

    def look(self, contents: Contents, common: Mapping[Place, str]) -> Harm | None:
        """Return what another program changed; `common` are the chains that are no Service's own. Raises ApplyError.

        None means that no audit is due before the next suspicion.
        """
        began = time.monotonic()
        try:
            harm = self._compare(contents, common)
        finally:
            self._ended = time.monotonic()
            self._took = self._ended - began
        if harm is None:
            self._rest = None
        return harm

    def _compare(self, contents: Contents, common: Mapping[Place, str]) -> Harm | None:
        seen = self._read(self._places)
        for table in CANARY_TABLES:
            if self._is_asked((table, CANARY), seen) and hash((table, CANARY)) not in seen.names:
                return Harm(flushed(table, self._family))
        for jump in JUMPS:
            if self._is_asked((jump.table, jump.chain), seen) and (jump.table, jump.rule) not in seen.jumps:
                return Harm(removed(jump, self._family))
        suspects = list(islice(self._suspects(contents, common, seen), MOST))
        harmed = self._confirmed(suspects, seen)
        if not harmed:
            return None
        services = [suspect.service for suspect in harmed if suspect.service is not None]
        return Harm(_changed(harmed, self._family), frozenset(services if len(services) == len(harmed) else ()))

    def _read(self, places: frozenset[Place] | None) -> Saved:
        seen = Saved(set(), set(), set(), set())
        if places is None:
            for table in CANARY_TABLES:
                try:
                    survey(table, self._commands.saved(table), seen)
                except Incompatible:
                    seen.unread.add(table)
            return seen
        for table, chain in places:
            if (rules := self._rules(table, chain)) is not None:
                survey(table, [f":{chain} -", *[f"{rule}\n" for rule in rules]], seen)
        return seen

    def _rules(self, table: str, chain: str) -> Sequence[str] | None:
        try:
            return self._commands.rules(table, chain)
        except Incompatible:  # the watch has looked for the jumps of built-in chains; in ours it is harm
            return [f"-A {jump.rule}" for jump in JUMPS if jump[:2] == (table, chain)] or [f"-A {chain} ?"]

    def _is_asked(self, place: Place, seen: Saved) -> bool:
        return place[0] not in seen.unread and (self._places is None or place in self._places)

    def _suspects(self, contents: Contents, common: Mapping[Place, str], seen: Saved) -> Iterator[Suspect]:
        """Yield the chains that are not there as they were written."""
        places = self._places

        def there(place: Place, rules: str) -> bool:
            return not self._is_asked(place, seen) or _number(place, as_saved(rules, self._family)) in seen.chains

        for place, rules in common.items():
            if not there(place, rules):
                yield Suspect(place, rules, None)
        if places is not None and not any(chain.startswith(SERVICE_PREFIXES) for _, chain in places):
            return
        detail = contents.detail(contents.endpoints)
        # What is said of endpoints may have changed since a chain was written.
        other = Detail.FULL if detail is Detail.SPARSE else Detail.SPARSE
        for name in contents.entries:
            for chain, rules in contents.chains_of(name, detail).items():
                place = "nat", chain
                if not (there(place, rules) or there(place, contents.chains_of(name, other)[chain])):
                    yield Suspect(place, rules, name)

    def _confirmed(self, suspects: list[Suspect], seen: Saved) -> list[Suspect]:
        """Return those that do differ, by how iptables-save prints copies of what was written."""
        if not suspects or any(hash(suspect.place) not in seen.names for suspect in suspects):
            return suspects
        copies = {f"{COPY}{n}": suspect for n, suspect in enumerate(suspects)}
        tables = sorted({suspect.place[0] for suspect in suspects})
        try:
            self._restore(tables, copies, _written)
        except RestoreError:  # what the rules lead to is not there
            return suspects
        try:
            printed = {table: self._printed(table, copies) for table in tables}
        finally:
            self._restore(tables, copies, _deletion)
        return [s for copy, s in copies.items() if printed[s.place[0]][copy] != printed[s.place[0]][s.place[1]]]

    def _restore(self, tables: list[str], copies: Mapping[str, Suspect], lines: Callable[[str, Suspect], str]) -> None:
        text = ""
        for table in tables:
            ours = {copy: suspect for copy, suspect in copies.items() if suspect.place[0] == table}
            text += f"*{table}\n{declarations(ours)}{''.join([lines(*item) for item in ours.items()])}COMMIT\n"
        self._change(text)

    def _printed(self, table: str, copies: Mapping[str, Suspect]) -> dict[str, list[str]]:
        """Return the rules of copies and of what they are copies of, without the chain's name."""
        found: dict[str, list[str]] = {}
        for copy, suspect in copies.items():
            if suspect.place[0] == table:
                found |= {copy: [], suspect.place[1]: []}
        for chain, rules in self._chains(table, found):
            if rules is not None and chain in found:
                found[chain] = [rule[4 + len(chain) :] for rule in rules]
                if chain in _UNORDERED or (chain in copies and copies[chain].place[1] in _UNORDERED):
                    found[chain].sort()
        return found

    def _chains(self, table: str, names: Collection[str]) -> Iterable[tuple[str, list[str] | None]]:
        """Return at least these chains with their rules. Legacy reads the whole table even for one of them."""
        if self._commands.uses_nft and len(names) <= MOST_PLACES:
            read = {chain: self._rules(table, chain) or () for chain in names}
            return [(chain, [f"{rule}\n" for rule in rules]) for chain, rules in read.items()]
        return by_chain(self._commands.saved(table))


def _written(copy: str, suspect: Suspect) -> str:
    return suspect.rules.replace(f"-A {suspect.place[1]} ", f"-A {copy} ")


def _deletion(copy: str, suspect: Suspect) -> str:  # noqa: ARG001 - see Audit._restore
    return f"-X {copy}\n"


def flushed(table: str, family: Family) -> ForeignChange:
    """Return that a whole table is empty."""
    return ForeignChange(f"table {table} of iptables ({family.label}) was flushed by another program")


def removed(jump: Jump, family: Family) -> ForeignChange:
    """Return that a jump to one of our chains is missing."""
    what = f"the jump from {jump.chain} to {jump.target}"
    return ForeignChange(f"{what} ({family.label}) was removed by another program")


def _changed(harmed: Collection[Suspect], family: Family) -> ForeignChange:
    first = next(iter(harmed))
    (table, chain), service = first.place, first.service
    whose = f" of Service {'/'.join(service)}" if service is not None else f" of iptables table {table}"
    more = f", and {len(harmed) - 1} more," if len(harmed) > 1 else ""
    return ForeignChange(f"chain {chain}{whose} ({family.label}){more} was changed by another program")
