"""Errors of requests to an API server, with messages for operators: a SourceError for each reaction. Pure."""

# ruff: noqa: N818 - the names say what is the case

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from kubeproxy.errors import SourceError

_LONGEST: Final = 1000
"""Characters of a Status's message that are kept, for logs, readiness and events."""

_LONGEST_WAIT: Final = 120.0
"""Most seconds of a Retry-After that count."""

_SNIPPET: Final = 200
"""Characters of an answer that is no Status which are quoted in the message."""


class _Cause(Struct, frozen=True):
    reason: str = ""


class _Details(Struct, frozen=True, rename="camel"):
    causes: list[_Cause] | None = None
    retry_after_seconds: float | None = None


class Status(Struct, frozen=True):
    """meta/v1 Status, with the fields that decide about the reaction."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None


class ConnectionFailed(SourceError):
    """No answer, or only a part of one: nothing listens, the name is unknown, TLS failed, the connection died."""


class MalformedAnswer(SourceError):
    """The answer is neither HTTP nor JSON of the API."""


class NoInitialEnd(SourceError):
    """A WatchList was silent, or ended, without the bookmark that completes it."""


class OutOfStep(SourceError):
    """The watch may have missed changes: only a new list shows the present state."""


class StatusError(SourceError):
    """The server answered with a Status of failure (HTTP status, or an ERROR event of a watch).

    `code` is the HTTP status. `expired`: the resource version or continue token is too old; list again. `too_large`:
    the server has not reached the requested version yet. `retry_after` is in seconds, None when it is not given.
    """

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
    """Decode a Status; if `data` is none, return one of `code` (0 when unknown) that quotes its beginning."""
    try:
        status = _decoder.decode(data)
    except (ValueError, RecursionError):
        text = bytes(data).decode("utf-8", "replace").strip()
        return Status(code=code, message=text[:_SNIPPET])
    return status if status.code or not code else msgspec.structs.replace(status, code=code)


def waiting_wished(error: SourceError) -> float:
    """Return the seconds of the server's Retry-After, 0.0 without one."""
    wished = error.retry_after if isinstance(error, StatusError) else None
    return min(wished or 0.0, _LONGEST_WAIT)


_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

# X.509 verification results of OpenSSL (x509_vfy.h).
_NOT_SIGNED: Final = frozenset((2, 18, 19, 20, 21))
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAMES: Final = frozenset((62, 64))  # another host name, another address

# Values of ssl.SSLError.reason, by their remedy.
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"))
_OURS_REFUSED: Final = re.compile(r"ALERT_(?:BAD_CERTIFICATE|UNKNOWN_CA|CERTIFICATE_\w+|UNSUPPORTED_CERTIFICATE)$")


class ConnectedServer(Protocol):
    """The parts of a connection that error messages name."""

    @property
    def identity(self) -> str:
        """The credentials that the server gets, in words."""

    @property
    def authorities(self) -> str:
        """The certificate authorities that its certificate must be signed by, in words."""

    @property
    def server_hostname(self) -> str | None:
        """The name that must be in its certificate."""


def os_reason(error: OSError) -> str:
    """Return the system's text of an error; Python and asyncio often have another one."""
    if isinstance(error, ssl.SSLError):
        return tls_words(error)
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: {error.strerror}"
    # asyncio has texts of its own, and quotes several errors in one that has no number.
    number = error.errno or next(map(int, _ERRNO.findall(str(error))), 0)
    if number == errno.ECONNREFUSED:
        return "connection refused"
    return os.strerror(number) if number else str(error) or type(error).__name__


def tls_words(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as words, without the library's name and line."""
    if reason := _code(error):
        return reason.replace("_", " ").lower()
    text = re.sub(r"^\[[^\]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return text or "unknown reason"


def _code(error: ssl.SSLError) -> str:
    return getattr(error, "reason", None) or ""  # missing where Python itself raised it


def connection_reason(error: OSError, cluster: ConnectedServer) -> str:
    """Return why no connection to the server of `cluster` was made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_reason(error, cluster)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the connection was closed during the TLS handshake"
    if isinstance(error, ssl.SSLError):
        reason = _code(error)
        if reason in _NO_TLS:
            return "what listens there does not speak TLS: is the server's URL https, and its port right?"
        if _OURS_REFUSED.search(reason):
            return f"the server does not accept our credentials ({cluster.identity}): {tls_words(error)}"
        return f"TLS failed: {tls_words(error)}"
    return os_reason(error)


def _certificate_reason(error: ssl.SSLCertVerificationError, cluster: ConnectedServer) -> str:
    code = error.verify_code
    if code in _NOT_SIGNED:
        return f"the server's certificate is not signed by {cluster.authorities}"
    if code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet: compare the clocks of the server and of this node"
    if code == _EXPIRED:
        return "the server's certificate has expired, or the clock of this node is wrong"
    if code in _OTHER_NAMES:
        name = cluster.server_hostname
        return f"the server's certificate is not for {name}: give an address that is in it, or tls-server-name"
    return f"the server's certificate is refused: {error.verify_message}"
