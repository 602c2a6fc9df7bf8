"""The API server answers as a real kube-apiserver 1.36 did, exchange by exchange.

The exchanges are replayed in the order of the recording; values that a server generates (uids, times, versions,
allocated addresses and ports) are blanked on both sides.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from typing import Any, NamedTuple

import pytest

from lab.apiserver.server import ServerConfig
from support.lab_client import Client, with_server
from support.places import RECORDINGS

FOLDER = RECORDINGS / "api"
CIDRS = ("10.96.0.0/12", "fd00:10:96::/112")
RECORDED_NODE_PORT = 32136

IN_ORDER = [
    "create-namespace",
    "create-node",
    "patch-node-status",
    "create-service",
    "create-service-again",
    "create-service-nodeport",
    "create-service-nodeport-taken",
    "create-service-nodeport-out-of-range",
    "create-service-loadbalancer-local",
    "create-service-dualstack",
    "create-service-headless",
    "create-service-externalname",
    "create-service-bad-port",
    "create-service-clusterip-outside",
    "create-service-clusterip-taken",
    "create-service-two-unnamed-ports",
    "create-not-json",
    "create-wrong-type",
    "list-services",
    "create-endpointslice",
    "create-endpointslice-bad-address",
    "list-services-paged-1",
    "list-services-paged-2",
    "list-services-selectors",
    "list-servicecidrs",
    "list-continue-garbage",
    "list-rv-future",
    "list-rv-garbage",
    "list-exact-compacted",
    "get-service",
    "get-missing",
    "get-unknown-resource",
    "put-conflict",
    "put-clusterip-change",
    "watch-services",
    "watch-bad-rv",
    "delete-service",
    "watch-list-services",
    "watch-timeout-1s",
    "watch-bookmarks",
    "create-event",
    "table-services",
    "watch-too-old",
    "version",
    "discovery-api",
    "discovery-apis",
    "discovery-api-v1",
    "discovery-aggregated",
]
# Each of these lasts a second and changes nothing.
TOGETHER = ["watch-list-services", "watch-timeout-1s", "watch-bookmarks"]
APART = ["list-unauthorized", "list-forbidden", "watch-list-not-supported-by-storage", "patch-service"]


class Recording(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    status: int
    content_type: str
    answer: str


def read(name: str) -> Recording:
    text = (FOLDER / f"{name}.http").read_text()
    request, _, response = text.partition("\n\n")
    first, *rest = (line.removeprefix("> ") for line in request.splitlines())
    method, path = first.split(" ", 1)
    headers = dict(line.split(": ", 1) for line in rest if re.match(r"[A-Z][A-Za-z-]+: ", line))
    bodies = [line for line in rest if line.startswith(("{", "["))]
    head, _, answer = response.partition("\n\n")
    kind = re.search(r"^content-type: (.*)$", head, re.M)
    assert kind
    status = int(head.split()[1])
    return Recording(method, path, headers, bodies[0].encode() if bodies else None, status, kind[1], answer)


BLANKED = {
    "uid",
    "creationTimestamp",
    "resourceVersion",
    "lastTransitionTime",
    "time",
    "continue",
    "serverAddress",
    "description",
}
DROPPED = {"storageVersionHash"}


def blank(value: Any, key: str = "") -> Any:
    """Return the value without the parts that servers generate."""
    if key in BLANKED:
        return f"<{key}>"
    if key in {"nodePort", "healthCheckNodePort"} and value:
        return "<port>"
    if isinstance(value, dict):
        return {k: blank(v, k) for k, v in value.items() if k not in DROPPED}
    if isinstance(value, list):
        return [blank(v, key) for v in value]
    if isinstance(value, str):
        return blank_text(value, key)
    return value


def blank_text(value: str, key: str) -> str:
    if key in {"clusterIP", "clusterIPs", "cells"} and "/" not in value:
        try:
            return f"<IPv{ipaddress.ip_address(value).version}>"
        except ValueError:
            pass
    if key == "cells":
        return re.sub(r":\d{5}/", ":<port>/", re.sub(r"^\d+(s|m|m\d+s)$", "<age>", value))
    if key == "message":
        value = re.sub(r"too old resource version: \d+ \(\d+\)", "too old resource version: N (N)", value)
        value = re.sub(r"current: \d+", "current: N", value)
        return re.sub(r"Invalid value: 3\d{4}: provided port is already", "Invalid value: <port>: is already", value)
    return value


def events(text: str) -> list[Any]:
    return [blank(json.loads(line)) for line in text.splitlines() if line]


class Replay:
    """Return the server's answer to each recorded request, by the name of the recording."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str, str]] = {}
        self._versions: dict[str, str] = {}

    async def ask(self, client: Client, name: str, headers: dict[str, str] | None = None) -> None:
        recording = read(name)
        body, path = recording.body, recording.path
        if name == "create-service-nodeport-taken":
            taken = json.loads(self.answers["create-service-nodeport"][2])["spec"]["ports"][0]["nodePort"]
            body = (body or b"").replace(str(RECORDED_NODE_PORT).encode(), str(taken).encode())
        if name == "list-services-paged-2":
            token = json.loads(self.answers["list-services-paged-1"][2])["metadata"]["continue"]
            path = re.sub("continue=.*", f"continue={token}", path)
        if name == "watch-services":
            path = path.replace("resourceVersion=228", f"resourceVersion={client.server.store.revision}")
        if name == "watch-bookmarks":
            path = path.replace("resourceVersion=247", f"resourceVersion={client.server.store.revision}")
        path = re.sub("timeoutSeconds=(30|65)", "timeoutSeconds=1", path)
        sent = {"User-Agent": "curl/7.88.1"} | recording.headers | (headers or {})
        if body is not None:
            kind = "strategic-merge-patch+json" if recording.method == "PATCH" else "json"
            sent["Content-Type"] = f"application/{kind}"
        async with client.session.request(recording.method, client.url + path, data=body, headers=sent) as r:
            if name == "watch-services":
                await self.ask(client, "patch-service")
                await self.ask(client, "delete-service")
                client.server.end_watches()
            text = (await r.read()).decode()
            self.answers[name] = (r.status, r.headers["Content-Type"], text)

    async def run(self, client: Client) -> None:
        for name in IN_ORDER:
            if name == "watch-too-old":
                client.server.store.compact()
            if name in TOGETHER and name not in self.answers:
                await asyncio.gather(*(self.ask(client, n) for n in TOGETHER))
            elif name not in self.answers:
                await asyncio.wait_for(self.ask(client, name), 10)

    async def run_refused(self, client: Client) -> None:
        await self.ask(client, "list-unauthorized")
        await self.ask(client, "list-forbidden", {"Authorization": "Bearer nobodys"})
        await self.ask(client, "watch-list-not-supported-by-storage", {"Authorization": "Bearer admins"})


