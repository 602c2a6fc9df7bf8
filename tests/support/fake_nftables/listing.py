"""Prints the content of a fake kernel: as text that a real kernel can load, and in a form for comparisons."""

from __future__ import annotations

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.model.addresses import Family
from support.fake_nftables.kernel import FakeKernel
from support.fake_nftables.objects import Element, Set, Table


def contents(kernel: FakeKernel, family: Family, table: str = TABLE) -> dict[str, set[str]]:
    """Return the elements of each set as nft writes them: 'a . b', or 'a . b : c'."""
    return {
        name: {_words(target, key, element) for key, element in target.alive(kernel.now)}
        for name, target in kernel.table(family, table).sets.items()
    }


def chains(kernel: FakeKernel, family: Family, table: str = TABLE) -> dict[str, list[str]]:
    """Return the rules of each chain in the order of addition; those of a base chain begin with its hook."""
    return {
        name: [*([chain.hook] if chain.hook else []), *(rule.text for rule in chain.rules)]
        for name, chain in kernel.table(family, table).chains.items()
    }


def as_text(kernel: FakeKernel, family: Family) -> str:
    """Return the proxy's table as nft's text."""
    table = kernel.table(family)
    name = f"{table.family} {table.name}"
    lines = [f'add table {name} {{ comment "{table.comment}" ; }}']
    lines += (
        f"add {target.keyword} {name} {target.name} {{ {_declaration(target)} }}" for target in table.sets.values()
    )
    lines += (f"add counter {name} {counter}" for counter in table.counters)
    for chain in table.chains.values():
        lines.append(f"add chain {name} {chain.name}" + (f" {{ {chain.hook} }}" if chain.hook else ""))
    lines += _elements(kernel, table, name)
    for chain in table.chains.values():
        lines += (f"add rule {name} {chain.name} {rule.text}" for rule in chain.rules)
    return "\n".join(lines) + "\n"


def _elements(kernel: FakeKernel, table: Table, name: str) -> list[str]:
    return [
        f"add element {name} {target.name} {{ {_words(target, key, element, _times(kernel, element))} }}"
        for target in table.sets.values()
        for key, element in target.alive(kernel.now)
    ]


def _words(target: Set, key: bytes, element: Element, times: str = "") -> str:
    words = target.key.words(key[: target.key.size])
    if target.interval:
        last = target.key.words(key[target.key.size :])
        words = [a if a == b else f"{a}-{b}" for a, b in zip(words, last, strict=True)]
    text = " . ".join(words) + times
    if target.verdicts:
        return f"{text} : goto {element.value.decode()}"
    return f"{text} : {' . '.join(target.value.words(element.value))}" if target.value is not None else text


def _times(kernel: FakeKernel, element: Element) -> str:
    if element.until is None:
        return ""
    timeout = f" timeout {element.timeout}ms" if element.timeout else ""
    return f"{timeout} expires {element.until - kernel.now}ms"


_EXAMPLES = {"inet_proto": "meta l4proto", "inet_service": "th dport", "integer": "numgen random mod 2"}


def _declaration(target: Set) -> str:
    def spelled(fields: tuple[str, ...]) -> str:
        return " . ".join(_EXAMPLES.get(f, "ip daddr" if f == "ipv4_addr" else "ip6 daddr") for f in fields)

    parts = [f"typeof {spelled(target.key.fields)}"]
    if target.verdicts or target.value is not None:
        parts[0] += f" : {spelled(target.value.fields) if target.value is not None else 'verdict'}"
    flags = {"interval": target.interval, "dynamic": target.dynamic, "timeout": target.timeout is not None}
    if any(flags.values()):
        parts.append("flags " + ",".join(word for word, is_set in flags.items() if is_set))
    if target.timeout:
        parts.append(f"timeout {target.timeout // 1000}s")
    if target.size is not None:
        parts.append(f"size {target.size}")
    if target.auto_merge:
        parts.append("auto-merge")
    return " ; ".join(parts) + " ;"
