"""Compares the kernel's rules, as listed by nft and iptables, with the rules that a new proxy writes for the same
plans.

The new proxy runs in an empty network namespace: nftables mode in a thread, iptables mode in a separate process,
because a process selects its variant only once.
"""

from __future__ import annotations

import functools
import json
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kubeproxy.ask.facts import Facts
from kubeproxy.kernel.netlink.protocol import Netlink, attributes
from kubeproxy.kernel.nftables import nfnetlink, nfta
from kubeproxy.model.plan import ServicePlan
from kubeproxy.registry import MetricRegistry
from kubeproxy.setup import modes
from lab.netns import run_in_new
from prove.truth import Plans
from support.nftables_ground import KernelGround, without_slots

Dump = dict[str, Any]
"""Elements by family and set, rules by family, table and chain."""
HISTORIC = {"gone-endpoints", "failing-endpoints"}
"""Sets whose contents intentionally depend on earlier states."""
COMPARED = {"nftables": "", "iptables-nft": "nft", "iptables-legacy": "legacy"}
"""The modes whose dumps are compared, with the variant of iptables."""
_OTHERS = re.compile("HINT|FIREWALL$")
"""Chains that kubelets also create: the rules of these chains remain.

KUBE-MARK-MASQ remains too, if another program owns it.
"""
_UNORDERED = re.compile(r"KUBE-(SERVICES|NODEPORTS|EXTERNAL-SERVICES|PROXY-FIREWALL)")
"""Chains in which each rule, except the last rules, matches a different address or port."""
_OF_ENDPOINT = re.compile(r"nat KUBE-(?:(SEP)|SVC|SVL)-")
"""Chains whose rules name their endpoints in comments (all SEP chains), in a cluster of up to 1,000 endpoints."""
_WHOSE = re.compile(r' -m comment --comment "[^"]* -> [^"]*"')
_COMMENT = re.compile(r' -m comment --comment "[^"]*"')


class _Given(msgspec.Struct):
    facts: Facts
    plans: list[ServicePlan]


def fresh(mode: str, facts: Facts, plans: Plans) -> Dump:
    """Return the rules that a new proxy writes for plans in a new network namespace. Blocking.

    In iptables mode each variant needs a new process: see `asked` and `main`.
    """
    return run_in_new(functools.partial(_fresh, mode, facts, plans))


def asked(facts: Facts, plans: Plans) -> bytes:
    """Return the input that `main` reads."""
    return msgspec.msgpack.encode(_Given(facts, [plan for found in plans.values() for plan in found]))


def _fresh(mode: str, facts: Facts, plans: Plans) -> Dump:
    backends = modes.named(facts.mode).operations().open(facts.configuration(), facts.world, MetricRegistry())
    try:
        for backend in backends:
            of_family = {n: tuple(p for p in found if p.key.family is backend.family) for n, found in plans.items()}
            for _ in backend.resync({name: found for name, found in of_family.items() if found}):
                pass
        return dump(mode, facts)
    finally:
        for backend in backends:
            backend.close()


def dump(mode: str, facts: Facts) -> Dump:
    """Return the contents of this thread's network namespace, without contents that may depend on earlier states."""
    if variant := COMPARED[mode]:
        return {
            f"{name} {place}": rules
            for name in ("iptables", "ip6tables")
            for place, rules in _chains(_saved(f"{name}-{variant}-save")).items()
        }
    ground = KernelGround()
    found: Dump = {}
    for family in facts.world.families:
        contents = {name: elements for name, elements in ground.contents(family).items() if name not in HISTORIC}
        found |= {f"{family.label} {name}": value for name, value in without_slots(contents).items()}
    return found


def _saved(command: str) -> str:
    return subprocess.run([command], capture_output=True, text=True, check=True, timeout=60).stdout


def _chains(text: str) -> dict[str, list[str]]:
    """Return the rules of our chains and the jumps to them, by table and chain."""
    table = ""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(":KUBE-"):
            found[f"{table} {line[1:].split()[0]}"] = []
        elif line.startswith("-A") and "KUBE-" in line and not line.endswith("-j KUBE-FIREWALL"):
            found.setdefault(f"{table} {line.split()[1]}", []).append(line)
    return {
        place: sorted(rules) if _UNORDERED.fullmatch(place.partition(" ")[2]) else rules
        for place, rules in found.items()
        if not _OTHERS.search(place)
    }


