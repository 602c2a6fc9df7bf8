"""What may stand on the command line, as plain values: from the table of flags and the parsers that --help prints.

Manual pages and the completion of shells are made of this, so that neither knows an option by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from kubeproxy.commands import COMMANDS
from kubeproxy.commands.main import parser_of
from kubeproxy.config.flags import BY_NAME, FLAGS, Flag
from kubeproxy.config.modes import MODES
from kubeproxy.config.pflag import SHORTHANDS, shown_default


class Kind(Enum):
    """What a value is, as far as a shell can propose some."""

    FREE = "free"
    FILE = "file"
    FOLDER = "folder"
    SERVICE = "service"
    TARGET = "target"
    """A Service with a port of it."""


class Value(NamedTuple):
    """A value: what --help calls it, what it is, and the words that it may be, if only these."""

    name: str
    kind: Kind
    words: tuple[str, ...] = ()


class Option(NamedTuple):
    """An option: its names, the longest last; its value, None for a switch; what it does, and under which heading."""

    names: tuple[str, ...]
    value: Value | None
    text: str
    group: str


class Position(NamedTuple):
    """An argument without a name."""

    value: Value
    text: str
    needed: bool


class Grammar(NamedTuple):
    """One command: the name as typed, what it is for, more about it, what may follow."""

    name: str
    summary: str
    more: str
    options: tuple[Option, ...]
    positions: tuple[Position, ...] = ()


_WORDS = {
    "proxy-mode": tuple(MODES),
    "detect-local-mode": ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix"),
    "logging-format": ("text", "json"),
}
_KINDS = {"config": Kind.FILE, "kubeconfig": Kind.FILE, "write-config-to": Kind.FILE, "manifests": Kind.FOLDER}
_METAVARS = {"FILE": Kind.FILE, "PATH": Kind.FILE, "FOLDER": Kind.FOLDER, "NAME": Kind.SERVICE, "TARGET": Kind.TARGET}


def proxy() -> Grammar:
    """Return what the proxy itself takes."""
    options = tuple(_of_flag(flag) for flag in FLAGS if not flag.hidden)
    return Grammar("kube-proxy", "the Kubernetes network proxy of a node", "", options)


def command(name: str) -> Grammar:
    """Return what a subcommand takes."""
    parser = parser_of(name)
    options, positions = [], []
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.option_strings:
                options.append(_of_action(action, group.title or ""))
            else:
                needed = action.nargs not in {"?", "*"}
                positions.append(Position(_value(action, positional=True), action.help or "", needed))
    return Grammar(f"kube-proxy {name}", COMMANDS[name], parser.epilog or "", tuple(options), tuple(positions))


def commands() -> Iterator[Grammar]:
    """Yield what each subcommand takes."""
    return map(command, COMMANDS)


def _of_flag(flag: Flag) -> Option:
    names = tuple(f"-{short}" for short, name in SHORTHANDS.items() if name == flag.name)
    default = "" if flag.default in {"", "false"} else f" (default {shown_default(flag)})"
    kind = _KINDS.get(flag.name, Kind.FREE)
    switch = flag.kind == "bool" or flag.name in {"help", "version"}
    value = None if switch else Value(flag.kind, kind, _WORDS.get(flag.name, ()))
    return Option((*names, f"--{flag.name}"), value, flag.usage + default, flag.group)


def _of_action(action: argparse.Action, group: str) -> Option:
    names = tuple(sorted(action.option_strings, key=len))
    value = None if action.nargs == 0 else _value(action, positional=False)
    if action.help == argparse.SUPPRESS:  # a flag of the proxy that --help names without listing it
        flag = BY_NAME[names[-1].lstrip("-")]
        return Option(names, _of_flag(flag).value or Value("BOOL", Kind.FREE, ("true", "false")), flag.usage, group)
    return Option(names, value, action.help or "", group)


def _value(action: argparse.Action, *, positional: bool) -> Value:
    choices: Iterable[str] = action.choices or ()
    name = action.metavar if isinstance(action.metavar, str) else action.dest.replace("_", "-").upper()
    kind = _METAVARS.get(name, Kind.FREE)
    if kind is Kind.SERVICE and not positional:  # --hostname-override NAME
        kind = Kind.FREE
    if name == "SHELL":
        choices = ("bash", "zsh", "fish")
    elif name == "SOURCE":
        choices = ("node",)  # or any address
    longest = max(action.option_strings, key=len, default="").lstrip("-")
    return Value(name, kind, tuple(choices) or _WORDS.get(longest, ()))
