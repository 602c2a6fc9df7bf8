"""Parses and validates the query of a list or watch. Pure. Source: metav1.ListOptions and the recordings."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lab.apiserver.resources import Resource
from lab.apiserver.selection import EVERYTHING, Selector, parse_fields, parse_labels
from lab.apiserver.status import ApiError, bad_request, go_value
from lab.apiserver.store import Record


@dataclass(frozen=True, slots=True)
class ListOptions:
    """The options of a list or watch. `revision` is None if the query has none."""

    labels: Selector = EVERYTHING
    fields: Selector = EVERYTHING
    revision: int | None = None
    match: str = ""
    limit: int = 0
    token: str = ""
    watch: bool = False
    bookmarks: bool = False
    initial_events: bool | None = None
    timeout: float | None = None

    @property
    def selective(self) -> bool:
        """Return whether a selector is given."""
        return bool(self.labels.predicates or self.fields.predicates)

    def selects(self, record: Record) -> bool:
        """Return whether the object matches the options."""
        return self.labels.matches(record.labels) and self.fields.matches(record.fields)


def _bad_revision(text: str) -> str:
    parse = f"strconv.ParseUint: parsing {go_value(text)}: invalid syntax"
    return f"resourceVersion: Invalid value: {go_value(text)}: {parse}"


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise bad_request(f"strconv.ParseInt: parsing {go_value(text)}: invalid syntax (query parameter {name})")
    return int(text)


def _flag(query: Mapping[str, str], name: str) -> bool | None:
    text = query.get(name)
    if text is None:
        return None
    return text.lower() not in {"0", "false", "f"}


def verb_of(method: str, query: Mapping[str, str], name: str) -> str:
    """Return the verb of a request, as named in RBAC rules; `name` is the name of the object, '' for none."""
    if method in {"GET", "HEAD"}:
        if name:
            return "get"
        return "watch" if _flag(query, "watch") else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


def parse_options(query: Mapping[str, str], resource: Resource) -> ListOptions:
    """Parse a query; raises ApiError 400 (500 for the resourceVersion of a watch, as recorded)."""
    watch = bool(_flag(query, "watch"))
    text = query.get("resourceVersion", "")
    if text and not re.fullmatch(r"\d{1,19}", text):
        if watch:
            raise ApiError(500, "", _bad_revision(text))
        raise bad_request(f"invalid resource version: {_bad_revision(text)}")
    match = query.get("resourceVersionMatch", "")
    initial = _flag(query, "sendInitialEvents")
    bookmarks = bool(_flag(query, "allowWatchBookmarks"))
    kind = f"{resource.api_version}, Kind={resource.kind}" if resource.group else f"/v1, Kind={resource.kind}"
    options = ListOptions(
        labels=parse_labels(query["labelSelector"]) if query.get("labelSelector") else EVERYTHING,
        fields=parse_fields(query["fieldSelector"], resource.all_fields, kind)
        if query.get("fieldSelector")
        else EVERYTHING,
        revision=int(text) if text else None,
        match=match,
        limit=_number(query, "limit"),
        token=query.get("continue", ""),
        watch=watch,
        bookmarks=bookmarks,
        initial_events=initial,
        timeout=_number(query, "timeoutSeconds") or None,
    )
    _check(options)
    return options


def _check(options: ListOptions) -> None:
    def refuse(field: str, why: str) -> ApiError:
        message = f'ListOptions.meta.k8s.io "" is invalid: {field}: {why}'
        return ApiError(422, "Invalid", message)

    if options.match not in {"", "Exact", "NotOlderThan"}:
        raise refuse("resourceVersionMatch", f"Unsupported value: {go_value(options.match)}")
    if options.watch:
        if options.match and options.initial_events is None:
            raise refuse("resourceVersionMatch", "Forbidden: resourceVersionMatch is forbidden for watch unless "
                         "sendInitialEvents is provided")  # fmt: skip
        if options.initial_events is not None and options.match != "NotOlderThan":
            raise refuse("resourceVersionMatch", "Forbidden: sendInitialEvents requires setting resourceVersionMatch "
                         "to NotOlderThan")  # fmt: skip
        return
    if options.initial_events is not None:
        raise refuse("sendInitialEvents", "Forbidden: sendInitialEvents is forbidden for list")
    if options.match and options.revision is None:
        raise refuse("resourceVersionMatch", "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is "
                     "provided")  # fmt: skip
    if options.match == "Exact" and options.revision == 0:
        raise refuse("resourceVersionMatch", 'Forbidden: resourceVersionMatch "exact" is forbidden for '
                     'resourceVersion "0"')  # fmt: skip
    if options.token and options.revision:
        raise bad_request("specifying resource version is not allowed when using continue")


def continue_token(revision: int, after: str) -> str:
    """Return the token for the page after the object at path `after` ("/namespace/name"); -1 stands for any
    revision."""
    raw = msgspec.json.encode({"v": "meta.k8s.io/v1", "rv": revision, "start": after + "\0"})
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def read_token(token: str) -> tuple[int, str]:
    """(revision, path of the last object sent) of a continue token; raises ApiError 400."""
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError as e:
        raise bad_request(f"invalid continue token: continue key is not valid: {e}") from e
    try:
        value = msgspec.json.decode(raw)
        return int(value["rv"]), str(value["start"]).removesuffix("\0")
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, UnicodeDecodeError) as e:
        first = f"\\x{raw[0]:02x}" if raw and raw[0] > 126 else chr(raw[0]) if raw else ""
        why = f"invalid character '{first}' looking for beginning of value"
        raise bad_request(f"invalid continue token: continue key is not valid: {why}") from e
