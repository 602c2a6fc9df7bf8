"""Builds the inputs of iptables-restore. Pure.

Legacy iptables gets one restore, because it reads and writes the whole table in each restore. iptables-nft gets a
sequence of restores, because the time of an iptables-nft 1.8.9 restore grows with the square of the number of its
chains (it searches a sorted list for each chain). First come the Services' chains, and last the rules that jump to
these chains, so that no packet passes an incomplete Service.

Tables are committed one after the other. The filter table rejects packets that the nat table does not translate. A
reject rule is added before nat stops translating, and removed after nat translates again. If nat stopped translating
before the reject rule exists, connection tracking would track a packet without translation, and the client would get no
answer to any retry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.contents import OwnChains
from kubeproxy.backends.iptables.found import FoundTable

_PIECE: Final = 200
"""Number of Services with chains in one piece of input to a running iptables-restore."""

_FIRST: Final = 1000
"""Number of chains in the first restore of a sequence."""


class Work(NamedTuple):
    """The chains of each Service, and for each table the lines to write before and after these chains. `before`: chains
    to which the Services' chains jump. `after`: chains that jump to the Services' chains, and removals in the filter
    table. `jumps`: rules of built-in chains that jump to the chains in `after`. `guards`: the lines that are written to
    the filter table before all other lines. `deleted`: chains of the nat table to delete."""

    own: Iterable[OwnChains]
    before: Mapping[str, str]
    guards: str
    after: Mapping[str, str]
    jumps: Mapping[str, str]
    deleted: Sequence[str] = ()


def declarations(chains: Iterable[str]) -> str:
    """Return the lines that create chains, or empty existing chains."""
    text = " - [0:0]\n:".join(chains)
    return f":{text} - [0:0]\n" if text else ""


def one_restore(work: Work) -> Iterator[str]:
    """Yield the input of a single restore in pieces, while `work.own` is computed; nothing if there is no change."""
    yield from _input(_first(work))
    # An empty block is omitted, because iptables would still read and write the nat table.
    start, end = f"*nat\n{work.before.get('nat', '')}", ""
    own = iter(work.own)
    while services := list(islice(own, _PIECE)):
        yield start + _blocks(services)
        start, end = "", "COMMIT\n"
    after = work.after.get("nat", "") + work.jumps.get("nat", "") + deletion(work.deleted)
    if end or after or work.before.get("nat"):
        yield f"{start}{after}COMMIT\n"
    yield from _input({"filter": work.after.get("filter", "") + work.jumps.get("filter", "")})


def several_restores(work: Work, chunk: int) -> Iterator[str]:
    """Yield the inputs of a sequence of restores, each with at most `chunk` chains. The first restores are smaller, so
    that iptables starts early while the next input is computed."""
    yield from _input(_first(work) | {"nat": work.before.get("nat", "")})
    services: list[OwnChains] = []
    count, most = 0, min(_FIRST, chunk)
    for chains in work.own:
        if count and count + len(chains) > most:
            yield from _input({"nat": _blocks(services)})
            services, count, most = [], 0, min(2 * most, chunk)
        services.append(chains)
        count += len(chains)
    after = work.after.get("nat", "") + deletion(work.deleted[:chunk])
    yield from _input({"nat": _blocks(services) + after, "filter": work.after.get("filter", "")})
    for start in range(chunk, len(work.deleted), chunk):
        yield from _input({"nat": deletion(work.deleted[start : start + chunk])})
    yield from _input(work.jumps)


def _first(work: Work) -> dict[str, str]:
    return {"mangle": work.before.get("mangle", ""), "filter": work.before.get("filter", "") + work.guards}


def _input(tables: Mapping[str, str]) -> Iterator[str]:
    if text := "".join([f"*{table}\n{lines}COMMIT\n" for table, lines in tables.items() if lines]):
        yield text


def _blocks(services: Sequence[OwnChains]) -> str:
    """Return chains and rules; chains are declared before the rules, in descending order (see `Contents.shared`)."""
    names = sorted([name for chains in services for name in chains], reverse=True)
    return declarations(names) + "".join([rules for chains in services for rules in chains.values()])


def deletion(chains: Collection[str]) -> str:
    """Return the lines that flush and delete chains."""
    return declarations(chains) + removals(chains)


def removals(chains: Iterable[str]) -> str:
    """Return the lines that delete empty chains."""
    return "".join([f"-X {chain}\n" for chain in chains])


def jumps(table: str, found: FoundTable) -> str:
    """Return the lines that insert the missing jumps of a table at the beginning of their chains."""
    return "".join([f"-I {jump.rule}\n" for jump in skeleton.JUMPS if jump.table == table and not found.has_jump(jump)])


def foundation(table: str, found: FoundTable, settings: skeleton.RuleSettings) -> str:
    """Return the lines that write chains without rules of Services: the chains that are missing, and the chains that
    differ. The lines also remove the copies that a killed or refused audit left in the filter table. Copies in the nat
    table are removed with the chains that belong to no Service. Rules of other programs in the kubelet's chain are not
    removed."""
    chains = (skeleton.CANARY, skeleton.KUBELET_FIREWALL) if table == "filter" else (skeleton.CANARY,)
    missing = {chain: "" for chain in chains if chain not in found.chains}
    fixed = {chain: rules.text for (place, chain), rules in skeleton.fixed_chains(settings).items() if place == table}
    differing = missing | {chain: rules for chain, rules in fixed.items() if not found.holds(chain, rules)}
    if table != "filter":
        return declarations(differing) + "".join(differing.values())
    lacks_rule = settings.localhost and f"{skeleton.MARTIANS}\n" not in found.rules.get(skeleton.KUBELET_FIREWALL, ())
    kubelets = f"{skeleton.MARTIANS}\n" if lacks_rule else ""
    left = [chain for chain in found.chains if chain.startswith(skeleton.COPY)]
    return declarations(differing) + kubelets + "".join(differing.values()) + deletion(left)
