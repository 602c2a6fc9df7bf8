"""What may be shown of text that others wrote: no secrets, nothing that a terminal or a log reader takes for a command.

Names of objects and the API server's messages come from whoever may write there. Used by the log's formatters and by
the pages for people and programs; nothing here knows what is shown.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

LINE: Final = 4096
"""Most characters of one line of log or page; the rest of it is counted."""
_LOOKED_AT: Final = 16 * LINE  # characters in which secrets are looked for, which takes time

_REDACTED: Final = r"\1<redacted>"
_SECRETS: Final = re.compile(
    r"""((?i:\bbearer\s+|\bbasic\s+|(?:token|password|client-key-data)["']?\s*[:=]\s*["']?))[A-Za-z0-9._~+/=-]{6,}"""
)
# A JSON Web Token, as service accounts have, wherever it stands: two dots between base64 that starts with '{"'.
_JWT: Final = re.compile(r"(\b)eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
# The user's part of a URL, as in https://user:password@host.
_USER: Final = re.compile(r"(://)[^\s/@\"']+(?=@)")
# One of these is in whatever the three find; looking for them first makes a log line 10 us cheaper.
_HINTS: Final = ("eyj", "bearer", "basic", "token", "password", "client-key", "://")


def redact(text: str) -> str:
    """Return the text without bearer tokens, passwords and the like."""
    lowered = text.lower()
    if any(hint in lowered for hint in _HINTS):
        return _USER.sub(_REDACTED, _JWT.sub(_REDACTED, _SECRETS.sub(_REDACTED, text)))
    return text


def clean(text: str) -> str:
    """Return the text without secrets; of a long one its beginning, and how much more there is."""
    shown = redact(text[:_LOOKED_AT])
    if len(shown) <= LINE and len(text) <= _LOOKED_AT:
        return shown
    return f"{shown[:LINE]}... ({len(text) - LINE} more characters)"


def printable(text: str) -> str:
    r"""Return the text as one line that shows what it holds.

    Line ends, other control characters (ANSI escapes begin with one), marks that turn the direction of writing, and all
    else that Unicode counts as not printable become escapes like \n and \u202e.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def json_bytes(value: Any) -> bytes:
    """Return the JSON of a value in one line, with escapes of JSON for what is not printable: it says the same."""
    data = msgspec.json.encode(value)
    if data.isascii() and b"\x7f" not in data:
        return data
    return "".join(char if char.isprintable() else _json_escape(char) for char in data.decode()).encode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


def timestamp(seconds: float) -> str:
    """Return a time since the epoch as RFC 3339 in UTC, as Go's JSON has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
