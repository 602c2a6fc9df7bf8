"""The iptables commands: what rules there are, and changing them in one restore. Nothing here knows Kubernetes.

A node may have rules of both variants, nft and legacy, for both families; each that is installed is spoken to by its
own name. Argument lists only, the text goes through standard input.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Final, NamedTuple

from kubeproxy.errors import ApplyError

_TIMEOUT: Final = 60.0
VARIANTS: Final = ("iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy")


class Table(NamedTuple):
    """One table as iptables-save prints it: its chains, and its rules as '-A CHAIN ...' lines."""

    name: str
    chains: tuple[str, ...]
    rules: tuple[str, ...]


def installed() -> list[str]:
    """Return the variants that this node has; plain 'iptables' and 'ip6tables' where they are not told apart."""
    found = [variant for variant in VARIANTS if shutil.which(f"{variant}-save")]
    return found or [name for name in ("iptables", "ip6tables") if shutil.which(f"{name}-save")]


def tables(variant: str) -> Iterator[Table]:
    """Yield the tables of a variant that have anything in them. Raises ApplyError."""
    name = ""
    chains: list[str] = []
    rules: list[str] = []
    for line in _run([f"{variant}-save"]).splitlines():
        if line.startswith("*"):
            name, chains, rules = line[1:], [], []
        elif line.startswith(":"):
            chains.append(line[1:].split(" ", 1)[0])
        elif line.startswith("-A "):
            rules.append(line)
        elif line == "COMMIT":
            yield Table(name, tuple(chains), tuple(rules))


def restore(variant: str, text: str) -> None:
    """Change rules in one step a table; what the text does not name stays. Raises ApplyError."""
    # Legacy iptables has one lock for all programs; -w waits for it instead of failing.
    _run([f"{variant}-restore", "--noflush", "-w", "5"], text)


def chain_of(rule: str) -> str:
    """Return the chain that a rule is in."""
    return rule.split(" ", 2)[1]


def target_of(rule: str) -> str:
    """Return where a rule leads, '' for nowhere."""
    words = rule.split(" ")
    for flag in ("-j", "-g"):
        if flag in words[:-1]:
            return words[len(words) - 1 - words[::-1].index(flag) + 1]
    return ""


def _run(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ApplyError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ApplyError(f"{command[0]}: {' / '.join(lines[:3])}")
    return done.stdout
