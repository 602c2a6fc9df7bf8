"""ConfigMaps, Endpoints and Leases: defaults, refusals, their form as a table, and as protobuf."""

from __future__ import annotations

from typing import Any

import pytest

from lab.apiserver.protobuf import CONTENT_TYPE, MAGIC
from support.lab_client import Client, Json, with_server

BASE = "/api/v1/namespaces/default"
PATHS = {
    "ConfigMap": f"{BASE}/configmaps",
    "Endpoints": f"{BASE}/endpoints",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/default/leases",
}
SUBSET = {"addresses": [{"ip": "10.244.0.1"}], "ports": [{"port": 80}]}


@pytest.mark.parametrize(
    ("kind", "body", "stored"),
    [
        ("ConfigMap", {"data": {"a": "b"}}, {"data": {"a": "b"}}),
        ("Endpoints", {"subsets": [SUBSET]}, {"subsets": [SUBSET | {"ports": [{"port": 80, "protocol": "TCP"}]}]}),
        ("Lease", {}, {"spec": {}}),
        (
            "Lease",
            {"spec": {"holderIdentity": "n", "renewTime": "2026-01-01T00:00:00.000000Z"}},
            {"spec": {"holderIdentity": "n", "renewTime": "2026-01-01T00:00:00.000000Z"}},
        ),
    ],
)
def test_created_read_and_watched(kind: str, body: Json, stored: Json) -> None:
    async def test(client: Client) -> None:
        before = client.server.store.revision
        status, made = await client.call("POST", PATHS[kind], {"metadata": {"name": "x"}} | body)
        assert (status, made["kind"]) == (201, kind)
        assert {key: made[key] for key in stored} == stored
        assert (await client.call("GET", f"{PATHS[kind]}/x"))[1] == made
        async with client.watch(f"{PATHS[kind]}?watch=1&resourceVersion={before}") as following:
            event = await following()
            assert event
            assert (event["type"], event["object"]) == ("ADDED", made)
        assert (await client.call("DELETE", f"{PATHS[kind]}/x"))[0] == 200

    with_server(test)


@pytest.mark.parametrize(
    ("kind", "body", "field", "reason"),
    [
        ("ConfigMap", {"data": {"a b": ""}}, "data[a b]", "a valid config key"),
        (
            "ConfigMap",
            {"data": {"a": ""}, "binaryData": {"a": ""}},
            "data[a]",
            "duplicate of key",
        ),
        ("Endpoints", {"subsets": [{}]}, "subsets[0]", "must specify `addresses` or `notReadyAddresses`"),
        ("Endpoints", {"subsets": [SUBSET | {"addresses": [{"ip": "x"}]}]}, "subsets[0].addresses[0].ip", "valid IP"),
        (
            "Endpoints",
            {"subsets": [SUBSET | {"addresses": [{"ip": "127.0.0.1"}]}]},
            "subsets[0].addresses[0].ip",
            "loopback",
        ),
        (
            "Endpoints",
            {"subsets": [SUBSET | {"ports": [{"port": 0}]}]},
            "subsets[0].ports[0].port",
            "between 1 and",
        ),
        (
            "Endpoints",
            {"subsets": [SUBSET | {"ports": [{"port": 1}] * 2}]},
            "subsets[0].ports[0].name",
            "Required",
        ),
        ("Lease", {"spec": {"leaseDurationSeconds": 0}}, "spec.leaseDurationSeconds", "must be greater than 0"),
        ("Lease", {"spec": {"leaseTransitions": -1}}, "spec.leaseTransitions", "greater than or equal to 0"),
    ],
)
def test_invalid_objects_are_refused(kind: str, body: Json, field: str, reason: str) -> None:
    async def test(client: Client) -> None:
        status, said = await client.call("POST", PATHS[kind], {"metadata": {"name": "x"}} | body)
        assert (status, said["reason"]) == (422, "Invalid")
        assert field in [cause["field"] for cause in said["details"]["causes"]]
        assert reason in said["message"]

    with_server(test)


def test_an_immutable_config_map_stays() -> None:
    async def test(client: Client) -> None:
        body: dict[str, Any] = {"metadata": {"name": "x"}, "data": {"a": "b"}, "immutable": True}
        await client.call("POST", PATHS["ConfigMap"], body)
        path = f"{PATHS['ConfigMap']}/x"
        for change in ({"data": {"a": "c"}}, {"binaryData": {"x": "YQ=="}}, {"immutable": None}):
            status, said = await client.patch(path, change, "merge-patch")
            assert status == 422
            assert "field is immutable when `immutable` is set" in said["message"]
        assert (await client.patch(path, {"metadata": {"labels": {"a": "b"}}}, "merge-patch"))[0] == 200

    with_server(test)


@pytest.mark.parametrize(
    ("kind", "body", "cells"),
    [
        ("ConfigMap", {"data": {"a": "", "b": ""}, "binaryData": {"c": ""}}, ["x", 3]),
        ("Endpoints", {}, ["x", "<none>"]),
        ("Endpoints", {"subsets": [SUBSET | {"addresses": [{"ip": "fd00::1"}, {"ip": "fd00::2"}]}]},
         ["x", "[fd00::1]:80,[fd00::2]:80"]),
        ("Lease", {"spec": {"holderIdentity": "node-a"}}, ["x", "node-a"]),
    ],
)  # fmt: skip
def test_rows(kind: str, body: Json, cells: list[Any]) -> None:
    async def test(client: Client) -> None:
        await client.call("POST", PATHS[kind], {"metadata": {"name": "x"}} | body)
        accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
        _, table = await client.call("GET", PATHS[kind], headers=accept)
        (row,) = table["rows"]
        assert row["cells"][:-1] == cells
        assert len(row["cells"]) == len(table["columnDefinitions"])

    with_server(test)


def field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


def entry(number: int, key: bytes, value: bytes) -> bytes:
    return field(number, field(1, key) + field(2, value))


EPOCH = "1970-01-01T00:00:00.000000Z"
META = field(1, field(1, b"x"))


@pytest.mark.parametrize(
    ("kind", "raw", "stored"),
    [
        (
            "ConfigMap",
            META + entry(2, b"a", b"b") + entry(3, b"k", b"\xff\x00") + b"\x20\x01",
            {"data": {"a": "b"}, "binaryData": {"k": "/wA="}, "immutable": True},
        ),
        (
            "Endpoints",
            META + field(2, field(1, field(1, b"10.0.0.1")) + field(3, b"\x10\x50" + field(3, b"UDP"))),
            {"subsets": [{"addresses": [{"ip": "10.0.0.1"}], "ports": [{"port": 80, "protocol": "UDP"}]}]},
        ),
        (
            "Lease",
            META + field(2, field(1, b"node-a") + b"\x10\x28" + field(4, b"\x08\x00\x10\x00")),
            {
                "spec": {
                    "holderIdentity": "node-a",
                    "leaseDurationSeconds": 40,
                    "renewTime": EPOCH,
                }
            },
        ),
    ],
)
def test_protobuf_bodies(kind: str, raw: bytes, stored: Json) -> None:
    async def test(client: Client) -> None:
        version = "coordination.k8s.io/v1" if kind == "Lease" else "v1"
        body = MAGIC + field(1, field(1, version.encode()) + field(2, kind.encode())) + field(2, raw)
        status, made = await client.call("POST", PATHS[kind], body, {"Content-Type": CONTENT_TYPE})
        assert status == 201
        assert {key: made[key] for key in stored} == stored

    with_server(test)
