"""One transaction: executes steps in their order, and reverses all of them if one is refused.

Refusals and their errno follow net/netfilter/nf_tables_api.c of Linux 6.18.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from kubeproxy.kernel.nftables.expressions import Inline
from support.fake_nftables.objects import Chain, Element, RefusedError, Rule, Set, Table

Ruleset = dict[tuple[str, str], Table]
"""All tables, by family and name."""

_TARGETS = re.compile(r"\b(?:goto|jump) ([^\s,}]+)")
_COUNTERS = re.compile(r'counter name "([^"]*)"')
_POLICY = re.compile(r" ?policy drop ;")
_LOOKUPS = re.compile(r"@([^\s,}]+)")


class _Names(NamedTuple):
    """Return the names in a rule's text: of chains, sets and counters."""

    targets: tuple[str, ...]
    sets: tuple[str, ...]
    counters: tuple[str, ...]


@lru_cache(maxsize=4096)
def _names(text: str) -> _Names:
    return _Names(*(tuple(kind.findall(text)) for kind in (_TARGETS, _LOOKUPS, _COUNTERS)))


class Transaction:
    """Changes a ruleset. `handle` returns the next unused number; `now` is in milliseconds."""

    def __init__(self, tables: Ruleset, handle: Callable[[], int], now: int) -> None:
        self._tables = tables
        self._handle = handle
        self._now = now
        self._undo: list[Callable[[], object]] = []
        self.inline: dict[int, Inline] = {}  # anonymous sets of this transaction's rules, by number

    @property
    def changed(self) -> bool:
        """Whether any step changed something: a transaction without a change creates no generation."""
        return bool(self._undo)

    def abort(self) -> None:
        """Reverse all steps."""
        while self._undo:
            self._undo.pop()()

    # -- tables -----------------------------------------------------------------------------------------------------

    def table(self, family: str, name: str) -> Table:
        """Return a table."""
        if (family, name) not in self._tables:
            raise RefusedError(errno.ENOENT, f"no table {family} {name}")
        return self._tables[family, name]

    def tables(self) -> list[Table]:
        """Return all tables."""
        return list(self._tables.values())

    def add_table(self, family: str, name: str, comment: str, dormant: bool) -> None:
        """Create a table; activate or deactivate an existing one (flag dormant)."""
        table = self._tables.get((family, name))
        if table is None:
            self._tables[family, name] = Table(family, name, self._handle(), comment, dormant)
            self._undo.append(lambda: self._tables.pop((family, name)))
        elif table.dormant != dormant:
            table.dormant = dormant
            self._undo.append(lambda: setattr(table, "dormant", not dormant))

    def delete_table(self, table: Table) -> None:
        """Delete a table with its content."""
        place = table.family, table.name
        del self._tables[place]
        self._undo.append(lambda: self._tables.__setitem__(place, table))

    # -- chains and rules -------------------------------------------------------------------------------------------

    def add_chain(self, table: Table, name: str, hook: str) -> Chain:
        """Create and return a chain; an existing chain may get another policy."""
        if name in table.chains:
            chain = table.chains[name]
            before, policy = chain.hook, _POLICY.search(hook)
            if policy is not None:
                chain.hook = _POLICY.sub("", before).strip() + policy[0]
            self._undo.append(lambda: setattr(chain, "hook", before))
            return chain
        table.chains[name] = chain = Chain(name, self._handle(), hook)
        self._undo.append(lambda: table.chains.pop(name))
        return chain

    def delete_chain(self, table: Table, chain: Chain) -> None:
        """Delete a chain with its rules; refused while another rule or an element refers to it."""
        others = (c for c in table.chains.values() if c is not chain)
        in_rules = any(chain.name in _names(rule.text).targets for other in others for rule in other.rules)
        in_elements = any(
            element.value == chain.name.encode()
            for each in table.sets.values()
            if each.verdicts
            for element in each.elements.values()
        )
        if in_rules or in_elements:
            raise RefusedError(errno.EBUSY, f"chain {chain.name} is in use")
        del table.chains[chain.name]
        self._undo.append(lambda: table.chains.__setitem__(chain.name, chain))

    def add_counter(self, table: Table, name: str) -> None:
        """Create a named counter."""
        if name not in table.counters:
            table.counters.append(name)
            self._undo.append(lambda: table.counters.remove(name))

    def delete_counter(self, table: Table, name: str) -> None:
        """Delete a named counter; refused while a rule uses it."""
        rules = (rule.text for chain in table.chains.values() for rule in chain.rules)
        if any(name in _names(text).counters for text in rules):
            raise RefusedError(errno.EBUSY, f"counter {name} is in use")
        table.counters.remove(name)
        self._undo.append(lambda: table.counters.append(name))

    def add_rule(self, table: Table, chain: Chain, text: str, first: bool = False) -> Rule:
        """Create and return a rule, as the last or the first one of its chain."""
        names = _names(text)
        for target in names.targets:
            self._require_target(table, target)
        for name in names.sets:
            table.set(name)
        for name in names.counters:
            if name not in table.counters:
                raise RefusedError(errno.ENOENT, f"no counter {name} in table {table.family} {table.name}")
        rule = Rule(self._handle(), text)
        chain.rules.insert(0 if first else len(chain.rules), rule)
        self._undo.append(lambda: chain.rules.remove(rule))
        return rule

    def flush_chain(self, chain: Chain) -> None:
        """Delete the rules of a chain."""
        rules = list(chain.rules)
        if rules:
            chain.rules.clear()
            self._undo.append(lambda: chain.rules.extend(rules))

    @staticmethod
    def _require_target(table: Table, name: str) -> None:
        if table.chain(name).hook:
            raise RefusedError(errno.EOPNOTSUPP, f"{name} is a base chain")

    # -- sets and elements ------------------------------------------------------------------------------------------

    def add_inline(self, number: int, new: Inline) -> None:
        """Begin the anonymous set of a rule of this transaction; it gets a handle like every set."""
        self._handle()
        self.inline[number] = new

    def add_set(self, table: Table, new: Set) -> None:
        """Create a set; an existing set must have the same type, and gets the new size."""
        old = table.sets.get(new.name)
        if old is None:
            table.sets[new.name] = new
            self._undo.append(lambda: table.sets.pop(new.name))
            return
        if not old.same(new):
            raise RefusedError(errno.EEXIST, f"{old.keyword} {old.name} is of another type")
        before, old.size = old.size, new.size
        self._undo.append(lambda: setattr(old, "size", before))

    def delete_set(self, table: Table, target: Set) -> None:
        """Delete a set with its elements; refused while a rule refers to it."""
        rules = (rule for chain in table.chains.values() for rule in chain.rules)
        if any(target.name in _LOOKUPS.findall(rule.text) for rule in rules):
            raise RefusedError(errno.EBUSY, f"{target.name} is in use")
        del table.sets[target.name]
        self._undo.append(lambda: table.sets.__setitem__(target.name, target))

    def flush_set(self, target: Set) -> None:
        """Remove all elements."""
        for key in list(target.elements):
            self._remove(target, key)

    def add_element(self, table: Table, target: Set, key: bytes, element: Element) -> None:
        """Add an element; its `until` is relative to now."""
        self._check(table, target, key, element)
        element = self._timed(target, element)
        old = self._present(target, key)
        if old is not None:
            if old.value != element.value:
                raise RefusedError(errno.EEXIST, f"an element of {target.name} is there with another value")
            if element.until is None:
                return
        elif target.size is not None and len(list(target.alive(self._now))) >= target.size:
            raise RefusedError(errno.ENFILE, f"{target.name} is full")
        before = target.elements.get(key)
        target.elements[key] = element
        self._undo.append(lambda: _restore(target.elements, key, before))

    def delete_element(self, target: Set, key: bytes) -> None:
        """Remove an element; of ranges the one in which the element begins."""
        if len(key) != target.key.size * (2 if target.interval else 1):
            raise RefusedError(errno.EINVAL, f"a key of {len(key)} bytes in {target.name}")
        stored = target.around(key[: target.key.size]) if target.interval else key
        if stored is None or target.get(stored, self._now) is None:
            raise RefusedError(errno.ENOENT, f"no such element in {target.name}")
        self._remove(target, stored)

    def _check(self, table: Table, target: Set, key: bytes, element: Element) -> None:
        if len(key) != target.key.size * (2 if target.interval else 1):
            raise RefusedError(errno.EINVAL, f"a key of {len(key)} bytes in {target.name}")
        if target.interval and key[: target.key.size] > key[target.key.size :]:
            raise RefusedError(errno.EINVAL, f"a range of {target.name} ends before it begins")
        if target.verdicts:
            if not element.value:
                raise RefusedError(errno.EINVAL, f"no verdict for an element of {target.name}")
            self._require_target(table, element.value.decode())
        elif len(element.value) != (target.value.value_size if target.value is not None else 0):
            raise RefusedError(errno.EINVAL, f"a value of {len(element.value)} bytes in {target.name}")

    def _timed(self, target: Set, element: Element) -> Element:
        if target.timeout is None:
            return Element(element.value)
        timeout = element.timeout or target.timeout
        left = timeout if element.until is None else element.until
        if left > timeout:
            raise RefusedError(errno.ERANGE, f"an element of {target.name} expires after its timeout")
        return Element(element.value, 0 if timeout == target.timeout else timeout, self._now + left)

    def _present(self, target: Set, key: bytes) -> Element | None:
        """Return the existing element. A range that begins or ends in another one is refused.

        The kernel looks up only both ends: it does not notice a range around another one (nft_pipapo_insert).
        """
        if target.interval:
            for end in key[: target.key.size], key[target.key.size :]:
                oldest = target.around(end)
                if oldest not in {None, key}:
                    raise RefusedError(errno.EEXIST, f"an element of {target.name} overlaps another one")
        return target.get(key, self._now)

    def _remove(self, target: Set, key: bytes) -> None:
        if target.interval:  # The order of these steps matters.
            before = dict(target.elements)
            self._undo.append(lambda: _replace(target.elements, before))
            del target.elements[key]
        else:
            element = target.elements.pop(key)
            self._undo.append(lambda: target.elements.__setitem__(key, element))

    def merge(self, target: Set, ranges: Iterable[tuple[bytes, bytes]]) -> None:
        """Add ranges to a set that merges them, as nft does before it sends them to the kernel."""
        size = target.key.size
        every = sorted([*((k[:size], k[size:]) for k in target.elements), *ranges])
        merged: list[tuple[bytes, bytes]] = []
        for first, last in every:
            if merged and int.from_bytes(first, "big") <= int.from_bytes(merged[-1][1], "big") + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        before = dict(target.elements)
        after = {first + last: Element() for first, last in merged}
        if before != after:
            _replace(target.elements, after)
            self._undo.append(lambda: _replace(target.elements, before))


def _restore(elements: dict[bytes, Element], key: bytes, before: Element | None) -> None:
    if before is None:
        elements.pop(key)
    else:
        elements[key] = before


def _replace(elements: dict[bytes, Element], contents: dict[bytes, Element]) -> None:
    elements.clear()
    elements.update(contents)
