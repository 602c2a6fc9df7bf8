"""A read-mostly Kubernetes API for conformance runs: list, get and watch of four resources from memory.

It supports only the requirements of a proxy (resource versions, watch events, label and field selectors) and discards
events. It validates nothing and streams no list: the cases' objects reach the proxy exactly as recorded, while the
lab's API server adds defaults and refuses invalid objects.
"""

import asyncio
import copy
import json

from aiohttp import web

RESOURCES = {
    "services": ("/api/v1", "v1", "Service"),
    "nodes": ("/api/v1", "v1", "Node"),
    "endpointslices": ("/apis/discovery.k8s.io/v1", "discovery.k8s.io/v1", "EndpointSlice"),
    "servicecidrs": ("/apis/networking.k8s.io/v1", "networking.k8s.io/v1", "ServiceCIDR"),
}
EVENTS = ("/api/v1/namespaces/{ns}/events", "/apis/events.k8s.io/v1/namespaces/{ns}/events")


class MiniAPI:
    """The stored objects, and their history for watches."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[str, dict] = {resource: {} for resource in RESOURCES}  # by (namespace, name)
        self.history: list[tuple[int, str, str, dict]] = []  # version, resource, type, object
        self.changed = asyncio.Condition()
        self.closed = False

    async def replace(self, objects: dict[str, list[dict]]) -> None:
        """Replace the stored objects by exactly these, and send the differences to watches."""
        async with self.changed:
            for resource in RESOURCES:
                wanted = {(o["metadata"].get("namespace"), o["metadata"]["name"]): o for o in objects.get(resource, [])}
                stored = self.objects[resource]
                for key in [key for key in stored if key not in wanted]:
                    self._emit(resource, "DELETED", stored.pop(key))
                for key, each in wanted.items():
                    made = copy.deepcopy(each)
                    made["metadata"].setdefault("uid", f"uid-{resource}-{made['metadata']['name']}")
                    if key not in stored or content(stored[key]) != content(made):
                        kind = "MODIFIED" if key in stored else "ADDED"
                        stored[key] = made
                        self._emit(resource, kind, made)
            self.changed.notify_all()

    def _emit(self, resource: str, kind: str, body: dict) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        _, body["apiVersion"], body["kind"] = RESOURCES[resource]
        self.history.append((self.version, resource, kind, copy.deepcopy(body)))

    async def collection(self, request: web.Request) -> web.StreamResponse:
        """Answer a list or watch."""
        resource = request.match_info["resource"]
        if resource not in RESOURCES:
            return failure(404, "NotFound", f"no {resource} here")
        query = request.query
        selectors = (query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if query.get("sendInitialEvents") == "true":
            return failure(422, "Invalid", "sendInitialEvents is forbidden here")
        if query.get("watch") in ("1", "true"):
            return await self._watch(request, resource, selectors)
        items = [each for each in self.objects[resource].values() if selected(each, *selectors)]
        _, api, kind = RESOURCES[resource]
        meta = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": f"{kind}List", "apiVersion": api, "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, resource: str, selectors: tuple[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        position = 0
        while not self.closed:
            while position < len(self.history):
                version, of, kind, body = self.history[position]
                position += 1
                if version > since and of == resource and selected(body, *selectors):
                    await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
            async with self.changed:
                if position >= len(self.history) and not self.closed:
                    await self.changed.wait()
        return response

    async def one(self, request: web.Request) -> web.Response:
        """Answer a get of one object."""
        resource, key = request.match_info["resource"], (request.match_info.get("ns"), request.match_info["name"])
        body = self.objects.get(resource, {}).get(key)
        return failure(404, "NotFound", f"no {resource} {key[1]}") if body is None else web.json_response(body)

    async def start(self, host: str, port: int) -> None:
        """Serve until stop()."""
        app = web.Application()
        app.router.add_get("/version", version)
        for prefix in ("/api/v1", "/apis/discovery.k8s.io/v1", "/apis/networking.k8s.io/v1"):
            app.router.add_get(prefix + "/{resource}", self.collection)
            app.router.add_get(prefix + "/{resource}/{name}", self.one)
            app.router.add_get(prefix + "/namespaces/{ns}/{resource}/{name}", self.one)
        for path in EVENTS:
            app.router.add_post(path, accepted)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, host, port).start()

    async def stop(self) -> None:
        """End all watches and stop serving."""
        self.closed = True
        async with self.changed:
            self.changed.notify_all()
        await self.runner.cleanup()


def content(body: dict) -> dict:
    """Return the compared parts of an object: everything except the version and the stored metadata."""
    meta = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
    return {key: value for key, value in body.items() if key not in ("apiVersion", "kind")} | {"metadata": meta}


def selected(body: dict, labels: str, fields: str) -> bool:
    """Return whether an object has the labels and fields that a client selects."""
    return all(
        _has_label(body["metadata"].get("labels") or {}, term) for term in filter(None, labels.split(","))
    ) and all(_has_field(body, term) for term in filter(None, fields.split(",")))


def _has_label(labels: dict[str, str], term: str) -> bool:
    if term.startswith("!"):
        return term[1:] not in labels
    if "!=" in term:
        key, value = term.split("!=")
        return labels.get(key) != value
    if "=" in term:
        key, value = term.replace("==", "=").split("=")
        return labels.get(key) == value
    return term in labels


def _has_field(body: dict, term: str) -> bool:
    negative = "!=" in term
    path, value = term.split("!=") if negative else term.replace("==", "=").split("=")
    seen: object = body
    for part in path.split("."):
        seen = (seen or {}).get(part)
    return (str(seen or "") == value) != negative


def failure(code: int, reason: str, message: str) -> web.Response:
    """Return a Status with an error message."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return web.json_response(body | {"message": message}, status=code)


async def version(_: web.Request) -> web.Response:
    """Serve /version."""
    return web.json_response({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})


async def accepted(request: web.Request) -> web.Response:
    """Accept an event and discard it."""
    return web.json_response(await request.json() if request.can_read_body else {}, status=201)
