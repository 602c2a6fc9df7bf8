"""What an API server says when it says no: the Status object, and one error type for each reaction to it.

Every error is a SourceError, so that whoever does not care catches that one. Nothing here opens a connection.
"""

# ruff: noqa: N818 - the names are the API's words for what is the case

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from kubeproxy.errors import SourceError

_LONGEST = 1000
"""Characters of a Status's message that are passed on; it stands in logs, in readiness and in events."""

_LONGEST_WAIT = 120.0
"""Seconds that a server may have us wait."""

_SNIPPET = 200
"""Characters of an answer that is no Status which are quoted in the message."""


class Cause(Struct, frozen=True):
    """One entry of a Status's details.causes."""

    reason: str = ""


class Details(Struct, frozen=True, rename="camel"):
    """A Status's details."""

    causes: list[Cause] | None = None
    retry_after_seconds: float | None = None


class Status(Struct, frozen=True):
    """meta/v1 Status, to the fields that decide what is done next."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: Details | None = field(default=None)


class ConnectionFailed(SourceError):
    """No answer, or only a part of one: nothing listens, the name is unknown, TLS failed, the connection died."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class MalformedAnswer(SourceError):
    """The server answered something that is neither HTTP nor JSON of the API."""


class NoInitialEnd(SourceError):
    """A WatchList went quiet, or ended, without the bookmark that completes it."""


class OutOfStep(SourceError):
    """The watch cannot be believed to say what changes: only a new list shows what is there."""


class StatusError(SourceError):
    """The server answered with a Status of failure (HTTP status, or an ERROR event of a watch)."""

    def __init__(self, status: Status, *, retry_after: float | None = None) -> None:
        text = (status.message or status.reason or "no message")[:_LONGEST]
        super().__init__(f"{text} (code {status.code})")
        self.status = status
        self.code = status.code
        self.retry_after = retry_after


class BadRequest(StatusError):
    """400 or 422: the server does not know or does not allow what was asked."""


class Unauthorized(StatusError):
    """401: the credentials are missing, wrong or have expired."""


class Forbidden(StatusError):
    """403: the credentials are known and lack a permission."""


class NotFound(StatusError):
    """404: no such object, or no such resource on this server."""


class Conflict(StatusError):
    """409: the object exists already, or changed meanwhile."""


class Gone(StatusError):
    """410: the resource version or continue token has expired; list again."""


class VersionTooLarge(StatusError):
    """504 with the cause ResourceVersionTooLarge: the server is behind the version that was asked for."""


class TooManyRequests(StatusError):
    """429: slow down, usually with Retry-After."""


_BY_CODE: dict[int, type[StatusError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: BadRequest,
    429: TooManyRequests,
}

_decoder = msgspec.json.Decoder(Status)


def decode_status(data: bytes | bytearray | memoryview | msgspec.Raw, code: int) -> Status:
    """Decode a Status; where `data` is none, make one of `code` (0 when unknown) that quotes its beginning."""
    try:
        status = _decoder.decode(data)
    except (ValueError, RecursionError):
        text = bytes(data).decode("utf-8", "replace").strip()
        return Status(code=code, message=text[:_SNIPPET])
    return status if status.code or not code else msgspec.structs.replace(status, code=code)


def status_error(status: Status, *, retry_after: float | None = None) -> StatusError:
    """Return the error of `status`; `retry_after` in seconds is the Retry-After header's, else the Status's own."""
    details = status.details
    if retry_after is None and details is not None:
        retry_after = details.retry_after_seconds
    kind = _BY_CODE.get(status.code, StatusError)
    if _version_too_large(status):
        kind = VersionTooLarge
    elif kind is StatusError and status.reason in {"Expired", "Gone"}:
        kind = Gone
    return kind(status, retry_after=retry_after)


def waiting_wished(error: SourceError) -> float:
    """Return for how many seconds the server wishes not to be asked again, 0.0 when it did not say."""
    wished = error.retry_after if isinstance(error, StatusError) else None
    return min(wished or 0.0, _LONGEST_WAIT)


def _version_too_large(status: Status) -> bool:
    causes = (status.details.causes if status.details else None) or []
    return any(cause.reason == "ResourceVersionTooLarge" for cause in causes)
