"""What is to be written, as inputs of iptables-restore. Pure.

Legacy iptables reads and writes the whole table for each restore, so there it is one. iptables-nft 1.8.9 looks each
chain that a restore names up in a sorted list, so that its time grows by their square: there it is a row of them, the
Services' chains first and what leads to them last, so that no packet meets a Service half done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

CHUNK: Final = 1000
"""Chains that one iptables-nft-restore is given at most: about 50 ms, of which its start is a twentieth."""

_PIECE: Final = 200
"""Services whose chains are handed on together, while the next ones are made."""


class Chains(NamedTuple):
    """Chains of the nat table and all their rules."""

    names: Collection[str]
    rules: str


class Work(NamedTuple):
    """Chains that belong to Services (Service by Service), what they need before, what uses them.

    `before` and `after` are lines for the nat table, `others` are lines for other tables by name. `deleted` is asked
    when all of `own` has been used.
    """

    own: Iterable[Chains]
    before: str
    after: str
    others: Mapping[str, str]
    deleted: Callable[[], Sequence[str]]


def declarations(chains: Iterable[str]) -> str:
    """Return the lines that make chains, or empty those that are there."""
    text = " - [0:0]\n:".join(chains)
    return f":{text} - [0:0]\n" if text else ""


def one_restore(work: Work) -> Iterator[str]:
    """Yield the input of a single restore piece by piece, while it is being read."""
    yield _others(work)
    yield f"*nat\n{work.before}"
    services: list[Chains] = []
    for chains in work.own:
        services.append(chains)
        if len(services) == _PIECE:
            yield _blocks(services)
            services = []
    yield _blocks(services) + work.after + _deletion(work.deleted()) + "COMMIT\n"


def several_restores(work: Work) -> Iterator[str]:
    """Yield the inputs of restores that are to follow each other."""
    before, count = work.before, 0
    services: list[Chains] = []
    for chains in work.own:
        if count and count + len(chains.names) > CHUNK:
            yield f"*nat\n{before}{_blocks(services)}COMMIT\n"
            before, services, count = "", [], 0
        services.append(chains)
        count += len(chains.names)
    deleted = work.deleted()
    last = before + _blocks(services) + work.after + _deletion(deleted[:CHUNK])
    yield _others(work) + (f"*nat\n{last}COMMIT\n" if last else "")
    for start in range(CHUNK, len(deleted), CHUNK):
        yield f"*nat\n{_deletion(deleted[start : start + CHUNK])}COMMIT\n"


def _others(work: Work) -> str:
    return "".join([f"*{table}\n{lines}COMMIT\n" for table, lines in work.others.items() if lines])


def _blocks(services: Sequence[Chains]) -> str:
    """Return chains and rules; a chain is made before a rule names it, and the last by name first (see above)."""
    names = sorted([name for chains in services for name in chains.names], reverse=True)
    return declarations(names) + "".join([chains.rules for chains in services])


def _deletion(chains: Sequence[str]) -> str:
    return declarations(chains) + "".join([f"-X {chain}\n" for chain in chains])
