"""When certificates expire, read from PEM: Python's ssl checks that, and does not say it of certificates of our own.

No more of X.509 than that (RFC 5280, 4.1): whether a certificate is any good is OpenSSL's business.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----([^-]+)-----END CERTIFICATE-----")
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_BEFORE_VALIDITY: Final = 3  # serialNumber, signature, issuer


class _Element(NamedTuple):
    """One element of DER: its tag, and where its content is."""

    tag: int
    start: int
    end: int


class Validity(NamedTuple):
    """From when and until when a certificate is good, in seconds since the epoch."""

    begins: float
    ends: float


def validities(pem: bytes) -> list[Validity]:
    """Return for when each certificate is good, in their order, but what cannot be read."""
    found = []
    for block in _PEM.findall(pem):
        try:
            found.append(_validity(b64decode(block)))
        except (ValueError, IndexError, OverflowError):
            continue
    return found


def _validity(der: bytes) -> Validity:
    certificate = _element(der, 0)
    body = _element(der, certificate.start)
    fields = [field for field in _elements(der, body) if field.tag != _VERSION]
    first, last = _elements(der, fields[_BEFORE_VALIDITY])
    return Validity(_time(der, first), _time(der, last))


def _time(der: bytes, element: _Element) -> float:
    text = der[element.start : element.end].decode("ascii").removesuffix("Z")
    if element.tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    month, day, hour, minute, second = (int(text[at : at + 2]) for at in range(4, 14, 2))
    return datetime(int(text[:4]), month, day, hour, minute, second, tzinfo=UTC).timestamp()


def _elements(der: bytes, parent: _Element) -> Iterator[_Element]:
    at = parent.start
    while at < parent.end:
        element = _element(der, at)
        at = element.end
        yield element


def _element(der: bytes, at: int) -> _Element:
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:  # the length of the length
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    if start + length > len(der):
        raise ValueError("cut short")
    return _Element(tag, start, start + length)
