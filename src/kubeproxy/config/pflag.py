"""Parses a command line like Go's pflag and cobra: --flag=value, --flag value, --bool, -v 2, -v=2, -v2, "--". Fast to
import. Values are parsed and printed as in Go's flag and Kubernetes' API libraries. Parsers raise ValueError with Go's
messages, because operators search for them. Underscores in names count as hyphens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kubeproxy.config.durations import Duration, quote
from kubeproxy.config.flags import BY_NAME, FLAGS, Flag
from kubeproxy.config.messages import bool_text, did_you_mean
from kubeproxy.errors import ConfigError

SHORTHANDS = {"v": "v", "h": "help"}

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_SUFFIXES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_MOST_DIGITS = 64  # the maximum number of digits; no valid number has as many, and Python parses at most 4,300
_INTEGER = re.compile(
    r"[+-]?(0[xX]_?[0-9a-fA-F]+(_[0-9a-fA-F]+)*|0[bB]_?[01]+(_[01]+)*|0[oO]?_?[0-7]+(_[0-7]+)*|0|[1-9][0-9]*(_[0-9]+)*)"
)


def _invalid(function: str, text: str, reason: str = "invalid syntax") -> ValueError:
    return ValueError(f"strconv.{function}: parsing {quote(text)}: {reason}")


def parse_bool(text: str) -> bool:
    """Parse a bool like Go's strconv.ParseBool: 1, t, T, true, TRUE, True and their opposites."""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise _invalid("ParseBool", text)


def parse_int32(text: str) -> int:
    """Parse a number like Go's strconv.ParseInt with base 0 and 32 bits: decimal, 0x, 0o, 0b, a leading 0 for octal."""
    if not _INTEGER.fullmatch(text):
        raise _invalid("ParseInt", text)
    digits = text.lstrip("+-")
    too_long = len(digits.replace("_", "").lstrip("0")) > _MOST_DIGITS
    value = 1 << 31 if too_long else int(text, 8 if re.fullmatch(r"0[0-7_]+", digits) else 0)
    if not -(1 << 31) <= value < 1 << 31:
        raise _invalid("ParseInt", text, "value out of range")
    return value


def parse_level(text: str) -> int:
    """Parse a log verbosity: a decimal number of at most 31 bits."""
    if not text.isascii() or not text.isdigit():
        raise _invalid("ParseUint", text)
    if len(text.lstrip("0")) > _MOST_DIGITS or int(text) >= 1 << 31:
        raise _invalid("ParseUint", text, "value out of range")
    return int(text)


def parse_float(text: str) -> float:
    """Parse a decimal floating point number."""
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    raise _invalid("ParseFloat", text)


def parse_quantity(text: str) -> int:
    """Parse a resource quantity of whole bytes: 512, 1K (1000), 2Ki (2048), 3M, 4G, 5Mi, 1.5Gi; at most 63 bits."""
    match = re.fullmatch(r"([0-9]+)(?:\.([0-9]*))?([A-Za-z]*)", text)
    if match is None or match[3] not in _SUFFIXES:
        raise ValueError(f"{quote(text)} is no quantity of bytes; write a number with an optional suffix like Ki or M")
    whole, fraction = match[1].lstrip("0"), match[2] or ""
    if max(len(whole), len(fraction)) <= _MOST_DIGITS:
        divisor: int = 10 ** len(fraction)
        amount, rest = divmod(int(f"0{whole}{fraction}") * _SUFFIXES[match[3]], divisor)
        if not rest and amount < 1 << 63:
            return amount
    raise ValueError(f"{quote(text)} is no whole number of bytes within 63 bits")


def parse_list(text: str) -> tuple[str, ...]:
    """Parse comma-separated values, optionally in double quotes, like pflag's StringSlice."""
    if not text:
        return ()
    if '"' not in text:
        return tuple(text.split(","))
    import csv  # noqa: PLC0415 - quotes are rare

    try:
        return tuple(next(csv.reader([text], strict=True)))
    except csv.Error as error:
        raise ValueError(f"{text}: a double quote must open and close a whole value ({error})") from None


def parse_bool_map(text: str) -> dict[str, bool]:
    """Parse pairs like "A=true,B=false"; ignore blanks around names and values."""
    pairs: dict[str, bool] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"malformed pair {quote(item)}, expect string=bool")
        try:
            pairs[name.strip()] = parse_bool(value.strip())
        except ValueError as error:
            raise ValueError(f"invalid value of {name.strip()}: {value.strip()}, err: {error}") from None
    return pairs


