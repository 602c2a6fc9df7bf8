"""Mistakes in a configuration, and texts that error messages share. Fast to import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple


class Mistake(NamedTuple):
    """A mistake in a field: the field's JSON path, and a message that starts with a lower-case letter."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def negative(fields: Iterable[tuple[str, float]]) -> Iterator[Mistake]:
    """Yield a mistake for each (path, value) with a negative value."""
    return (Mistake(path, f"must not be negative, got {value}") for path, value in fields if value < 0)


def not_positive(fields: Iterable[tuple[str, float]]) -> Iterator[Mistake]:
    """Yield a mistake for each (path, value) with a value of 0 or less."""
    return (Mistake(path, f"must be greater than 0, got {value}") for path, value in fields if value <= 0)


def not_strict(lack: str) -> str:
    """Return the message that a value contradicts `strict`; `lack` names the feature that the Go kube-proxy lacks."""
    return f"cannot be used with --strict (strict: true): the Go kube-proxy 1.36 does not have {lack}"


def bool_text(value: bool) -> str:
    """Return a bool as Go prints it."""
    return "true" if value else "false"


def did_you_mean(name: str, known: AbstractSet[str]) -> str:
    """Return the end of a message, which proposes known names that are similar to `name`; "" if no name is similar."""
    import difflib  # noqa: PLC0415 - only needed to report a mistake

    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.7)
    return "; did you mean " + " or ".join(lowered[match] for match in close) + "?" if close else ""


def listed(mistakes: str) -> str:
    """Return several mistakes, one per line, as an indented list with a heading. Return a single mistake, or a text
    that is such a list already, unchanged."""
    lines = mistakes.splitlines()
    if len(lines) < 2 or lines[1].startswith(" "):
        return mistakes
    return f"{len(lines)} mistakes:\n" + "\n".join(f"  {line}" for line in lines)
