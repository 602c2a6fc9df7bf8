"""The ruleset of one network namespace, and the Table that a backend uses for one family."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import count
from typing import TypeVar

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.nftables import compiling, nfnetlink
from kubeproxy.kernel.nftables.changes import ForeignChanges
from kubeproxy.kernel.nftables.elements import Element as KernelElement
from kubeproxy.kernel.nftables.expressions import Expression, Opaque
from kubeproxy.kernel.nftables.tables import ChainContents, SetForm, TableContents
from kubeproxy.model.addresses import Family
from support.fake_nftables import netlink, text
from support.fake_nftables.objects import Element, RefusedError, Set, Table
from support.fake_nftables.transaction import Ruleset, Transaction

Step = TypeVar("Step")

WORDS = {Family.IPV4: "ip", Family.IPV6: "ip6"}


class FakeKernel:
    """All tables; the generation of nf_tables; a clock in milliseconds that only tests advance."""

    def __init__(self) -> None:
        self.tables: Ruleset = {}
        self.generation = 1
        self.counts = True  # whether it reports the number of elements, as Linux does since 6.16
        self.now = 0
        self.room = 1 << 29  # maximum number of bytes of a transaction
        self._handles = count(1)
        self._refusal: tuple[int, int] | None = None  # messages before a refusal, and its errno
        self.heard = {family: ForeignChanges(complete=False) for family in Family}

    def open(self, family: Family) -> FakeTable:
        """Return the table of a family."""
        return FakeTable(self, family)

    def table(self, family: Family, name: str = TABLE) -> Table:
        """Return the content of a table. Raises KeyError."""
        return self.tables[WORDS[family], name]

    def refuse(self, messages: int, code: int) -> None:
        """Refuse one message, after this number of accepted messages; a line of text counts as one message."""
        self._refusal = messages, code

    def accept(self) -> None:
        """Cancel refuse()."""
        self._refusal = None

    def disturb(self, script: str) -> None:
        """Execute nft's text as another program, with an announcement of the transaction. Raises ApplyError."""
        before = {family: _state(self.tables.get((word, TABLE))) for family, word in WORDS.items()}
        self.run(script)
        for family, word in WORDS.items():
            (rules, elements), (other_rules, other_elements) = before[family], _state(self.tables.get((word, TABLE)))
            told = {name for name in elements.keys() | other_elements if elements.get(name) != other_elements.get(name)}
            heard, by = self.heard[family], frozenset({"nft"})
            if told or rules != other_rules:
                self.heard[family] = ForeignChanges(
                    heard.complete, heard.elements | told, heard.rules or rules != other_rules, by
                )

    def commit(self, messages: Sequence[bytes]) -> None:
        """Execute netlink messages as one transaction, as nfnetlink.Transactions does. Raises NetlinkError."""
        if sum(map(len, messages)) > self.room:
            raise NetlinkError(errno.EMSGSIZE, "cannot send to nf_tables")
        try:
            self._execute(netlink.execute, messages)
        except RefusedError as error:
            raise error.as_netlink() from error

    def run(self, script: str) -> None:
        """Execute nft's text as one transaction. Raises ApplyError."""
        try:
            self._execute(text.execute, filter(None, script.splitlines()))
        except RefusedError as error:
            raise ApplyError(f"nft -f -: Error: Could not process rule: {error}") from error

    def _execute(self, execute: Callable[[Step, Transaction], None], steps: Iterable[Step]) -> None:
        transaction = Transaction(self.tables, lambda: next(self._handles), self.now)
        try:
            for step in steps:
                self._perhaps_refuse()
                execute(step, transaction)
        except BaseException:
            transaction.abort()
            raise
        self.generation += transaction.changed

    def _perhaps_refuse(self) -> None:
        if self._refusal is None:
            return
        left, code = self._refusal
        self._refusal = (left - 1, code) if left else None
        if not left:
            raise RefusedError(code, "as the test wants it")


