"""The second, lenient look at an object that did not decode: what is right is kept, what is wrong is named.

Pure: JSON text in, an object and a list of problems out. Slow compared to the first look (decode.py), and run
only for objects that failed it. Ports, addresses and other meanings are not judged here, only JSON types.
"""

from __future__ import annotations

import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo, fields

from kubeproxy.model.objects import (
    Annotations,
    Labels,
    Node,
    Object,
    ObjectMeta,
    PlacedEndpoint,
    Service,
    ServiceSpec,
    SliceEndpoint,
)
from kubeproxy.model.plan import Problem

DEPTH = 64
"""Deepest nesting that is looked at; no field that is used lies deeper than 8."""

_INT32 = range(-(2**31), 2**31)

_OPTIONAL: frozenset[tuple[type, str]] = frozenset(
    {
        (ObjectMeta, "labels"),
        (ObjectMeta, "annotations"),
        (ObjectMeta, "uid"),
        (ObjectMeta, "resource_version"),
        (ObjectMeta, "creation_timestamp"),
        (ObjectMeta, "deletion_timestamp"),
        (Service, "status"),
        (Node, "status"),
        (SliceEndpoint, "hints"),
        (PlacedEndpoint, "hints"),
        (PlacedEndpoint, "zone"),
        *((Labels, info.name) for info in fields(Labels)),
        *((Annotations, info.name) for info in fields(Annotations)),
    }
)
"""Fields without which the object still means what its author meant, or less: left out when they are wrong."""

_WHOLE_LISTS: frozenset[tuple[type, str]] = frozenset({(ServiceSpec, "load_balancer_source_ranges")})
"""Lists that must not lose an entry: without its ranges a load balancer would be open to all."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class Salvaged(NamedTuple):
    """The result: the object (None when it cannot be used), who it is as far as known, and all problems."""

    object: Object | None
    namespace: str
    name: str
    uid: str
    version: str
    problems: list[Problem]


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.problem = Problem(path.removeprefix("."), reason)


def salvage(data: bytes, kind: type[Object]) -> Salvaged:
    """Read `data`, one JSON value of any shape, as a `kind`; never raises."""
    try:
        value = json.loads(
            mended(data).decode("utf-8", "surrogateescape"), parse_int=_parse_int, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        return Salvaged(None, "", "", "", "", [Problem("", f"not JSON: {error}")])
    identity = _identity(value)
    problems: list[Problem] = []
    try:
        found = _build(value, kind, "", problems)
        if not identity[1]:
            raise _Wrong(".metadata.name", "must not be empty")
    except _Wrong as wrong:
        return Salvaged(None, *identity, [wrong.problem, *problems])
    return Salvaged(found, *identity, problems)


def mended(data: bytes) -> bytes:
    """Return `data` without what stops a parser at once: absurd nesting (see shallow) and halves of surrogate pairs.

    Such a half becomes U+FFFD, as in the API server's own decoder.
    """
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["lone"] else match[0], shallow(data))


def shallow(data: bytes, depth: int = DEPTH) -> bytes:
    """Return `data` with every array and object nested deeper than `depth` replaced by null.

    Parsers recurse, so one absurdly nested value would cost its neighbours too.
    """
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


def _identity(value: object) -> tuple[str, str, str, str]:
    metadata = value.get("metadata") if isinstance(value, dict) else None
    if not isinstance(metadata, dict):
        return "", "", "", ""
    found = [metadata.get(key) for key in ("namespace", "name", "uid", "resourceVersion")]
    namespace, name, uid, version = (_text_or_empty(text) for text in found)
    return namespace, name, uid, version


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) and _is_text(value) else ""


def _build(value: Any, kind: Any, path: str, problems: list[Problem]) -> Any:
    """Return `value` as a `kind`, or raise _Wrong with the path of the innermost wrong value."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _build(value, get_args(kind)[0], path, problems)
    if origin in {UnionType, Union}:
        if value is None:
            return None
        kind = next(member for member in get_args(kind) if member is not NoneType)
        return _build(value, kind, path, problems)
    if origin is list:
        if not isinstance(value, list):
            raise _Wrong(path, f"expected an array, got {_name(value)}")
        return _build_list(value, get_args(kind)[0], path, problems)
    if issubclass(kind, Struct):
        if not isinstance(value, dict):
            raise _Wrong(path, f"expected an object, got {_name(value)}")
        return _build_struct(value, kind, path, problems)
    return _scalar(value, kind, path)


def _build_struct(value: dict[str, Any], kind: type[Struct], path: str, problems: list[Problem]) -> Struct:
    known: dict[str, Any] = {}
    for info in _fields(kind):
        where = f"{path}.{info.encode_name}" if "/" not in info.encode_name else f"{path}[{info.encode_name}]"
        if info.encode_name not in value:
            if info.default is NODEFAULT and info.default_factory is NODEFAULT:
                raise _Wrong(where, "is missing")
            continue
        seen = len(problems)
        try:
            known[info.name] = _build(value[info.encode_name], info.type, where, problems)
            if len(problems) > seen and (kind, info.name) in _WHOLE_LISTS:
                _reject_list(problems, seen)
        except _Wrong as wrong:
            if not _may_drop(kind, info):
                raise
            problems.append(wrong.problem)
    return kind(**known)


def _build_list(value: list[Any], kind: Any, path: str, problems: list[Problem]) -> list[Any]:
    kept = []
    for index, entry in enumerate(value):
        try:
            kept.append(_build(entry, kind, f"{path}[{index}]", problems))
        except _Wrong as wrong:
            problems.append(wrong.problem)
    return kept


def _reject_list(problems: list[Problem], seen: int) -> None:
    first = problems[seen]
    del problems[seen:]
    raise _Wrong(first.field, first.reason)


@cache
def _fields(kind: type[Struct]) -> tuple[FieldInfo, ...]:
    return fields(kind)


def _may_drop(kind: type[Struct], info: FieldInfo) -> bool:
    return (kind, info.name) in _OPTIONAL


def _scalar(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _Wrong(path, f"expected {_JSON_NAMES[kind]}, got {_name(value)}")
    if kind is int and value not in _INT32:
        raise _Wrong(path, "out of range for a 32-bit integer")
    if isinstance(value, str) and not _is_text(value):
        raise _Wrong(path, "is not valid UTF-8 text")
    return value


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_JSON_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "a boolean",
    float: "a float",
    list: "an array",
    dict: "an object",
    NoneType: "null",
}


def _name(value: object) -> str:
    return _JSON_NAMES.get(type(value), "something else")


def _parse_int(digits: str) -> int:
    # Python refuses to convert thousands of digits; any number beyond int32 is as wrong as any other.
    return int(digits) if len(digits) < 20 else 2**63


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")
