"""The three patch formats: JSON patch (RFC 6902), JSON merge patch (RFC 7386), strategic merge patch. Pure.

Of strategic merge patches it supports the parts that kubectl uses: lists of objects merge by the schema's key, and the
directives $patch, $setElementOrder, $deleteFromPrimitiveList and $retainKeys are obeyed.
"""

from __future__ import annotations

import copy
from typing import Any

from lab.apiserver.fieldtypes import ListOf, Struct, Type
from lab.apiserver.schema import KINDS
from lab.apiserver.status import ApiError, Json, bad_request

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""The format of an apply, which this module does not implement, because the result depends on the owners of fields
(managers.py)."""
FORMATS = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH)


def apply_patch(kind: tuple[str, str], current: Json, patch: Any, content_type: str) -> Json:
    """A patched copy of `current` (of `kind`, (apiVersion, kind)); raises ApiError for a patch that does not fit."""
    if content_type == JSON_PATCH:
        if not isinstance(patch, list):
            raise bad_request("a JSON patch is a list of operations")
        result = copy.deepcopy(current)
        for operation in patch:
            result = _operate(result, operation)
    elif isinstance(patch, dict):
        strategic = content_type == STRATEGIC_PATCH
        result = _merge_struct(current, patch, KINDS[kind]) if strategic else merge(current, patch)
    else:
        raise bad_request("a merge patch is a JSON object")
    if not isinstance(result, dict):
        raise bad_request("the patch leaves no object")
    return result


def merge(current: Any, patch: Any) -> Any:
    """RFC 7386: null removes a member, objects merge, other values are replaced."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(current) if isinstance(current, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def _fields(type_: Type | None) -> dict[str, Type]:
    return type_.fields if isinstance(type_, Struct) else {}


def _merge_struct(current: Any, patch: Json, type_: Type | None) -> Json:
    patch = dict(patch)
    directive = patch.pop("$patch", None)
    if directive == "delete":
        return {}
    if directive == "replace":
        return copy.deepcopy(patch)
    result: Json = dict(current) if isinstance(current, dict) else {}
    retained = patch.pop("$retainKeys", None)
    if retained is not None:
        result = {k: v for k, v in result.items() if k in retained}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            target = name.partition("/")[2]
            result[target] = [v for v in result.get(target) or [] if v not in value]
        elif name.startswith("$setElementOrder/"):
            continue
        elif value is None:
            result.pop(name, None)
        else:
            order = patch.get(f"$setElementOrder/{name}")
            result[name] = _merge_value(result.get(name), value, _fields(type_).get(name), order)
    return result


def _merge_value(current: Any, patch: Any, type_: Type | None, order: list[Any] | None) -> Any:
    if isinstance(patch, dict):
        return _merge_struct(current, patch, type_)
    if isinstance(patch, list) and isinstance(type_, ListOf) and type_.merge_key:
        return _merge_list(current or [], patch, type_, order)
    if isinstance(patch, list) and isinstance(type_, ListOf) and type_.is_set:
        return list(dict.fromkeys([*(current or ()), *patch]))
    return copy.deepcopy(patch)


def _find(items: list[Json], key: str, wanted: Json) -> int | None:
    found = [i for i, item in enumerate(items) if item.get(key) == wanted.get(key)]
    # Upstream merges ports with the same number and different protocols into one port; here they stay separate.
    exact = [i for i in found if items[i].get("protocol") == wanted.get("protocol", "TCP")]
    return next(iter(exact or found), None)


def _merge_list(current: list[Json], patch: list[Json], type_: ListOf, order: list[Any] | None) -> list[Json]:
    key = type_.merge_key
    result = list(current)
    replaced = [p for p in patch if not (p.keys() == {"$patch"} and p["$patch"] == "replace")]
    if len(replaced) != len(patch):
        return [copy.deepcopy(p) for p in replaced]
    for item in patch:
        at = _find(result, key, item)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(_merge_struct({}, item, type_.item))
        else:
            result[at] = _merge_struct(result[at], item, type_.item)
    if order:
        positions = {str(o.get(key)): i for i, o in reversed(list(enumerate(order))) if isinstance(o, dict)}
        result.sort(key=lambda item: positions.get(str(item.get(key)), len(positions)))
    return result


def _refuse(operation: Any, why: str) -> ApiError:
    return ApiError(
        422, "Invalid", f"the server rejected our request due to an error in our request: {operation}: {why}"
    )


def _parts(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise bad_request(f"a JSON pointer starts with a slash: {pointer}")
    return [p.replace("~1", "/").replace("~0", "~") for p in pointer.split("/")[1:]]


def _index(part: str, last: int) -> int:
    at = last if part == "-" else int(part)
    if not 0 <= at <= last:
        raise IndexError(part)
    return at


def _get(document: Any, parts: list[str]) -> Any:
    for part in parts:
        document = document[_index(part, len(document) - 1)] if isinstance(document, list) else document[part]
    return document


def _add(document: Any, parts: list[str], value: Any) -> Any:
    if not parts:
        return value
    parent, last = _get(document, parts[:-1]), parts[-1]
    if isinstance(parent, list):
        parent.insert(_index(last, len(parent)), value)
    else:
        parent[last] = value
    return document


def _remove(document: Any, parts: list[str]) -> Any:
    parent, last = _get(document, parts[:-1]), parts[-1]
    if isinstance(parent, list):
        return parent.pop(_index(last, len(parent) - 1))
    return parent.pop(last)


def _operate(document: Any, operation: Any) -> Any:
    try:
        name, parts = operation["op"], _parts(operation["path"])
        if name == "test":
            if _get(document, parts) != operation["value"]:
                raise _refuse(operation, "the value is another")
        elif name == "remove":
            _remove(document, parts)
        elif name == "replace":
            if parts:
                _remove(document, parts)
            document = _add(document, parts, copy.deepcopy(operation["value"]))
        elif name == "add":
            document = _add(document, parts, copy.deepcopy(operation["value"]))
        elif name == "move":
            document = _add(document, parts, _remove(document, _parts(operation["from"])))
        elif name == "copy":
            document = _add(document, parts, copy.deepcopy(_get(document, _parts(operation["from"]))))
        else:
            raise _refuse(operation, "no such operation")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
        raise _refuse(operation, "the path leads nowhere") from e
    return document