def show_bool_map(pairs: Mapping[str, bool]) -> str:
    """Return pairs in the form of the command line, sorted by name."""
    return ",".join(f"{name}={bool_text(value)}" for name, value in sorted(pairs.items()))


def parse_patterns(text: str) -> tuple[tuple[str, int], ...]:
    """Parse klog's vmodule: "pattern=level,..."."""
    items = []
    for item in filter(None, text.split(",")):
        pattern, _, level = item.partition("=")
        if not pattern or not level or "=" in level:
            raise ValueError(f"{quote(item)} does not have the pattern=N format")
        try:
            items.append((pattern, parse_level(level)))
        except ValueError as error:
            raise ValueError(f"parsing verbosity in {quote(item)}: {error}") from None
    return tuple(items)


def show_patterns(items: Sequence[tuple[str, int]]) -> str:
    """Return vmodule patterns in the form of the command line."""
    return ",".join(f"{pattern}={level}" for pattern, level in items)


class ValueKind(NamedTuple):
    """The functions that parse and print the values of a kind of flag."""

    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    joined: Callable[[Any, Any], Any] | None = None  # merges two values of the flag; None: the last value is used


class CommandLine(NamedTuple):
    """A parsed command line: the values of the given flags, the words that are not flags, and notices to print."""

    given: dict[str, Any]
    words: list[str]
    notices: list[str]

    def shown(self) -> list[tuple[str, str]]:
        """Return every flag with its given or default value as text, sorted by name."""
        given = {name: KINDS[BY_NAME[name].kind].show(value) for name, value in self.given.items()}
        return sorted((flag.name, given.get(flag.name, shown_default(flag))) for flag in FLAGS if not flag.hidden)


def _ip(text: str) -> str:
    from kubeproxy.model.addresses import pack  # noqa: PLC0415 - only with such a flag

    if text and pack(text) is None:
        raise ValueError(f"{quote(text)} is not a valid IP address")
    return text


def _ip_port(text: str) -> str:
    from kubeproxy.model.addresses import pack, split_host_port  # noqa: PLC0415 - only with such a flag

    if not text or pack(text) is not None:
        return text
    parts = split_host_port(text)
    if parts is None:
        raise ValueError(f"{quote(text)} is not in a valid format (ip or ip:port)")
    _ip(parts[0])
    if not parts[1].isascii() or not parts[1].isdigit():
        raise ValueError(f"{quote(parts[1])} is not a valid number")
    return text


def _version(text: str) -> str:
    return text if text == "raw" else bool_text(parse_bool(text))


KINDS: Mapping[str, ValueKind] = {
    "string": ValueKind(str),
    "ProxyMode": ValueKind(str),
    "LocalMode": ValueKind(str),
    "bool": ValueKind(parse_bool, bool_text),
    "version": ValueKind(_version),
    "int32": ValueKind(parse_int32),
    "float32": ValueKind(parse_float, lambda value: f"{value:g}"),
    "Level": ValueKind(parse_level),
    "duration": ValueKind(Duration.parse),
    "quantity": ValueKind(parse_quantity),
    "ip": ValueKind(_ip),
    "ipport": ValueKind(_ip_port),
    "strings": ValueKind(parse_list, lambda values: f"[{','.join(values)}]", lambda old, new: old + new),
    "mapStringBool": ValueKind(parse_bool_map, show_bool_map, lambda old, new: {**old, **new}),
    "pattern=N,...": ValueKind(parse_patterns, show_patterns, lambda old, new: old + new),
}
_WITHOUT_VALUE = frozenset(("bool", "version"))


def parse(arguments: Sequence[str]) -> CommandLine:
    """Parse arguments (without the program's name). Raises ConfigError with pflag's message."""
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
    _set(line, flag, value if equals else _next_value(flag, rest, f"--{name}"))


def _next_value(flag: Flag, rest: list[str], shown: str) -> str:
    if flag.kind in _WITHOUT_VALUE:
        return "true"
    if not rest:
        raise ConfigError(f"flag needs an argument: {shown}")
    return rest.pop()


def _hint(name: str) -> str:
    """Return "; did you mean ...?" for an error message: with the flag that sets the field of this name (`mode`,
    `clusterCIDR`), else with flags of similar names; '' for none."""
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
        elif letters and flag.kind not in _WITHOUT_VALUE:
            value, letters = letters, ""
        else:
            value = _next_value(flag, rest, f"'{letter}' in {argument}")
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
