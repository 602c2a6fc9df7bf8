"""Go's time.Duration as text: "1h30m", "250ms", "1.5s". Nothing here knows of flags or configuration.

Parsing and printing follow Go's time.ParseDuration and Duration.String exactly, rounding and limits included,
because operators copy such values between this proxy, kubeadm and the Go kube-proxy.
"""

from __future__ import annotations

import json
from typing import Self

_MAX = (1 << 63) - 1
_UNITS = {
    "ns": 1,
    "us": 1_000,
    "\u00b5s": 1_000,  # the micro sign
    "\u03bcs": 1_000,  # the Greek letter mu
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_LONGEST = 64  # digits; Python itself reads no more than 4,300
_DIGITS = frozenset("0123456789")


class Duration(float):
    """A length of time: a float of seconds that also holds the exact nanoseconds, so that printing loses nothing.

    Nanoseconds are limited to 64 bits signed, as in Go (about 292 years).
    """

    __slots__ = ("nanoseconds",)
    nanoseconds: int

    def __new__(cls, seconds: float = 0.0) -> Self:
        """Duration of that many seconds, rounded to nanoseconds; ValueError beyond 64 bits."""
        if not -1e10 < seconds < 1e10:
            raise ValueError(f"{seconds} s is beyond 64 bits of nanoseconds")
        return cls.from_nanoseconds(round(seconds * 1_000_000_000))

    @classmethod
    def from_nanoseconds(cls, nanoseconds: int) -> Self:
        """Duration of exactly that many nanoseconds; ValueError beyond 64 bits."""
        if not -_MAX - 1 <= nanoseconds <= _MAX:
            raise ValueError(f"{nanoseconds} ns is beyond 64 bits")
        self = super().__new__(cls, nanoseconds / 1_000_000_000)
        self.nanoseconds = nanoseconds
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Duration from Go's notation; ValueError with Go's message when the text is none."""
        return cls.from_nanoseconds(_parse(text))

    def __str__(self) -> str:
        return _show(self.nanoseconds)

    def __repr__(self) -> str:
        return f"Duration.parse({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Duration.from_nanoseconds, (self.nanoseconds,)


def _parse(text: str) -> int:
    sign, rest = 1, text
    if rest[:1] in ("-", "+"):
        sign = -1 if rest[0] == "-" else 1
        rest = rest[1:]
    if rest == "0":
        return 0
    if not rest:
        raise _invalid(text)
    total = 0
    while rest:
        amount, rest = _term(rest, text)
        total += amount
        if total > _MAX + 1:
            raise _invalid(text)
    if sign > 0 and total > _MAX:
        raise _invalid(text)
    return sign * total


def _term(rest: str, text: str) -> tuple[int, str]:
    """One number with its unit at the start of rest: nanoseconds, and what follows."""
    end = _run(rest, _DIGITS)
    whole, rest = rest[:end], rest[end:]
    fraction = ""
    if rest[:1] == ".":
        end = _run(rest[1:], _DIGITS)
        fraction, rest = rest[1 : end + 1], rest[end + 1 :]
    if not whole and not fraction:
        raise _invalid(text)
    end = next((i for i, char in enumerate(rest) if char == "." or char in _DIGITS), len(rest))
    name, rest = rest[:end], rest[end:]
    if not name:
        raise ValueError(f"time: missing unit in duration {quote(text)}")
    unit = _UNITS.get(name)
    if unit is None:
        raise ValueError(f"time: unknown unit {quote(name)} in duration {quote(text)}")
    digits = whole.lstrip("0")
    amount = int(digits[:_LONGEST] or "0") * unit
    if amount > _MAX + 1 or len(digits) > _LONGEST:
        raise _invalid(text)
    if fraction:
        amount += _fraction(fraction, unit)
    return amount, rest


def _fraction(digits: str, unit: int) -> int:
    """The nanoseconds of .digits units, in Go's floating point: cut off, and deaf to digits beyond 63 bits."""
    value, scale = 0, 1.0
    for digit in digits:
        if value > _MAX // 10 or value * 10 + int(digit) > _MAX + 1:
            break
        value, scale = value * 10 + int(digit), scale * 10
    return int(float(value) * (float(unit) / scale))


def _run(text: str, chars: frozenset[str]) -> int:
    return next((i for i, char in enumerate(text) if char not in chars), len(text))


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
    if not rest:
        return str(whole)
    return f"{whole}.{str(rest).zfill(len(str(unit)) - 1).rstrip('0')}"


def quote(text: str) -> str:
    """Text in double quotes, as Go's %q shows it."""
    return json.dumps(text, ensure_ascii=False)


def _invalid(text: str) -> ValueError:
    return ValueError(f"time: invalid duration {quote(text)}")