def others(mode: str) -> list[str]:
    """Return the leftover tables and chains of other modes, or of another kube-proxy, in this thread's network
    namespace."""
    ours = {"nftables": "kube-proxy", "userspace": "kube-proxy-userspace"}.get(mode)
    with Netlink.open() as link:
        tables, chains = _tables(link), _all_chains(link)
    found = sorted(f"table {table}" for table in tables if table.startswith("kube-proxy") and table != ours)
    if COMPARED.get(mode) != "nft":
        found += [f"{family} {table} {chain} of iptables-nft" for family, table, chain in chains if _of_proxy(chain)]
    for name in ("iptables", "ip6tables") if COMPARED.get(mode) != "legacy" else ():
        # Tables that the kernel does not have are skipped: most often it has none of them.
        there = Path(f"/proc/thread-self/net/{name.replace('tables', '_tables')}_names")
        if there.exists() and there.read_text():
            saved = _chains(_saved(f"{name}-legacy-save"))
            found += [f"{name}-legacy {place}" for place in saved if "KUBE-MARK-MASQ" not in place]
    return found


def _of_proxy(chain: str) -> bool:
    return chain.startswith("KUBE-") and not _OTHERS.search(chain) and chain != "KUBE-MARK-MASQ"


def _tables(link: Netlink) -> set[str]:
    """Return the names of the tables of nf_tables, of any family."""
    found = set()
    for data, start, end in nfnetlink.dump(nfnetlink.GET_TABLE, socket.AF_UNSPEC, b"", "tables", link):
        parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
        found.add(parts[nfta.TABLE_NAME].rstrip(b"\0").decode())
    return found


def _all_chains(link: Netlink) -> list[tuple[str, str, str]]:
    """Return family, table and name of each chain of nf_tables, which include the chains of iptables-nft."""
    found = []
    for family, name in ((socket.AF_INET, "ip"), (socket.AF_INET6, "ip6")):
        for data, start, end in nfnetlink.dump(nfnetlink.GET_CHAIN, family, b"", "chains", link):
            parts = {kind: data[s:e] for kind, s, e in attributes(data, start, end)}
            table, chain = (parts[kind].rstrip(b"\0").decode() for kind in (nfta.CHAIN_TABLE, nfta.CHAIN_NAME))
            found.append((name, table, chain))
    return found


def differences(has: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the differences of two dumps."""
    wrong = []
    for name in sorted(has.keys() | wanted.keys()):
        one, other = has.get(name), wanted.get(name)
        if one == other or not (one or other or name not in has or name not in wanted):
            continue
        if one and other and _says_less(name, one, other):
            continue
        if isinstance(one or other, dict):
            wrong += _by_key(name, one or {}, other or {})
        elif one or other:
            wrong.append(f"{name}: too much {_beyond(one, other)}, lacks {_beyond(other, one)}")
    return wrong


def _says_less(name: str, one: Any, other: Any) -> bool:
    """Return whether two chains differ only in the comments that name the Services of endpoints.

    Such a difference is correct if the chain was written before, or after, the cluster had more than 1,000 endpoints.
    """
    found = _OF_ENDPOINT.search(name)
    if not found:
        return False
    whose = _COMMENT if found[1] else _WHOSE
    shorter = [[whose.sub("", rule) for rule in rules] for rules in (one, other)]
    return shorter[0] == shorter[1] and (shorter[0] == one or shorter[1] == other)


def _by_key(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return [f"{name}, {key}: {one.get(key)} instead of {other.get(key)}" for key in keys[:3]]


def _beyond(one: Any, other: Any) -> list[str]:
    return sorted(str(entry) for entry in one or () if entry not in (other or ()))[:5]


def main(argv: Sequence[str]) -> int:
    """Print the rules that a new proxy in a mode writes for the plans in a file; return the exit code."""
    mode, path = argv
    given = msgspec.msgpack.decode(Path(path).read_bytes(), type=_Given)
    plans: dict[Any, list[ServicePlan]] = {}
    for plan in given.plans:
        plans.setdefault((plan.key.namespace, plan.key.name), []).append(plan)

    def work() -> Dump:
        hint = [f"iptables-{COMPARED[mode]}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"]
        subprocess.run(hint, check=True)
        return _fresh(mode, given.facts, {name: tuple(found) for name, found in plans.items()})

    print(json.dumps(run_in_new(work)))
    return 0
