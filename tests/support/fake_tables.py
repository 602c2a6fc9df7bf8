"""Fake tables that accept the input of iptables-restore --noflush, and a form in which two tables can be compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Self

from kubeproxy.backends.iptables.backend import IptablesBackend
from kubeproxy.backends.iptables.found import FoundTable, as_saved
from kubeproxy.backends.iptables.metrics import Metrics
from kubeproxy.backends.iptables.skeleton import StartOptions
from kubeproxy.backends.iptables.watch import NftWatch
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.kernel.xtables.xtables import Commands, SavedTable
from kubeproxy.kernel.xtables.xtables_lock import Waited
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals
from kubeproxy.registry import MetricRegistry
from support.random_plans import Plans

BUILT_IN = {
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}
Chains = dict[tuple[str, str], list[str]]
Normalised = dict[tuple[str, str], list[tuple[tuple[str, ...], ...]]]


class FakeTables:
    """Chains with their rules, by table and name. Refuses the same changes as iptables."""

    def __init__(self) -> None:
        self.chains: Chains = {(table, chain): [] for table, names in BUILT_IN.items() for chain in names}
        self.inputs: list[str] = []
        self.committed: Callable[[], None] | None = None  # called after each committed table

    def restore(self, text: str) -> None:
        self.inputs.append(text)
        table = ""
        for line in text.splitlines():
            if line.startswith("*"):
                table = line[1:]
            elif line == "COMMIT":
                self._check(table)
                if self.committed is not None:
                    self.committed()
            elif line.startswith(":"):
                self.chains[table, line[1:].split()[0]] = []
            else:
                self._rule(table, line)

    def _rule(self, table: str, line: str) -> None:
        what, chain = line.split(" ")[:2]
        assert (table, chain) in self.chains, f"{line}: no such chain"
        target = target_of(line)
        assert not target.startswith("KUBE-") or (table, target) in self.chains, f"{line}: no such target yet"
        if what == "-A":
            self.chains[table, chain].append(line)
        elif what == "-I":
            self.chains[table, chain].insert(0, line.replace("-I", "-A", 1))
        else:
            assert what == "-X", line
            assert self.chains.pop((table, chain)) == [], f"{line}: not empty"

    def _check(self, table: str) -> None:
        names = {chain for t, chain in self.chains if t == table}
        for (t, _), rules in self.chains.items():
            for target in (target_of(rule) for rule in rules if t == table):
                assert not target.startswith("KUBE-") or target in names, f"{target} is used but not there"


def target_of(rule: str) -> str:
    return rule.rpartition(" -j ")[2].split(" ")[0] if " -j " in rule else ""


class FakeCommands(Commands):
    """Commands that change fake tables."""

    tables: FakeTables

    @classmethod
    def of(cls, family: Family, *, uses_nft: bool) -> Self:
        made = cls("iptables-fake", family, uses_nft, (1, 8, 9))
        made.tables = FakeTables()
        return made

    def restore(self, pieces: Iterable[str]) -> Waited:
        self.tables.restore("".join(pieces))
        return Waited(0.0, "")

    def table(self, name: str) -> SavedTable | None:
        chains = {chain: rules for (table, chain), rules in self.tables.chains.items() if table == name}
        return SavedTable(name, tuple(chains), tuple(rule for rules in chains.values() for rule in rules))

    def saved(self, table: str) -> Iterator[str]:
        chains = {chain: rules for (t, chain), rules in self.tables.chains.items() if t == table}
        yield from (f":{chain} - [0:0]\n" for chain in chains)
        for rule in (rule for rules in chains.values() for rule in rules):
            yield self.printed(f"{rule}\n")

    def printed(self, rule: str) -> str:
        return as_saved(rule, self.family)

    def rules(self, table: str, chain: str) -> tuple[str, ...] | None:
        found = self.tables.chains.get((table, chain))
        return None if found is None else tuple(self.printed(f"{rule}\n")[:-1] for rule in found)


class Told(Metrics):
    """Metrics of iptables mode that record their values."""

    def __init__(self) -> None:
        super().__init__(MetricRegistry(), ())
        self.counted: dict[str, tuple[int, int]] = {}
        self.failed: list[bool] = []
        self.waits: list[float] = []

    def restore_failed(self, family: Family, *, partial: bool) -> None:
        self.failed.append(partial)

    def rules(self, family: Family, table: str, total: int, last: int) -> None:
        self.counted[table] = total, last

    def waited(self, family: Family, seconds: float) -> None:
        self.waits.append(seconds)


class FakeWatch(NftWatch):
    """A Watch of fake tables; tests make it report changes by another program."""

    rest = 0.0
    places = None

    def __init__(self, commands: FakeCommands) -> None:
        self._fake = commands
        self.foreign = False

    def touched(self) -> bool:
        return self.foreign

    def inspect(self) -> None:
        self.foreign = False

    def present(self, table: str) -> FoundTable:
        chains = {chain: rules for (t, chain), rules in self._fake.tables.chains.items() if t == table}
        kept = {chain: [f"{rule}\n" for rule in rules] for chain, rules in chains.items()}
        return FoundTable(self._fake.family, frozenset(chains), {}, kept)

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.foreign = False
        yield

    @contextmanager
    def own_change(self, commits: int) -> Iterator[None]:
        yield

    def close(self) -> None: ...


class FakedBackend(IptablesBackend):
    """A backend on fake tables."""

    tables: FakeTables


def backend(
    world: Globals, family: Family, *, uses_nft: bool = False, options: StartOptions | None = None
) -> FakedBackend:
    """A backend on fake tables; `tables` are its tables."""
    commands = FakeCommands.of(family, uses_nft=uses_nft)
    options = options or StartOptions(True, False, True)
    made = FakedBackend(commands, world, options, Told(), FakeWatch(commands), RuleWriter(commands, None))
    made.tables = commands.tables
    return made


def played(world: Globals, states: Sequence[Plans], *, uses_nft: bool) -> FakedBackend:
    """Return a backend on fake tables that has synced these states of all Services one after the other."""
    made = backend(world, world.families[0], uses_nft=uses_nft)
    list(made.resync(states[0]))
    for before, after in pairwise(states):
        gone: Plans = {name: () for name in before if name not in after}
        list(made.sync(list((after | gone).items())))
    return made


def parsed(lines: Iterable[str]) -> Chains:
    """Parse the output of iptables-save into chains with their rules."""
    found: Chains = {}
    table = ""
    for line in lines:
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":"):
            found[table, line[1:].split()[0]] = []
        elif line.startswith("-A"):
            found[table, line.split(" ", 2)[1]].append(line)
    return found


def normalised(chains: Chains, family: Family, shared: frozenset[str] = frozenset()) -> Normalised:
    """Return chains with their rules in a form that does not depend on the notation.

    The order of rules matters, except in `shared` chains, in which the order of Services is arbitrary.
    """
    found: Normalised = {}
    for place, rules in chains.items():
        words = [rule_words(rule, family) for rule in rules]
        found[place] = sorted(words) if place[1] in shared else words
    return found


@lru_cache(maxsize=1 << 16)
def rule_words(rule: str, family: Family) -> tuple[tuple[str, ...], ...]:
    """Return a rule's options with their values, sorted, with the defaults that iptables-save adds."""
    options: list[list[str]] = []
    negated = False
    for word in shlex.split(rule)[2:]:
        if word == "!":
            negated = True
        elif word.startswith("-"):
            options.append([("! " if negated else "") + word])
            negated = False
        else:
            options[-1].append(word)
    return tuple(sorted(tuple(option) for option in _completed(options, family)))


def _completed(options: list[list[str]], family: Family) -> Iterable[list[str]]:
    names = {option[0]: option[1:] for option in options}
    if names.get("-j") == ["REJECT"] and "--reject-with" not in names:
        yield ["--reject-with", "icmp6-port-unreachable" if family is Family.IPV6 else "icmp-port-unreachable"]
    if ["-m", "recent"] in options and "--mask" not in names:
        full = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff" if family is Family.IPV6 else "255.255.255.255"
        yield from (["--mask", full], ["--rsource"])
    for option in options:
        if option[0] == "--probability":
            # The kernel stores 31 bits of the probability.
            yield ["--probability", f"{round(float(option[1]) * 2**31) / 2**31:.11f}"]
        elif option[0] in {"--or-mark", "--xor-mark"}:
            yield ["--set-xmark", f"{option[1]}/{option[1] if option[0] == '--or-mark' else '0x0'}"]
        else:
            yield option


def named(made: FakedBackend) -> list[str]:
    """Return the chains that the last inputs name."""
    return sorted(line[1:].split()[0] for text in made.tables.inputs for line in text.splitlines() if line[0] == ":")
