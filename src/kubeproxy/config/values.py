"""Text of flags to values and back, as Go's flag and Kubernetes' API libraries do it. Pure.

Each parser raises ValueError with Go's message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kubeproxy.config.durations import quote

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_SUFFIXES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_MOST_DIGITS = 64  # of a number, more than any value has; Python itself reads no more than 4,300
_INTEGER = re.compile(
    r"[+-]?(0[xX]_?[0-9a-fA-F]+(_[0-9a-fA-F]+)*|0[bB]_?[01]+(_[01]+)*|0[oO]?_?[0-7]+(_[0-7]+)*|0|[1-9][0-9]*(_[0-9]+)*)"
)


def _invalid(function: str, text: str, reason: str = "invalid syntax") -> ValueError:
    return ValueError(f"strconv.{function}: parsing {quote(text)}: {reason}")


def parse_bool(text: str) -> bool:
    """Read as Go's strconv.ParseBool: 1, t, T, true, TRUE, True and their opposites."""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise _invalid("ParseBool", text)


def parse_int32(text: str) -> int:
    """Read as Go's strconv.ParseInt with base 0 and 32 bits: decimal, 0x, 0o, 0b, a leading 0 for octal."""
    if not _INTEGER.fullmatch(text):
        raise _invalid("ParseInt", text)
    digits = text.lstrip("+-")
    too_long = len(digits.replace("_", "").lstrip("0")) > _MOST_DIGITS
    value = 1 << 31 if too_long else int(text, 8 if re.fullmatch(r"0[0-7_]+", digits) else 0)
    if not -(1 << 31) <= value < 1 << 31:
        raise _invalid("ParseInt", text, "value out of range")
    return value


def parse_level(text: str) -> int:
    """Read a log verbosity: a decimal number of at most 31 bits."""
    if not text.isascii() or not text.isdigit():
        raise _invalid("ParseUint", text)
    if len(text.lstrip("0")) > _MOST_DIGITS or int(text) >= 1 << 31:
        raise _invalid("ParseUint", text, "value out of range")
    return int(text)


def parse_float(text: str) -> float:
    """Read a decimal floating point number."""
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    raise _invalid("ParseFloat", text)


def parse_quantity(text: str) -> int:
    """Read a resource quantity of whole bytes: 512, 1K (1000), 2Ki (2048), 3M, 4G, 5Mi, 1.5Gi; at most 63 bits."""
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
    """Read comma-separated values, which may stand in double quotes, as pflag's StringSlice does."""
    if not text:
        return ()
    if '"' not in text:
        return tuple(text.split(","))
    import csv  # noqa: PLC0415 - quotes are rare, and starting fast is not

    try:
        return tuple(next(csv.reader([text], strict=True)))
    except csv.Error as error:
        raise ValueError(f"{text}: a double quote must open and close a whole value ({error})") from None


def show_list(values: Sequence[str]) -> str:
    """Return a list of values as pflag prints it."""
    return "[" + ",".join(values) + "]"


def parse_bool_map(text: str) -> dict[str, bool]:
    """Read pairs like "A=true,B=false"; blanks around names and values are dropped."""
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
    """Return pairs as on a command line, sorted by name."""
    return ",".join(f"{name}={'true' if value else 'false'}" for name, value in sorted(pairs.items()))


def parse_patterns(text: str) -> tuple[tuple[str, int], ...]:
    """Read klog's vmodule: "pattern=level,..."."""
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
    """Return vmodule patterns as on a command line."""
    return ",".join(f"{pattern}={level}" for pattern, level in items)
