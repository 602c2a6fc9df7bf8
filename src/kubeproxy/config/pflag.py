"""Reads a command line as Go's pflag and cobra do: --flag=value, --flag value, --bool, -v 2, -v=2, -v2, "--".

Light to import. Underscores in names count as hyphens. Messages are pflag's, which operators search for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kubeproxy.config import values
from kubeproxy.config.durations import Duration, quote
from kubeproxy.config.flags import BY_NAME, FLAGS, Flag
from kubeproxy.config.messages import did_you_mean
from kubeproxy.errors import ConfigError

SHORTHANDS = {"v": "v", "h": "help"}


class ValueKind(NamedTuple):
    """How values of a kind are read and shown; `joined` adds the value of a further occurrence, None replaces it."""

    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    joined: Callable[[Any, Any], Any] | None = None


class CommandLine(NamedTuple):
    """A command line: the values of the given flags, words that are no flags, notices to print."""

    given: dict[str, Any]
    words: list[str]
    notices: list[str]

    def shown(self) -> list[tuple[str, str]]:
        """Return every flag with its value as text, given or default, sorted by name."""
        given = {name: KINDS[BY_NAME[name].kind].show(value) for name, value in self.given.items()}
        return sorted((flag.name, given.get(flag.name, shown_default(flag))) for flag in FLAGS if not flag.hidden)


def _ip(text: str) -> str:
    from kubeproxy.config.addresses import parse_ip  # noqa: PLC0415 - only with such a flag

    if text and parse_ip(text) is None:
        raise ValueError(f"{quote(text)} is not a valid IP address")
    return text


def _ip_port(text: str) -> str:
    from kubeproxy.config.addresses import parse_ip, split_host_port  # noqa: PLC0415 - only with such a flag

    if not text or parse_ip(text) is not None:
        return text
    parts = split_host_port(text)
    if parts is None:
        raise ValueError(f"{quote(text)} is not in a valid format (ip or ip:port)")
    _ip(parts[0])
    if not parts[1].isascii() or not parts[1].isdigit():
        raise ValueError(f"{quote(parts[1])} is not a valid number")
    return text


def _version(text: str) -> str:
    return text if text == "raw" else _show_bool(values.parse_bool(text))


def _show_bool(value: bool) -> str:
    return "true" if value else "false"


KINDS: Mapping[str, ValueKind] = {
    "string": ValueKind(str),
    "ProxyMode": ValueKind(str),
    "LocalMode": ValueKind(str),
    "bool": ValueKind(values.parse_bool, _show_bool),
    "version": ValueKind(_version),
    "int32": ValueKind(values.parse_int32),
    "float32": ValueKind(values.parse_float, lambda value: f"{value:g}"),
    "Level": ValueKind(values.parse_level),
    "duration": ValueKind(Duration.parse),
    "quantity": ValueKind(values.parse_quantity),
    "ip": ValueKind(_ip),
    "ipport": ValueKind(_ip_port),
    "strings": ValueKind(values.parse_list, values.show_list, lambda old, new: old + new),
    "mapStringBool": ValueKind(values.parse_bool_map, values.show_bool_map, lambda old, new: {**old, **new}),
    "pattern=N,...": ValueKind(values.parse_patterns, values.show_patterns, lambda old, new: old + new),
}
_WITHOUT_VALUE = frozenset(("bool", "version"))


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read arguments (without the program's name). Raises ConfigError with pflag's message."""
    line = CommandLine({}, [], [])
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if argument == "--":
            line.words.extend(reversed(rest))
            break
        if argument.startswith("--"):
            _long(line, argument, rest)
        elif argument.startswith("-") and argument != "-":
            _short(line, argument, rest)
        else:
            line.words.append(argument)
    return line


def shown_default(flag: Flag) -> str:
    """Return a flag's default in the notation of --help and /flagz."""
    return f"[{flag.default}]" if flag.kind == "strings" else flag.default


def _long(line: CommandLine, argument: str, rest: list[str]) -> None:
    name, equals, value = argument[2:].partition("=")
    if not name or name.startswith("-"):
        raise ConfigError(f"bad flag syntax: {argument}")
    flag = BY_NAME.get(name.replace("_", "-"))
    if flag is None:
        raise ConfigError(f"unknown flag: --{name}" + _hint(name))
    if not equals:
        if flag.kind in _WITHOUT_VALUE:
            value = "true"
        elif rest:
            value = rest.pop()
        else:
            raise ConfigError(f"flag needs an argument: --{name}")
    _set(line, flag, value)


def _hint(name: str) -> str:
    """Return as a question the flag that sets the field of this name (`mode`, `clusterCIDR`), else similar names."""
    fields = {flag.path.rpartition(".")[2]: flag.name for flag in reversed(FLAGS) if flag.path}
    if name in fields:
        return f"; did you mean --{fields[name]}?"
    return did_you_mean(f"--{name}", frozenset(f"--{known.name}" for known in FLAGS if not known.hidden))


def _short(line: CommandLine, argument: str, rest: list[str]) -> None:
    letters = argument[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in SHORTHANDS:
            hint = ""
            if argument[1:].partition("=")[0].replace("_", "-") in BY_NAME:
                hint = f"; did you mean -{argument}?"
            raise ConfigError(f"unknown shorthand flag: '{letter}' in {argument}{hint}")
        flag = BY_NAME[SHORTHANDS[letter]]
        if letters.startswith("="):
            value, letters = letters[1:], ""
        elif flag.kind in _WITHOUT_VALUE:
            value = "true"
        elif letters:
            value, letters = letters, ""
        elif rest:
            value = rest.pop()
        else:
            raise ConfigError(f"flag needs an argument: '{letter}' in {argument}")
        _set(line, flag, value)


def _set(line: CommandLine, flag: Flag, text: str) -> None:
    kind = KINDS[flag.kind]
    try:
        value = kind.parse(text)
    except ValueError as error:
        shown = "-v, --v" if flag.name == "v" else f"--{flag.name}"
        raise ConfigError(f'invalid argument {quote(text)} for "{shown}" flag: {error}') from None
    if flag.deprecated:
        notice = f"Flag --{flag.name} has been deprecated, {flag.deprecated}"
        if notice not in line.notices:
            line.notices.append(notice)
    if kind.joined and flag.name in line.given:
        value = kind.joined(line.given[flag.name], value)
    line.given[flag.name] = value
