"""Prints tables of nftables mode as nft's text, for tests that read their rules, or load them with nft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kubeproxy.backends.nftables.layout import ChainName
from kubeproxy.backends.nftables.ruleset import COMMENT, Ruleset
from kubeproxy.kernel.nftables import listing
from kubeproxy.kernel.nftables.tables import COUNTED, DYNAMIC, INTERVAL, TIMEOUT, Definition, Hook, SetSpec

_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")


def skeleton(ruleset: Ruleset, chains: Iterable[ChainName] = ()) -> str:
    """Return the text that creates a table without Services, with the required chains."""
    names = ruleset.needed(chains)
    filled = f"add element {ruleset.name} transports {{ tcp, udp, sctp }}\n"
    return as_text(ruleset.name, ruleset.definition(names), ruleset.chains(names), COMMENT) + filled


def as_text(
    name: str, made: Definition, texts: Mapping[str, tuple[Hook | None, Sequence[str]]], comment: str = ""
) -> str:
    """Return the text that creates a table; `texts` are its chains with the text of their rules."""
    lines = [f"add table {name}" + (f' {{ comment "{comment}" ; }}' if comment else "")]
    lines += (f"add counter {name} {counter}" for counter in made.counters)
    lines += (f"add flowtable {name} {each} {{ hook ingress priority filter ; }}" for each in made.flowtables)
    lines += (f"add {spec.keyword} {name} {spec.name} {{ {declaration(spec)} }}" for spec in made.sets)
    for chain, (hook, _) in texts.items():
        place = f" {{ type {hook.kind} hook {_HOOKS[hook.number]} priority {hook.priority} ; }}" if hook else ""
        lines.append(f"add chain {name} {chain}{place}")
    lines += (f"add rule {name} {chain} {rule}" for chain, (_, rules) in texts.items() for rule in rules)
    return "\n".join(lines) + "\n"


def declaration(spec: SetSpec) -> str:
    """Return the properties of a set in nft's text."""
    flags = {"interval": INTERVAL, "dynamic": DYNAMIC, "timeout": TIMEOUT}
    said = [f"typeof {' . '.join(spec.key)}" + (f" : {' . '.join(spec.data)}" if spec.data else "")]
    said += [f"size {spec.size}"] if spec.size else []
    said += ["flags " + ",".join(named)] if (named := [w for w, flag in flags.items() if spec.flags & flag]) else []
    said += [f"timeout {listing.duration(spec.timeout)}"] if spec.timeout else []
    said += ["counter"] if spec.flags & COUNTED else []
    said += ["auto-merge"] if spec.merges else []
    return " ; ".join(said) + " ;"
