"""What is to be written, as inputs of iptables-restore. Pure.

Legacy iptables reads and writes the whole table for each restore, so there it is one. iptables-nft 1.8.9 looks each
chain that a restore names up in a sorted list, so that its time grows by their square: there it is a row of them, the
Services' chains first and what leads to them last, so that no packet meets a Service half done.

Tables are committed one after the other. What the filter table refuses, the nat table has left untranslated: so rules
of filter come before nat stops to translate, and go after nat has begun to. A packet in between would be tracked
without translation, and its client not be answered for as long as it keeps asking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kubeproxy.backends.iptables.contents import OwnChains
from kubeproxy.backends.iptables.found import FoundTable
from kubeproxy.backends.iptables.names import COPY
from kubeproxy.backends.iptables.skeleton import CANARY, JUMPS, KUBELET_FIREWALL, MARTIANS, RuleSettings, fixed_chains

_PIECE: Final = 200
"""Services whose chains are handed on together, while the next ones are made."""


_FIRST: Final = 1000
"""Number of chains in the first of several restores."""


class Work(NamedTuple):
    """The chains of Services (Service by Service), and the lines before and after them by table.

    `before` are chains that the Services' chains lead to, `after` those that lead to them, `jumps` lead to the latter
    from the built-in chains. `guards` are the first lines of the filter table; its removals are in `after`.
    `deleted`, chains of the nat table, is asked when all of `own` has been used.
    """

    own: Iterable[OwnChains]
    before: Mapping[str, str]
    guards: str
    after: Mapping[str, str]
    jumps: Mapping[str, str]
    deleted: Callable[[], Sequence[str]]


def declarations(chains: Iterable[str]) -> str:
    """Return the lines that make chains, or empty those that are there."""
    text = " - [0:0]\n:".join(chains)
    return f":{text} - [0:0]\n" if text else ""


def one_restore(work: Work) -> Iterator[str]:
    """Yield the input of a single restore piece by piece, while it is being read."""
    yield _input(_first(work))
    yield f"*nat\n{work.before.get('nat', '')}"
    services: list[OwnChains] = []
    for chains in work.own:
        services.append(chains)
        if len(services) == _PIECE:
            yield _blocks(services)
            services = []
    after = work.after.get("nat", "") + work.jumps.get("nat", "") + deletion(work.deleted())
    yield f"{_blocks(services)}{after}COMMIT\n"
    yield _input({"filter": work.after.get("filter", "") + work.jumps.get("filter", "")})


def once(work: Work) -> Iterator[str]:
    """Yield the input of a single restore, or nothing when there is nothing to do."""
    text = "".join(one_restore(work)).replace("*nat\nCOMMIT\n", "", 1)  # which would read all of the table
    if text:
        yield text


def several_restores(work: Work, chunk: int) -> Iterator[str]:
    """Yield the inputs of restores that are to follow each other, of so many chains each at most.

    The first ones are smaller, so that one is soon under way while the next is made.
    """
    return filter(None, _several_restores(work, chunk))


def _several_restores(work: Work, chunk: int) -> Iterator[str]:
    yield _input(_first(work) | {"nat": work.before.get("nat", "")})
    services: list[OwnChains] = []
    count, most = 0, min(_FIRST, chunk)
    for chains in work.own:
        if count and count + len(chains.names) > most:
            yield _input({"nat": _blocks(services)})
            services, count, most = [], 0, min(2 * most, chunk)
        services.append(chains)
        count += len(chains.names)
    deleted = work.deleted()
    after = work.after.get("nat", "") + deletion(deleted[:chunk])
    yield _input({"nat": _blocks(services) + after, "filter": work.after.get("filter", "")})
    for start in range(chunk, len(deleted), chunk):
        yield _input({"nat": deletion(deleted[start : start + chunk])})
    yield _input(work.jumps)


def _first(work: Work) -> dict[str, str]:
    """Return what comes before anything in the nat table."""
    return {"mangle": work.before.get("mangle", ""), "filter": work.before.get("filter", "") + work.guards}


def _input(tables: Mapping[str, str]) -> str:
    return "".join([f"*{table}\n{lines}COMMIT\n" for table, lines in tables.items() if lines])


def _blocks(services: Sequence[OwnChains]) -> str:
    """Return chains and rules; a chain is made before a rule names it, and the last by name first (see above)."""
    names = sorted([name for chains in services for name in chains.names], reverse=True)
    return declarations(names) + "".join([chains.rules for chains in services])


def deletion(chains: Collection[str]) -> str:
    """Return the lines that empty chains and remove them."""
    return declarations(chains) + removals(chains)


def removals(chains: Iterable[str]) -> str:
    """Return the lines that remove empty chains."""
    return "".join([f"-X {chain}\n" for chain in chains])


def jumps(table: str, found: FoundTable) -> str:
    """Return the jumps that a table lacks, to be put at the head one after the other."""
    return "".join([f"-I {jump.rule}\n" for jump in JUMPS if jump.table == table and not found.has_jump(jump)])


def foundation(table: str, found: FoundTable, settings: RuleSettings) -> str:
    """Return what writes the chains that no Service changes, as far as a table does not have them so already.

    Copies that an audit left in it, as it was killed or refused, go; those in nat do with the chains of no Service. Of
    kubelet's chain, other rules stay.
    """
    chains = (CANARY, KUBELET_FIREWALL) if table == "filter" else (CANARY,)
    missing = {chain: "" for chain in chains if chain not in found.chains}
    fixed = {chain: rules.text for (place, chain), rules in fixed_chains(settings).items() if place == table}
    differing = missing | {chain: rules for chain, rules in fixed.items() if not found.holds(chain, rules)}
    if table != "filter":
        return declarations(differing) + "".join(differing.values())
    lacks_rule = settings.localhost and f"{MARTIANS}\n" not in found.rules.get(KUBELET_FIREWALL, ())
    kubelets = f"{MARTIANS}\n" if lacks_rule else ""
    left = [chain for chain in found.chains if chain.startswith(COPY)]
    return declarations(differing) + kubelets + "".join(differing.values()) + deletion(left)
