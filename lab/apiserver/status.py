"""Failures in the form of the API: a Status object with code, reason, message and causes.

Every refusal of the server is an ApiError from this module, which contains all messages. Source: apimachinery's
api/errors and util/validation/field, checked against recordings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

Json = dict[str, Any]


class ApiError(Exception):
    """An answer other than success: `code` is the HTTP status, `body` the Status object to send."""

    def __init__(
        self, code: int, reason: str, message: str, details: Json | None = None, metadata: Json | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": metadata or {}, "status": "Failure"}
        self.body["message"] = message
        if reason:
            self.body["reason"] = reason
        if details:
            self.body["details"] = details
        self.body["code"] = code


def go_value(value: object) -> str:
    """Return a value as JSON, as Go's field errors print it."""
    return msgspec.json.encode(value).decode()


@dataclass(slots=True)
class FieldErrors:
    """Collects the errors of one object, with paths as in the API (spec.ports[0].port)."""

    causes: list[Json] = field(default_factory=list)

    def _add(self, reason: str, path: str, message: str) -> None:
        self.causes.append({"reason": reason, "message": message, "field": path})

    def invalid(self, path: str, value: object, detail: str) -> None:
        """The value has the right type, but is invalid."""
        self._add("FieldValueInvalid", path, f"Invalid value: {go_value(value)}: {detail}")

    def required(self, path: str, detail: str = "") -> None:
        """The value is missing."""
        self._add("FieldValueRequired", path, "Required value" + (f": {detail}" if detail else ""))

    def unsupported(self, path: str, value: object, allowed: tuple[str, ...]) -> None:
        """The value is not in an enumeration."""
        names = ", ".join(go_value(a) for a in sorted(allowed))
        self._add("FieldValueNotSupported", path, f"Unsupported value: {go_value(value)}: supported values: {names}")

    def duplicate(self, path: str, value: object) -> None:
        """The value is a duplicate."""
        self._add("FieldValueDuplicate", path, f"Duplicate value: {go_value(value)}")

    def forbidden(self, path: str, detail: str) -> None:
        """The field may not be set here."""
        self._add("FieldValueForbidden", path, f"Forbidden: {detail}")

    def too_many(self, path: str, count: int, most: int) -> None:
        """The list is too long."""
        self._add("FieldValueTooMany", path, f"Too many: {count}: must have at most {most} items")

    def raise_if_any(self, kind: str, group: str, name: str) -> None:
        """Raise ApiError 422 if there are errors."""
        if self.causes:
            raise invalid(kind, group, name, self.causes)


def invalid(kind: str, group: str, name: str, causes: list[Json]) -> ApiError:
    """422: the object breaks rules; one cause each."""
    full = f"{kind}.{group}" if group else kind
    texts = [f"{c['field']}: {c['message']}" for c in causes]
    text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details: Json = {"name": name, "kind": kind, "causes": causes}
    if group:
        details["group"] = group
    return ApiError(422, "Invalid", f'{full} "{name}" is invalid: {text}', details)


def _details(plural: str, group: str, name: str) -> Json:
    details = {"name": name, "kind": plural}
    if group:
        details["group"] = group
    return details


def _qualified(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural


def not_found(plural: str, group: str, name: str) -> ApiError:
    """404: no such object."""
    return ApiError(404, "NotFound", f'{_qualified(plural, group)} "{name}" not found', _details(plural, group, name))


def already_exists(plural: str, group: str, name: str) -> ApiError:
    """409: an object with this name exists."""
    message = f'{_qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(plural, group, name))


def conflict(plural: str, group: str, name: str, why: str = "") -> ApiError:
    """409: the write is based on an older version of the object."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {_qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(plural, group, name))


def apply_conflict(owned: list[tuple[str, str]]) -> ApiError:
    """409: an apply would change fields of other managers. `conflicts` are (manager, path), in order."""
    count = f"{len(owned)} conflict" + ("" if len(owned) == 1 else "s")
    if len(owned) == 1:
        text = f"conflict with {owned[0][0]}: {owned[0][1]}"
    else:
        managers = dict.fromkeys(manager for manager, _ in owned)
        lines = [[f"conflicts with {m}:", *(f"- {path}" for other, path in owned if other == m)] for m in managers]
        text = "\n".join(line for group in lines for line in group)
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {manager}", "field": path}
        for manager, path in owned
    ]
    return ApiError(409, "Conflict", f"Apply failed with {count}: {text}", {"causes": causes})


def bad_request(message: str) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, "BadRequest", message)


def method_not_allowed() -> ApiError:
    """405: the resource has no such verb."""
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_media_type(given: str, accepted: tuple[str, ...]) -> ApiError:
    """415: the server does not accept this format of a body, or not for this resource."""
    message = f"the body of the request was in an unknown format ({given}) - accepted media types include: "
    return ApiError(415, "UnsupportedMediaType", message + ", ".join(accepted))


def unknown_resource() -> ApiError:
    """404 for a resource or subresource that the group does not have."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def forbidden(user: str, verb: str, resource: str, group: str, namespace: str | None, name: str = "") -> ApiError:
    """403: the user may not do this to a resource ("nodes", "nodes/status")."""
    plural = resource.partition("/")[0]
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    what = _qualified(plural, group) + (f' "{name}"' if name else "")
    message = f'{what} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group "{group}" {where}'
    details = _details(plural, group, name)
    if not name:
        del details["name"]
    return ApiError(403, "Forbidden", message, details)


def unauthorized() -> ApiError:
    """401: no token, or an unknown token."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def too_old(asked: int, oldest: int) -> ApiError:
    """410 of a watch: the history does not contain the requested revision any more."""
    return ApiError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def list_expired(continue_token: str) -> ApiError:
    """410 of a paged list; with the token in the answer the client can continue, without a consistent view."""
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of "
        "the results. Continuing with the provided token results in an inconsistent list - objects that were "
        "created, modified, or deleted between the time the first chunk was returned and now may show up in the list."
    )
    return ApiError(410, "Expired", message, metadata={"continue": continue_token})


def too_large(asked: int, current: int) -> ApiError:
    """504: the requested version is in the future."""
    details: Json = {
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    }
    return ApiError(504, "Timeout", f"Timeout: Too large resource version: {asked}, current: {current}", details)
