"""The verbs over HTTP: turns a request's query and body into the bytes of the answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from lab.apiserver import protobuf, status
from lab.apiserver.conform import FieldValidation, conform, decode_body, decode_yaml
from lab.apiserver.faults import Faults
from lab.apiserver.listing import list_page, page_body
from lab.apiserver.options import ListOptions, parse_options
from lab.apiserver.ownership import Writer
from lab.apiserver.patching import APPLY_PATCH, FORMATS, apply_patch
from lab.apiserver.paths import Target
from lab.apiserver.rest import Rest, render
from lab.apiserver.status import FieldErrors, Json
from lab.apiserver.store import Record
from lab.apiserver.table import table
from lab.apiserver.watching import Watch

log = logging.getLogger("lab.apiserver")

JSON = "application/json"
Verb = Callable[[web.Request, Target], Awaitable[web.Response]]


def answer(body: Json, code: int = 200, content_type: str = JSON) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=code, headers={"Content-Type": content_type})


class Verbs:
    """Answers requests for resources."""

    def __init__(self, rest: Rest, faults: Faults, bookmark_period: float) -> None:
        self._rest = rest
        self._store = rest.store
        self._faults = faults
        self._bookmark_period = bookmark_period
        self._watches: set[Watch] = set()
        self._writes: dict[tuple[str, bool], Verb] = {
            ("POST", False): self._create,
            ("PUT", True): self._update,
            ("PATCH", True): self._patch,
            ("DELETE", True): self._delete,
            ("DELETE", False): self._delete,
        }

    def end_watches(self) -> None:
        """End every watch in an orderly way, as a server that restarts does."""
        for watch in tuple(self._watches):
            watch.stop()

    async def dispatch(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Answer a request for a resource; raises ApiError for every refusal."""
        if target.subresource == "scale":
            return await self._scale(request, target)
        if request.method in {"GET", "HEAD"}:
            return await self._read(request, target)
        verb = self._writes.get((request.method, bool(target.name)))
        if verb is None:
            raise status.method_not_allowed()
        return await verb(request, target)

    async def _read(self, request: web.Request, target: Target) -> web.StreamResponse:
        options = parse_options(request.query, target.resource)
        if not target.name:
            return (
                await self._watch(request, target, options) if options.watch else self._list(request, target, options)
            )
        if options.watch:
            raise status.method_not_allowed()
        return self._object(request, target, self._rest.get(target.resource, target.key))

    def _list(self, request: web.Request, target: Target, options: ListOptions) -> web.Response:
        page = list_page(self._store, target.resource, target.scope, options)
        if wants(request, "Table"):
            return self._table(request, target, page.records, page.metadata)
        body = page_body(target.resource, page, msgspec.json.encode(page.metadata))
        return web.Response(body=body, content_type=JSON)

    async def _watch(self, request: web.Request, target: Target, options: ListOptions) -> web.StreamResponse:
        watch = Watch(self._store, self._faults, target.resource, target.scope, options)
        if wants(request, "Table"):
            watch.as_table(request.query.get("includeObject", "Metadata"))
        watch.begin()
        self._watches.add(watch)
        response = web.StreamResponse(headers={"Content-Type": JSON, "Cache-Control": "no-cache, private"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            await watch.run(response, self._bookmark_period)
            if watch.is_cut and request.transport is not None:
                request.transport.close()
            else:
                await response.write_eof()
        except ConnectionError:
            log.debug("watch ended by the client resource=%s", target.resource.plural)
        finally:
            watch.end()
            self._watches.discard(watch)
        return response

    async def _create(self, request: web.Request, target: Target) -> web.Response:
        obj, warnings = await self._body(request, target)
        record = self._rest.create(
            target.resource, obj, target.namespace, dry_run=_is_dry(request), writer=_writer(request)
        )
        return self._object(request, target, record, 201, warnings)

    async def _update(self, request: web.Request, target: Target) -> web.Response:
        obj, warnings = await self._body(request, target)
        record = self._rest.update(
            target.resource, obj, target.key, target.subresource, dry_run=_is_dry(request), writer=_writer(request)
        )
        return self._object(request, target, record, 200, warnings)

    async def _patch(self, request: web.Request, target: Target) -> web.Response:
        if _content_type(request) == APPLY_PATCH:
            return await self._apply(request, target)
        patch = await self._patch_body(request, target)
        resource = target.resource
        current = msgspec.json.decode(render(resource, self._rest.get(resource, target.key)))
        patched = apply_patch((resource.api_version, resource.kind), current, patch, _content_type(request))
        warnings = conform(patched, resource.api_version, resource.kind, _validation(request))
        record = self._rest.update(
            resource, patched, target.key, target.subresource, dry_run=_is_dry(request), writer=_writer(request)
        )
        return self._object(request, target, record, 200, warnings)

    async def _apply(self, request: web.Request, target: Target) -> web.Response:
        """Server-side apply. The two versions of Event share their objects, so their fields have no managers."""
        resource = target.resource
        if resource.kind == "Event":
            raise status.unsupported_media_type(APPLY_PATCH, FORMATS)
        config = decode_yaml(await request.read(), resource.kind)
        warnings = conform(config, resource.api_version, resource.kind, _validation(request))
        record, is_new = self._rest.apply(
            resource,
            config,
            target.key,
            target.subresource,
            name=_applier(request),
            force=request.query.get("force", "").lower() in {"1", "true"},
            dry_run=_is_dry(request),
        )
        return self._object(request, target, record, 201 if is_new else 200, warnings)

    async def _patch_body(self, request: web.Request, target: Target) -> object:
        given = _content_type(request)
        raw = await request.read()
        if given not in FORMATS:
            raise status.unsupported_media_type(given, (*FORMATS, APPLY_PATCH))
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as e:
            raise status.bad_request(f"the patch of {target.resource.kind} is no JSON: {e}") from e

    async def _delete(self, request: web.Request, target: Target) -> web.Response:
        raw = await request.read()
        options: Json = decode_body(raw, "DeleteOptions") if raw else {}
        query = request.query
        for name in ("propagationPolicy", "gracePeriodSeconds", "dryRun"):
            if name in query:
                options[name] = int(query[name]) if name == "gracePeriodSeconds" else query[name]
        if not target.name:
            return self._delete_collection(request, target, options)
        record = self._rest.delete(target.resource, target.key, options)
        if target.resource.returns_deleted:
            return self._object(request, target, record)
        details = {"name": target.name, "kind": target.resource.plural, "uid": record.decode()["metadata"]["uid"]}
        if target.resource.group:
            details["group"] = target.resource.group
        return answer(_success(details))

    def _delete_collection(self, request: web.Request, target: Target, options: Json) -> web.Response:
        if "deletecollection" not in target.resource.verbs:
            raise status.method_not_allowed()
        chosen = list_page(self._store, target.resource, target.scope, parse_options(request.query, target.resource))
        for record in chosen.records:
            self._rest.delete(target.resource, record.key, options)
        body = page_body(target.resource, chosen, msgspec.json.encode(chosen.metadata))
        return web.Response(body=body, content_type=JSON)

    async def _scale(self, request: web.Request, target: Target) -> web.Response:
        scale = self._rest.get_scale(target.resource, target.key)
        if request.method == "GET":
            return answer(scale)
        if request.method == "PATCH":
            patch = await self._patch_body(request, target)
            scale = apply_patch(("autoscaling/v1", "Scale"), scale, patch, _content_type(request))
        elif request.method == "PUT":
            scale = decode_body(await request.read(), "Scale")
        else:
            raise status.method_not_allowed()
        conform(scale, "autoscaling/v1", "Scale", _validation(request))
        return answer(self._rest.set_scale(target.resource, scale, target.key))

    async def _body(self, request: web.Request, target: Target) -> tuple[Json, list[str]]:
        given = _content_type(request)
        raw = await request.read()
        resource = target.resource
        if given == JSON:
            obj: Json | None = decode_body(raw, resource.kind)
        else:
            is_protobuf = given == protobuf.CONTENT_TYPE
            obj = protobuf.decode_protobuf(raw, resource.api_version, resource.kind) if is_protobuf else None
        if obj is None:
            raise status.unsupported_media_type(given, (JSON,))
        return obj, conform(obj, resource.api_version, resource.kind, _validation(request))

    def _object(
        self, request: web.Request, target: Target, record: Record, code: int = 200, warnings: list[str] | None = None
    ) -> web.Response:
        if wants(request, "Table"):
            return self._table(request, target, [record], {"resourceVersion": str(record.revision)})
        response = web.Response(body=render(target.resource, record), status=code, content_type=JSON)
        for warning in warnings or ():
            response.headers.add("Warning", f"299 - {msgspec.json.encode(warning).decode()}")
        return response

    def _table(self, request: web.Request, target: Target, records: list[Record], metadata: Json) -> web.Response:
        resource = target.resource
        include = request.query.get("includeObject", "Metadata")
        objects = [r.decode() for r in records]
        return answer(table(resource.kind, resource.api_version, objects, metadata, include))


def wants(request: web.Request, kind: str, version: str = "v1") -> bool:
    """Whether the first format that the client accepts is JSON as `kind` of that version."""
    media, *parameters = request.headers.get("Accept", "").partition(",")[0].replace(" ", "").split(";")
    return media == JSON and f"as={kind}" in parameters and f"v={version}" in parameters


def _content_type(request: web.Request) -> str:
    return request.headers.get("Content-Type", JSON).partition(";")[0].strip().lower()


def _validation(request: web.Request) -> FieldValidation:
    try:
        return FieldValidation(request.query.get("fieldValidation") or "Warn")
    except ValueError as e:
        raise status.bad_request(f"invalid fieldValidation: {e}") from e


def _writer(request: web.Request) -> Writer:
    """Return the manager of a write: fieldManager of the query, else the client's program (curl for curl/7.88)."""
    agent = request.headers.get("User-Agent", "").partition("/")[0]
    return Writer((request.query.get("fieldManager") or agent or "unknown")[:128])


def _applier(request: web.Request) -> str:
    name = request.query.get("fieldManager", "")
    if not name:
        errors = FieldErrors()
        errors.required("fieldManager", "is required for apply patch")
        errors.raise_if_any("PatchOptions", "meta.k8s.io", "")
    return name


def _is_dry(request: web.Request) -> bool:
    return "All" in request.query.getall("dryRun", [])


def _success(details: Json) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
