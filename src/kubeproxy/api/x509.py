"""Periods of validity of certificates and tokens, which Python's ssl checks but does not return for its own ones."""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64decode
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----([^-]+)-----END CERTIFICATE-----")
# A Validity (RFC 5280, 4.1.2.5) in DER: a sequence of two times, UTCTime (0x17) or GeneralizedTime (0x18). Only numbers
# and the issuer's name precede it; an issuer with such bytes in its name would only mislead about its own certificates.
_TIME: Final = rb"(?:\x17\x0d|\x18\x0f)(\d{12}(?:\d\d)?)Z"
_VALIDITY: Final = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)


class Validity(NamedTuple):
    """The first and the last second of validity, since the epoch."""

    begins: float
    ends: float


class _Claims(msgspec.Struct):
    exp: float
    iat: float = 0.0


def validities(pem: bytes) -> list[Validity]:
    """Return the validity of each certificate, in their order, without those that cannot be read."""
    found = []
    for block in _PEM.findall(pem):
        try:
            if match := _VALIDITY.search(b64decode(block)):
                found.append(Validity(_seconds(match[1]), _seconds(match[2])))
        except (ValueError, OverflowError):
            continue
    return found


def token_validity(token: str) -> Validity | None:
    """Return the validity of a JSON Web Token (RFC 7519, 4.1); None for one that has none, or is of another kind."""
    parts = token.strip().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)), type=_Claims)
    except ValueError:
        return None
    return Validity(claims.iat, claims.exp)


def _seconds(digits: bytes) -> float:
    text = digits.decode()
    if len(text) == 12:  # UTCTime: two digits of the year
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()
