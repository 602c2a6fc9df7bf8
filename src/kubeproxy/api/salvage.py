"""Lenient decoding of an object that failed strict decoding: keeps the valid parts and reports the invalid parts. Pure.
Lenient decoding is slower than strict decoding (decode.py). Only JSON types are checked; ports, addresses and other
values are not validated."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from msgspec import NODEFAULT, UNSET, Raw, Struct, ValidationError, defstruct
from msgspec.json import Decoder
from msgspec.structs import fields

from kubeproxy.model import objects
from kubeproxy.model.plan import Problem

DEPTH = 64  # maximum nesting depth that is read; no used field is nested deeper than 8

_OPTIONAL: frozenset[tuple[type, str]] = frozenset(
    {
        *((objects.ObjectMeta, name) for name in ("labels", "annotations", "uid", "resource_version")),
        *((objects.ObjectMeta, name) for name in ("creation_timestamp", "deletion_timestamp")),
        (objects.Service, "status"),
        (objects.Node, "status"),
        (objects.SliceEndpoint, "hints"),
        (objects.SliceEndpoint, "zone"),
        *((objects.Labels, info.name) for info in fields(objects.Labels)),
        *((objects.Annotations, info.name) for info in fields(objects.Annotations)),
    }
)
"""Fields that are dropped if they are invalid, while the other fields of the object are kept."""

_WHOLE_LISTS: frozenset[tuple[type, str]] = frozenset({(objects.ServiceSpec, "load_balancer_source_ranges")})
"""Lists that must not lose an entry: if source ranges were lost, a load balancer would be open to all clients."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_JSON_NAMES = {"str": "string", "int": "integer", "bool": "boolean"}
FAILURES = (ValueError, RecursionError)  # the errors that a decoder raises for unreadable bytes
_UNREADABLE = (*FAILURES, TypeError)  # TypeError: the piece is UNSET


class Salvaged(NamedTuple):
    """The object (None if unusable), the readable parts of its name, and all problems."""

    object: objects.Object | None
    namespace: str
    name: str
    uid: str
    version: str
    problems: list[Problem]


class _Wrong(Exception):  # noqa: N818 - private to this module
    def __init__(self, path: str, reason: str | Exception) -> None:
        super().__init__(path, reason)
        self.problem = Problem(path.removeprefix("."), reason if isinstance(reason, str) else _words(reason))


def salvage(data: bytes, kind: type[objects.Object]) -> Salvaged:
    """Read `data`, one JSON value of any shape, as a `kind`; never raises."""
    data = mended(data)
    identity = _identity(data, kind)
    problems: list[Problem] = []
    try:
        found = _build(Raw(data), kind, "", problems)
        if not identity[1]:
            raise _Wrong(".metadata.name", "must not be empty")
    except _Wrong as wrong:
        return Salvaged(None, *identity, [wrong.problem, *problems])
    return Salvaged(found, *identity, problems)


def mended(data: bytes) -> bytes:
    """Return `data` in a form that parsers accept: with limited nesting (see shallow), and without lone surrogates,
    which become U+FFFD as in the API server's decoder."""
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["lone"] else match[0], shallow(data))


def shallow(data: bytes, depth: int = DEPTH) -> bytes:
    """Return `data` with null in place of arrays and objects nested deeper than `depth`, for recursive parsers."""
    kept: list[bytes] = []
    level = start = 0
    for match in _TOKEN.finditer(data):
        token = data[match.start()]
        if token in b"[{":
            level += 1
            if level == depth + 1:
                kept += (data[start : match.start()], b"null")
        elif token in b"]}":
            if level == depth + 1:
                start = match.end()
            level -= 1
    if level > depth or not kept:
        return data
    kept.append(data[start:])
    return b"".join(kept)


def _identity(data: bytes, kind: type[objects.Object]) -> tuple[str, str, str, str]:
    try:
        found = _pieces(objects.ObjectMeta).decode(_pieces(kind).decode(data).metadata)
    except _UNREADABLE:
        return "", "", "", ""
    return _text(found.namespace), _text(found.name), _text(found.uid), _text(found.resource_version)


def _text(raw: Any) -> str:
    try:
        text: str = _decoder(str).decode(raw)
    except _UNREADABLE:
        return ""
    return text


def _build(raw: Raw, kind: Any, path: str, problems: list[Problem]) -> Any:
    """Return `raw` as a `kind`. Raises _Wrong with the path of the innermost invalid value."""
    try:
        return _decoder(kind).decode(raw)
    except FAILURES as error:
        if get_origin(kind) in {UnionType, Union}:
            kind = next(member for member in get_args(kind) if member is not NoneType)
        try:
            if get_origin(kind) is list:
                return _build_list(_decoder(list[Raw]).decode(raw), get_args(kind)[0], path, problems)
            if isinstance(kind, type) and issubclass(kind, Struct):
                return _build_struct(_pieces(kind).decode(raw), kind, path, problems)
        except FAILURES as inner:
            raise _Wrong(path, inner) from None
        raise _Wrong(path, error) from None


def _build_struct(pieces: Any, kind: type[Struct], path: str, problems: list[Problem]) -> Struct:
    known: dict[str, Any] = {}
    for info in _fields(kind):
        where = f"{path}.{info.encode_name}" if "/" not in info.encode_name else f"{path}[{info.encode_name}]"
        piece = getattr(pieces, info.name)
        if piece is UNSET:
            if info.default is NODEFAULT and info.default_factory is NODEFAULT:
                raise _Wrong(where, "is missing")
            continue
        seen = len(problems)
        try:
            known[info.name] = _build(piece, info.type, where, problems)
            if len(problems) > seen and (kind, info.name) in _WHOLE_LISTS:
                first = problems[seen]
                del problems[seen:]
                raise _Wrong(first.field, first.reason)
        except _Wrong as wrong:
            if (kind, info.name) not in _OPTIONAL:
                raise
            problems.append(wrong.problem)
    return kind(**known)


def _build_list(items: list[Raw], kind: Any, path: str, problems: list[Problem]) -> list[Any]:
    kept = []
    for index, item in enumerate(items):
        try:
            kept.append(_build(item, kind, f"{path}[{index}]", problems))
        except _Wrong as wrong:
            problems.append(wrong.problem)
    return kept


_fields = cache(fields)
_decoder: Callable[[Any], Decoder[Any]] = cache(Decoder)


@cache
def _pieces(kind: type[Struct]) -> Decoder[Any]:
    names = {info.name: info.encode_name for info in _fields(kind)}
    return Decoder(defstruct(f"Raw{kind.__name__}", [(name, Raw, UNSET) for name in names], rename=names))


def _words(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "is not valid UTF-8 text"
    if not isinstance(error, ValidationError):
        return f"not JSON: {error}"
    text = re.sub(r"\b(?:str|int|bool)\b", lambda match: _JSON_NAMES[match[0]], str(error).replace("`", ""))
    return text[:1].lower() + text[1:]
