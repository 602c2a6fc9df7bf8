"""Counts in texts: the noun and the verb agree with the number."""

from __future__ import annotations

import pytest

from kubeproxy.wording import counted


@pytest.mark.parametrize(
    ("number", "noun", "verb", "text"),
    [
        (1, "Service", "waits", "1 Service waits"),
        (2, "Service", "waits", "2 Services wait"),
        (0, "entry", "was", "0 entries were"),
        (1, "chain", "", "1 chain"),
        (3, "more class", "", "3 more classes"),
        (2, "endpoint", "is", "2 endpoints are"),
        (2, "endpoint", "has", "2 endpoints have"),
    ],
)
def test_counted(number: int, noun: str, verb: str, text: str) -> None:
    assert counted(number, noun, verb) == text
