"""Adapts bodies of requests to the schema: wrong types are refused, unknown fields are dropped and reported. Pure.

Source: Go's encoding/json errors as a real API server words them; KEP-2885 (server-side field validation).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import yaml

from lab.apiserver.fieldtypes import ListOf, MapOf, Scalar, Struct, Type
from lab.apiserver.schema import KINDS
from lab.apiserver.status import ApiError, Json, bad_request


class FieldValidation(enum.Enum):
    """The treatment of unknown fields."""

    IGNORE = "Ignore"
    WARN = "Warn"
    STRICT = "Strict"


def json_type(value: object) -> str:
    """Return the JSON type of a decoded value, as Go names it."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class _Walk:
    def __init__(self) -> None:
        self.unknown: list[str] = []

    def struct(self, value: Any, struct: Struct, path: str) -> None:
        for name in list(value):
            field = struct.fields.get(name)
            where = f"{path}.{name}" if path else name
            if field is None:
                if not struct.is_open:
                    self.unknown.append(where)
                    del value[name]
            elif value[name] is not None:
                self.check(value[name], field, where, struct.go.rpartition(".")[2], where)

    def check(self, value: Any, type_: Type, path: str, owner: str, go_path: str) -> None:
        got = json_type(value)
        if isinstance(type_, Scalar):
            fits = got in type_.json and not (type_.go in {"int32", "int64"} and isinstance(value, float))
        elif isinstance(type_, ListOf):
            fits = got == "array"
        else:
            fits = got == "object"
        if not fits:
            said = f"number {value}" if isinstance(value, float) else got
            raise bad_request(
                f"json: cannot unmarshal {said} into Go struct field {owner}.{go_path} of type {type_.go}"
            )
        if isinstance(type_, ListOf):
            for i, item in enumerate(value):
                if item is not None:
                    self.check(item, type_.item, f"{path}[{i}]", owner, go_path)
        elif isinstance(type_, MapOf):
            for key, item in value.items():
                if item is not None:
                    self.check(item, type_.item, f"{path}.{key}", owner, go_path)
        elif isinstance(type_, Struct):
            self.struct(value, type_, path)


def decode_body(raw: bytes, kind: str) -> Json:
    """Return the JSON object in a request's body; raises ApiError 400 with the message of the real server."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as e:
        text = "unexpected end of JSON input" if "truncated" in str(e) else str(e)
        shown = raw[:200].decode(errors="replace")
        why = f"couldn't get version/kind; json parse error: {text} ({shown})"
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {why}") from e
    if not isinstance(value, dict):
        why = f"couldn't get version/kind; json parse error: cannot unmarshal {json_type(value)} into Go value"
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {why}")
    return value


class _Yaml(yaml.SafeLoader):
    """Loads YAML like Kubernetes: a value that looks like a time is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in the base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def decode_yaml(raw: bytes, kind: str) -> Json:
    """Return the object in a body of YAML (or JSON, which is YAML); raises ApiError 400."""
    try:
        value = yaml.load(raw, _Yaml)  # noqa: S506 - Loader is a safe loader
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise bad_request(f"error decoding YAML: {e}") from e
    if not isinstance(value, dict):
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): it is no object")
    for name in ("apiVersion", "kind"):
        if not value.get(name):
            raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {name} is missing")
    return value


def conform(obj: Json, api_version: str, kind: str, mode: FieldValidation) -> list[str]:
    """Drop unknown fields of `obj` in place and return warnings about them.

    Raises ApiError 400 for an unexpected kind, a wrong type, or (strict) an unknown field.
    """
    for name, expected in (("kind", kind), ("apiVersion", api_version)):
        given = obj.get(name)
        if given not in {None, "", expected}:
            raise bad_request(
                f"{given!s} in {name} does not match the expected {expected}: send {kind} of {api_version} here"
            )
    walk = _Walk()
    version = api_version.rpartition("/")[2]
    try:
        walk.struct(obj, KINDS[api_version, kind], "")
    except ApiError as e:
        raise bad_request(f'{kind} in version "{version}" cannot be handled as a {kind}: {e}') from e
    problems = [f'unknown field "{path}"' for path in walk.unknown]
    if problems and mode is FieldValidation.STRICT:
        text = ", ".join(problems)
        raise bad_request(f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {text}')
    return problems if mode is FieldValidation.WARN else []
