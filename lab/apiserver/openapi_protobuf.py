"""OpenAPI version 2 in protobuf for kubectl: gnostic's openapi.v2.Document. Pure.

For each message a table maps the fields of the JSON form to their numbers (openapiv2/OpenAPIv2.proto of gnostic),
without fields that the lab's document lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lab.apiserver.status import Json

CONTENT_TYPE = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
"""The media type of client-go since Kubernetes 1.25; earlier releases use spec.v2@v1.0."""

Encode = Callable[[Any], bytes]


def document(openapi: Json) -> bytes:
    """Return the protobuf form of a version 2 document."""
    return _message(_DOCUMENT)(openapi)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    """Return a field of wire type 2 (strings and messages); no other wire type is needed."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _text(value: str) -> bytes:
    return value.encode()


def _wrapped(number: int, encode: Encode) -> Encode:
    """Return a message with one field, such as a choice of a oneof."""
    return lambda value: _field(number, encode(value))


def _each(encode: Encode) -> Encode:
    """Marks a field whose list is written item by item."""
    return _Repeated(encode)


class _Repeated:
    def __init__(self, encode: Encode) -> None:
        self.encode = encode

    def __call__(self, value: Any) -> bytes:
        return self.encode(value)


def _named(number: int, encode: Encode) -> Encode:
    """Return a map as a list of entries in field `number`: 1 is the name, 2 the value."""
    return lambda value: b"".join(
        _field(number, _field(1, key.encode()) + _field(2, encode(item))) for key, item in value.items()
    )


def _message(fields: dict[str, tuple[int, Encode]], extensions: int = 0) -> Encode:
    """Return a message, encoded with its table; fields that begin with x- become extensions in YAML (of which JSON is a
    part)."""

    def encode(value: Json) -> bytes:
        parts: list[bytes] = []
        for key, item in value.items():
            if key.startswith("x-"):
                yaml = _field(2, msgspec.json.encode(item))
                parts.append(_field(extensions, _field(1, key.encode()) + _field(2, yaml)))
            elif key in fields:
                number, encoder = fields[key]
                items = item if isinstance(encoder, _Repeated) else [item]
                parts += [_field(number, encoder(each)) for each in items]
        return b"".join(parts)

    return encode


_SCHEMA: dict[str, tuple[int, Encode]] = {
    "$ref": (1, _text),
    "format": (2, _text),
    "description": (4, _text),
}
_schema = _message(_SCHEMA, 31)
_SCHEMA |= {
    "additionalProperties": (21, _wrapped(1, _schema)),
    "type": (22, _wrapped(1, _text)),
    "items": (23, _wrapped(1, _schema)),
    "properties": (25, _named(1, _schema)),
}
_QUERY = _message({"in": (2, _text), "name": (4, _text), "type": (6, _text)})
_PARAMETER = _wrapped(1, _wrapped(2, _wrapped(3, _QUERY)))  # parameter, non-body parameter, query parameter
_RESPONSE = _message({"description": (1, _text), "schema": (2, _wrapped(1, _schema))})
_OPERATION = _message(
    {
        "produces": (6, _each(_text)),
        "consumes": (7, _each(_text)),
        "parameters": (8, _each(_PARAMETER)),
        "responses": (9, _named(1, _wrapped(1, _RESPONSE))),
    },
    13,
)
_METHODS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}
_PATH = _message({method: (number, _OPERATION) for method, number in _METHODS.items()})
_DOCUMENT: dict[str, tuple[int, Encode]] = {
    "swagger": (1, _text),
    "info": (2, _message({"title": (1, _text), "version": (2, _text)})),
    "paths": (8, _named(2, _PATH)),
    "definitions": (9, _named(1, _schema)),
}
