"""Durations in Go's notation, such as "1h30m", "250ms" and "1.5s". Parsing and printing are exactly those of Go's
time.ParseDuration and Duration.String, including rounding and limits, because operators copy values between this proxy,
kubeadm and the Go kube-proxy."""

from __future__ import annotations

import json
import re
from typing import Final, Self

_MAX: Final = (1 << 63) - 1
_UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,  # the micro sign
    "\u03bcs": 1_000,  # the Greek letter mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_TERM: Final = re.compile(r"(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?(?P<unit>[^0-9.]*)")
_MOST_DIGITS: Final = 64  # more than 19 digits overflow anyway, and Python parses at most 4,300 digits


class Duration(float):
    """A number of seconds (float), with the exact nanoseconds as a signed 64-bit number as in Go, for printing."""

    __slots__ = ("nanoseconds",)
    nanoseconds: int

    def __new__(cls, seconds: float = 0.0) -> Self:
        """Return the duration of `seconds`, rounded to nanoseconds. Raises ValueError beyond 64 bits."""
        if not -1e10 < seconds < 1e10:
            raise ValueError(f"{seconds} s is beyond 64 bits of nanoseconds")
        return cls.from_nanoseconds(round(seconds * 1_000_000_000))

    @classmethod
    def from_nanoseconds(cls, nanoseconds: int) -> Self:
        """Return the duration of exactly `nanoseconds`. Raises ValueError if the nanoseconds exceed 64 bits."""
        if not -_MAX - 1 <= nanoseconds <= _MAX:
            raise ValueError(f"{nanoseconds} ns is beyond 64 bits")
        self = super().__new__(cls, nanoseconds / 1_000_000_000)
        self.nanoseconds = nanoseconds
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a duration in Go's notation. Raises ValueError with Go's message."""
        return cls.from_nanoseconds(_parse(text))

    def __str__(self) -> str:
        return _show(self.nanoseconds)

    def __repr__(self) -> str:
        return f"Duration.parse({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Duration.from_nanoseconds, (self.nanoseconds,)


def _parse(text: str) -> int:
    invalid = ValueError(f"time: invalid duration {quote(text)}")
    sign, rest = (-1 if text[:1] == "-" else 1), text[1:] if text[:1] in ("-", "+") else text
    if rest == "0":
        return 0
    if not rest:
        raise invalid
    total = 0
    for match in _TERM.finditer(rest):
        if not match[0]:
            break  # the end
        whole, fraction, name = match.groups("")
        if not whole and not fraction:
            raise invalid
        if not name:
            raise ValueError(f"time: missing unit in duration {quote(text)}")
        unit = _UNITS.get(name)
        if unit is None:
            raise ValueError(f"time: unknown unit {quote(name)} in duration {quote(text)}")
        total += int(whole.lstrip("0")[:_MOST_DIGITS] or "0") * unit + _fraction(fraction, unit)
        if total > _MAX + (sign < 0):
            raise invalid
    return sign * total


def _fraction(digits: str, unit: int) -> int:
    """Return 0.DIGITS of a unit in nanoseconds, truncated. As in Go, the computation uses floats, and ignores digits
    beyond 63 bits."""
    value, scale = 0, 1.0
    for digit in digits:
        if value > _MAX // 10 or value * 10 + int(digit) > _MAX + 1:
            break
        value, scale = value * 10 + int(digit), scale * 10
    return int(float(value) * (float(unit) / scale))


def _show(nanoseconds: int) -> str:
    if nanoseconds == 0:
        return "0s"
    sign = "-" if nanoseconds < 0 else ""
    amount = abs(nanoseconds)
    for unit, name in ((1_000, "ns"), (1_000_000, "\u00b5s"), (1_000_000_000, "ms")):
        if amount < unit:
            return f"{sign}{_decimal(amount, unit // 1_000)}{name}"
    minutes, rest = divmod(amount, _UNITS["m"])
    seconds = _decimal(rest, _UNITS["s"]) + "s"
    if not minutes:
        return f"{sign}{seconds}"
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}h{minutes}m{seconds}" if hours else f"{sign}{minutes}m{seconds}"


def _decimal(amount: int, unit: int) -> str:
    whole, rest = divmod(amount, unit)
    return f"{whole}.{str(rest).zfill(len(str(unit)) - 1).rstrip('0')}" if rest else str(whole)


def quote(text: str) -> str:
    """Return a text in double quotes, as Go's %q prints it."""
    return json.dumps(text, ensure_ascii=False)
