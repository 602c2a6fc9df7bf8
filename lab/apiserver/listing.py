"""Answers list requests: selects the objects and the version, in pages. No sockets. Source: KEP-365 (paging), KEP-2523
(version match)."""

from __future__ import annotations

from typing import NamedTuple

from lab.apiserver.options import ListOptions, continue_token, read_token
from lab.apiserver.resources import Resource
from lab.apiserver.rest import render
from lab.apiserver.status import ApiError, Json, list_expired, too_large
from lab.apiserver.store import Record, Store


class Page(NamedTuple):
    """Some objects and the list's metadata."""

    records: list[Record]
    metadata: Json


def _path(record: Record) -> str:
    namespace, name = record.key
    return f"/{namespace}/{name}" if namespace else f"/{name}"


def _at(store: Store, resource: Resource, namespace: str | None, options: ListOptions) -> tuple[int, list[Record]]:
    revision = options.revision
    exact = options.match == "Exact" or (not options.match and options.limit > 0 and bool(revision))
    if revision and exact:
        records = store.records_at(resource.storage, revision, namespace)
        if records is None:
            raise ApiError(410, "Expired", "The resourceVersion for the provided list is too old.")
        return revision, records
    if revision and revision > store.revision:
        raise too_large(revision, store.revision)
    return store.revision, store.records(resource.storage, namespace)


def _continued(store: Store, resource: Resource, namespace: str | None, token: str) -> tuple[int, list[Record]]:
    revision, start = read_token(token)
    if revision < 0:
        revision, records = store.revision, store.records(resource.storage, namespace)
    else:
        found = store.records_at(resource.storage, revision, namespace)
        if found is None:
            raise list_expired(continue_token(-1, start))
        records = found
    namespace_, _, name = start.lstrip("/").rpartition("/")
    return revision, [r for r in records if r.key > (namespace_, name)]


def list_page(store: Store, resource: Resource, namespace: str | None, options: ListOptions) -> Page:
    """Return the objects that match the options. Raises ApiError 400, 410 or 504."""
    if options.token:
        revision, records = _continued(store, resource, namespace, options.token)
    else:
        revision, records = _at(store, resource, namespace, options)
    if options.selective:
        records = [r for r in records if options.selects(r)]
    metadata: Json = {"resourceVersion": str(revision)}
    # A list at version 0 is served from the watch cache, which has no pages.
    if options.limit and len(records) > options.limit and options.revision != 0:
        rest = len(records) - options.limit
        records = records[: options.limit]
        metadata["continue"] = continue_token(revision, _path(records[-1]))
        if not options.selective:
            metadata["remainingItemCount"] = rest
    return Page(records, metadata)


def page_body(resource: Resource, page: Page, metadata: bytes) -> bytes:
    """The JSON of a list; `metadata` is the encoded metadata. This only joins strings, because objects are stored
    encoded."""
    if resource.group == "events.k8s.io":
        header = len(f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",')
        items = b",".join(b"{" + render(resource, r)[header:] for r in page.records)
    else:
        items = b",".join([r.raw for r in page.records])
    head = f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'.encode()
    return b"".join((head, metadata, b',"items":[', items, b"]}\n"))
