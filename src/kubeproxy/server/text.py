"""Sanitises text from other programs and users for logs, pages and terminals: removes secrets and control characters.
Names of objects, and messages of the API server, are written by other programs and by users."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

LINE: Final = 4096  # the maximum length of a line in logs and pages; a longer line is cut
_SEARCHED: Final = 16 * LINE  # at most this number of characters is searched for secrets, to limit the time

_REDACTED: Final = r"\1<redacted>"
_SECRETS: Final = re.compile(
    r"""((?i:\bbearer\s+|\bbasic\s+|(?:token|password|client-key-data)["']?\s*[:=]\s*["']?))[A-Za-z0-9._~+/=-]{6,}"""
)
# A JSON Web Token, such as that of a service account: base64 that starts with '{"', and two dots.
_JWT: Final = re.compile(r"(\b)eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
# The user and password in a URL such as https://user:password@host.
_USER: Final = re.compile(r"(://)[^\s/@\"']+(?=@)")
# A text with a secret contains one of these words. Searching for the words first saves 10 us per log line.
_HINTS: Final = ("eyj", "bearer", "basic", "token", "password", "client-key", "://")


def redact(text: str) -> str:
    """Remove bearer tokens, and users and passwords in URLs, from a text."""
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        return _USER.sub(_REDACTED, _JWT.sub(_REDACTED, _SECRETS.sub(_REDACTED, text)))
    return text


def clean(text: str) -> str:
    """Remove secrets from a text; cut a long text, and append the number of omitted characters."""
    shown = redact(text[:_SEARCHED])
    if len(shown) <= LINE and len(text) <= _SEARCHED:
        return shown
    return f"{shown[:LINE]}... ({len(text) - LINE} more characters)"


def printable(text: str) -> str:
    """Return a text as one line, with escapes like \n and \u202e for all characters that Unicode defines as not
    printable.

    Unprintable characters include line ends, the start of ANSI escapes, and characters that change the direction of
    writing."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON in one line, with JSON's escapes for characters that are not printable."""
    data = msgspec.json.encode(value)
    if data.isascii() and b"\x7f" not in data:
        return data
    return "".join(char if char.isprintable() else _json_escape(char) for char in data.decode()).encode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as an RFC 3339 time in UTC, in the form of Go's JSON."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