class FakeTable(KernelTable):
    """The table `kube-proxy` of one family in a FakeKernel, without sockets."""

    def __init__(self, kernel: FakeKernel, family: Family) -> None:
        self.family = family
        self.kernel = kernel

    def close(self) -> None:
        pass

    @property
    def room(self) -> int:
        return self.kernel.room

    def commit(self, messages: Sequence[bytes]) -> None:
        self.kernel.commit(messages)

    def generation(self) -> int:
        return self.kernel.generation

    def reset_changes(self) -> None:
        self.kernel.heard[self.family] = ForeignChanges(complete=True)

    def mark_incomplete(self) -> None:
        self.kernel.heard[self.family] = self.kernel.heard[self.family]._replace(complete=False)

    def changes(self) -> ForeignChanges:
        return self.kernel.heard[self.family]

    def disturbed(self) -> bool:
        heard = self.changes()
        return bool(heard.elements) or heard.rules

    def not_listening(self) -> AbstractContextManager[None]:
        return nullcontext()

    def header(self) -> nfnetlink.TableHeader | None:
        table = self._here()
        return nfnetlink.TableHeader(table.handle, table.comment, table.dormant) if table is not None else None

    def chains(self) -> frozenset[str]:
        found = self._here()
        return frozenset(found.chains) if found is not None else frozenset()

    def contents(self) -> TableContents:
        found = self._here()
        if found is None:
            return TableContents({}, {})
        word = WORDS[self.family]
        chains = {
            chain.name: ChainContents(netlink.hook_of(chain.hook), tuple(_rule(r.text, word) for r in chain.rules))
            for chain in found.chains.values()
        }
        return TableContents({each.name: each.form for each in found.sets.values()}, chains, frozenset(found.counters))

    def sets(self) -> dict[str, SetForm]:
        found = self._here()
        return {each.name: each.form for each in found.sets.values()} if found is not None else {}

    def count(self, name: str) -> int | None:
        return sum(1 for _ in self._set(name).alive(self.kernel.now)) if self.kernel.counts else None

    def has_catch_all(self, _: str) -> bool:
        return False  # The language of the fake has no such expression.

    def lookup(self, name: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        target, now = self._set(name), self.kernel.now
        found = {key: target.get(key, now) for key in keys}
        return {key: element.value for key, element in found.items() if element is not None}

    def pairs(self, name: str) -> list[list[tuple[bytes, bytes]]]:
        return [[(element.key, element.data) for element in self.elements(name)]]

    def _set(self, name: str) -> Set:
        try:
            table = self._here()
            target = table.set(name) if table is not None else None
        except RefusedError as error:
            raise NetlinkError(error.code, f"cannot read elements of {name}") from error
        if target is None:
            raise NetlinkError(2, f"cannot read elements of {name}")
        return target

    def elements(self, name: str) -> list[KernelElement]:
        target = self._set(name)
        now, listed = self.kernel.now, []
        for key, element in target.alive(now):
            if target.auto_merge:
                first, last = key[: target.key.size], key[target.key.size :]
                listed.append(KernelElement(first, b"", 0, 0))
                listed.append(KernelElement(_following(last), b"", 0, 0, ends=True))
                continue
            expires = element.until - now if element.until is not None else 0
            listed.append(KernelElement(key, element.value, element.timeout, expires))
        return listed

    def _here(self) -> Table | None:
        return self.kernel.tables.get((WORDS[self.family], TABLE))


def _state(table: Table | None) -> tuple[object, dict[str, dict[bytes, Element]]]:
    """Return the announcements of a change of a table: of its chains and rules, and of its elements set by set."""
    if table is None:
        return None, {}
    rules = [(chain.name, chain.hook, [rule.handle for rule in chain.rules]) for chain in table.chains.values()]
    elements = {name: dict(each.elements) for name, each in table.sets.items()}
    return (table.handle, table.dormant, rules, sorted(elements)), elements


@lru_cache(maxsize=4096)
def _rule(text: str, ip: str) -> tuple[Expression, ...]:
    """Return a rule as a value; a rule in an unknown form becomes an undescribed rule."""
    try:
        return compiling.rule(text, ip)
    except (ValueError, KeyError, IndexError):
        return (Opaque("unknown", text.encode()),)


def _following(address: bytes) -> bytes:
    """Return the end of a range: the address after its last one."""
    return ((int.from_bytes(address, "big") + 1) % (1 << 8 * len(address))).to_bytes(len(address), "big")
