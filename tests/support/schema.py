"""Checks values against a JSON Schema, with the keywords that deploy/ needs; an unknown keyword is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "null": lambda v: v is None,
}


def errors(value: Any, schema: Any, root: dict[str, Any], path: str = "") -> list[str]:
    """Yield the mistakes in a value: 'path: mistake'."""
    found: list[str] = []
    for keyword, rule in schema.items() if isinstance(schema, dict) else ():
        if keyword == "title":
            continue
        check = _KEYWORDS[keyword]
        found += check(value, rule, schema, root, path)
    return found


def _one(wrong: bool, path: str, what: str) -> list[str]:
    return [f"{path or '.'}: {what}"] if wrong else []


def _type(value: Any, rule: Any, _schema: Any, _root: Any, path: str) -> list[str]:
    names = [rule] if isinstance(rule, str) else rule
    return _one(not any(_TYPES[name](value) for name in names), path, f"{value!r} is no {' or '.join(names)}")


def _children(value: Any, schema: Any) -> Iterator[tuple[str, Any, Any]]:
    properties = schema.get("properties", {})
    for name, child in value.items() if isinstance(value, dict) else ():
        yield name, child, properties.get(name, schema.get("additionalProperties", True))


def _object(value: Any, rule: Any, schema: Any, root: Any, path: str) -> list[str]:
    if rule is schema.get("additionalProperties") and "properties" in schema:
        return []  # The properties are checked.
    found = []
    for name, child, shape in _children(value, schema):
        found += [f"{path}.{name}: is not known"] if shape is False else errors(child, shape, root, f"{path}.{name}")
    return found


def _some(value: Any, rule: Any, root: Any) -> int:
    return sum(not errors(value, one, root) for one in rule)


def _items(value: Any, rule: Any, _schema: Any, root: Any, path: str) -> list[str]:
    rows = enumerate(value) if isinstance(value, list) else ()
    return [error for i, item in rows for error in errors(item, rule, root, f"{path}[{i}]")]


def _required(value: Any, rule: Any, _schema: Any, _root: Any, path: str) -> list[str]:
    missing = [name for name in rule if isinstance(value, dict) and name not in value]
    return _one(bool(missing), path, f"lacks {', '.join(missing)}")


def _pattern(value: Any, rule: Any, _schema: Any, _root: Any, path: str) -> list[str]:
    return _one(isinstance(value, str) and not re.search(rule, value), path, f"{value!r} does not match {rule}")


_KEYWORDS: dict[str, Callable[[Any, Any, Any, Any, str], list[str]]] = {
    "type": _type,
    "properties": _object,
    "additionalProperties": _object,
    "items": _items,
    "required": _required,
    "pattern": _pattern,
    "enum": lambda v, rule, s, r, path: _one(v not in rule, path, f"{v!r} is none of {rule}"),
    "oneOf": lambda v, rule, s, root, path: _one(_some(v, rule, root) != 1, path, "is not one of what it may be"),
    "$ref": lambda v, rule, s, root, path: errors(v, root["definitions"][rule.rpartition("/")[2]], root, path),
}
