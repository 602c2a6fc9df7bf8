"""Errors of requests to an API server, with messages for operators: one subclass of SourceError per reaction. Pure."""

# ruff: noqa: N818 - the names describe conditions

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import Final

import msgspec
from msgspec import Struct

from kubeproxy.errors import SourceError

_LONGEST: Final = 1000  # maximum length of a Status's message in logs, readiness and events
LONGEST_WAIT: Final = 120.0  # maximum of Retry-After in seconds; larger values are reduced
_SNIPPET: Final = 200  # maximum number of characters quoted from an answer that is not a Status


class _Cause(Struct, frozen=True):
    reason: str = ""


class _Details(Struct, frozen=True, rename="camel"):
    causes: list[_Cause] | None = None
    retry_after_seconds: float | None = None


class Status(Struct, frozen=True):
    """meta/v1 Status, with the fields that determine the reaction."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None


class ConnectionFailed(SourceError):
    """The answer is missing or incomplete: the connection was refused or lost, the name is unknown, or TLS failed.
    `silent` is the number of seconds since the peer's last packet."""

    def __init__(self, text: str, silent: float = 0.0) -> None:
        super().__init__(text)
        self.silent = silent


class MalformedAnswer(SourceError):
    """The answer is not valid HTTP, not valid JSON of the API, or too long."""


class NoInitialEnd(SourceError):
    """A WatchList was silent, or ended, before the bookmark that ends its initial events."""


class OutOfStep(SourceError):
    """The watch may have missed changes: a new list is needed."""


class StatusError(SourceError):
    """The server answered with a failure: a Status with an HTTP status code, or in an ERROR event of a watch. `code` is
    the HTTP status. `expired`: the resource version or continue token is too old; list again. `too_large`: the server
    has not reached the requested version yet. `retry_after` is in seconds, or None if the server sent no such time."""

    def __init__(self, status: Status, *, retry_after: float | None = None) -> None:
        details = status.details or _Details()
        text = (status.message or status.reason or "no message")[:_LONGEST]
        super().__init__(f"{text} (code {status.code})")
        self.code = status.code
        self.too_large = any(cause.reason == "ResourceVersionTooLarge" for cause in details.causes or ())
        self.expired = status.code == 410 or (status.code not in _KNOWN and status.reason in {"Expired", "Gone"})
        self.retry_after = details.retry_after_seconds if retry_after is None else retry_after


_KNOWN: Final = frozenset((400, 401, 403, 404, 409, 422, 429))

_decoder = msgspec.json.Decoder(Status)


def decode_status(data: bytes | bytearray | memoryview | msgspec.Raw, code: int) -> Status:
    """Decode a Status. If `data` is no Status, return a Status with `code` (0 if unknown) that quotes the beginning of
    `data`."""
    try:
        status = _decoder.decode(data)
    except (ValueError, RecursionError):
        text = bytes(data).decode("utf-8", "replace").strip()
        return Status(code=code, message=text[:_SNIPPET])
    return status if status.code or not code else msgspec.structs.replace(status, code=code)


_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")


def os_reason(error: OSError) -> str:
    """Return the operating system's text for an error instead of Python's or asyncio's."""
    if isinstance(error, ssl.SSLError):
        return tls_words(error)
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: {error.strerror}"
    # asyncio has other texts, and combines several errors into one error without a number.
    number = error.errno or next(map(int, _ERRNO.findall(str(error))), 0)
    if number == errno.ECONNREFUSED:
        return "connection refused"
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_words(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as text, without the library's name and line."""
    if reason := tls_code(error):
        return reason.replace("_", " ").lower()
    text = re.sub(r"^\[[^\]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return text or "unknown reason"


def tls_code(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of the reason; '' if Python raised the error."""
    return getattr(error, "reason", None) or ""
