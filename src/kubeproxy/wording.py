"""Writes counts in texts, with a noun and a verb that agree with the number."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_PLURAL_VERBS: Final = MappingProxyType({"is": "are", "was": "were", "has": "have"})


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun and its verb, such as "2 entries were". Noun and verb are given in the singular."""
    if number == 1:
        return f"1 {noun} {verb}".rstrip()
    nouns = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {nouns} {_PLURAL_VERBS.get(verb, verb.removesuffix('s'))}".rstrip()