@pytest.fixture(scope="module")
def replay() -> Replay:
    result = Replay()
    with_server(result.run, ServerConfig(service_cidrs=CIDRS, bookmark_period=0.6))
    config = ServerConfig(
        tokens={"nobodys": "nobody", "admins": "admin"}, denied_users=frozenset({"nobody"}), watch_list=False
    )
    with_server(result.run_refused, config)
    return result


def test_every_recording_is_replayed() -> None:
    assert {*IN_ORDER, *APART} == {p.stem for p in FOLDER.glob("*.http")}


@pytest.mark.parametrize("name", [n for n in (*IN_ORDER, *APART) if not n.startswith("discovery-") and n != "version"])
def test_answer(replay: Replay, name: str) -> None:
    recording = read(name)
    status, content_type, text = replay.answers[name]
    assert status == recording.status
    assert content_type == recording.content_type
    if "watch=1" in recording.path and status == 200:
        # Our answer may continue up to the bookmark at the end of a shorter timeout.
        ours, theirs = events(text), events(recording.answer)
        assert ours[: len(theirs)] == theirs
        assert {e["type"] for e in ours[len(theirs) :]} <= {"BOOKMARK"}
    elif content_type == "application/json":
        assert blank(json.loads(text)) == blank(json.loads(recording.answer))
    else:
        assert text.strip() == recording.answer.strip()


def test_version(replay: Replay) -> None:
    ours, theirs = (json.loads(t) for t in (replay.answers["version"][2], read("version").answer))
    assert ours.keys() == theirs.keys()
    assert (ours["major"], ours["minor"]) == (theirs["major"], theirs["minor"])


def test_discovery_of_versions(replay: Replay) -> None:
    ours, theirs = (json.loads(t) for t in (replay.answers["discovery-api"][2], read("discovery-api").answer))
    assert blank(ours) == blank(theirs)


def test_discovery_of_groups(replay: Replay) -> None:
    ours, theirs = (json.loads(t) for t in (replay.answers["discovery-apis"][2], read("discovery-apis").answer))
    names = {g["name"] for g in ours["groups"]}
    assert names == {"events.k8s.io", "networking.k8s.io", "coordination.k8s.io", "discovery.k8s.io"}
    theirs["groups"] = [g for g in theirs["groups"] if g["name"] in names]
    assert ours == theirs


def test_discovery_of_core_resources(replay: Replay) -> None:
    ours, theirs = (json.loads(t) for t in (replay.answers["discovery-api-v1"][2], read("discovery-api-v1").answer))
    names = {r["name"] for r in ours["resources"]}
    assert {"services", "services/status", "pods", "replicationcontrollers/scale", "nodes", "events"} <= names
    theirs["resources"] = [r for r in theirs["resources"] if r["name"] in names]
    assert blank(ours) == blank(theirs)


def test_aggregated_discovery(replay: Replay) -> None:
    ours, theirs = (
        json.loads(t) for t in (replay.answers["discovery-aggregated"][2], read("discovery-aggregated").answer)
    )
    assert sorted(replay.answers["discovery-aggregated"][1].split(";")) == sorted(
        read("discovery-aggregated").content_type.split(";")
    )
    known = {g["metadata"]["name"]: g for g in theirs["items"]}
    for group in ours["items"]:
        resources = {r["resource"]: r for r in known[group["metadata"]["name"]]["versions"][0]["resources"]}
        for resource in group["versions"][0]["resources"]:
            assert resource == resources[resource["resource"]]
