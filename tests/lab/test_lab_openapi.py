"""OpenAPI of the lab: every served kind in both versions, and version 2 in protobuf as kubectl reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lab.apiserver import openapi
from lab.apiserver.openapi_protobuf import CONTENT_TYPE, document
from lab.apiserver.protobuf import _split
from lab.apiserver.resources import GROUPS, RESOURCES
from support.lab_client import Client, Json, with_server

VERSION = "v1.36.0"
SERVED = {(r.group, r.version, r.kind) for r in RESOURCES}
PROTOBUF = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"


def kinds(definitions: Json) -> set[tuple[str, str, str]]:
    marks = [d.get("x-kubernetes-group-version-kind", []) for d in definitions.values()]
    return {(gvk["group"], gvk["version"], gvk["kind"]) for each in marks for gvk in each}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_version_2_has_every_kind_and_no_reference_into_nothing() -> None:
    made = openapi.v2(VERSION)
    assert kinds(made["definitions"]) == SERVED
    targets = set(references(made))
    assert targets
    assert {target.removeprefix("#/definitions/") for target in targets} == made["definitions"].keys()


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_version_3_has_every_kind_of_a_group_and_no_reference_into_nothing(group: str) -> None:
    made = openapi.v3(group, VERSION)
    assert kinds(made["components"]["schemas"]) == {kind for kind in SERVED if kind[0] == group}
    targets = {target.removeprefix("#/components/schemas/") for target in references(made)}
    assert targets == made["components"]["schemas"].keys()


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda r: f"{r.plural}.{r.group}")
def test_writes_document_field_validation_and_their_formats(resource) -> None:
    for paths in (openapi.v2(VERSION)["paths"], openapi.v3(resource.group, VERSION)["paths"]):
        (item,) = [path for name, path in paths.items() if name.endswith(f"/{resource.plural}/{{name}}")
                   and name.startswith(f"/{openapi.base(resource.group)}/")]  # fmt: skip
        patch = item["patch"]
        assert [p["name"] for p in patch["parameters"]] == ["dryRun", "fieldManager", "fieldValidation", "force"]
        formats = patch.get("consumes") or list(patch["requestBody"]["content"])
        assert "application/strategic-merge-patch+json" in formats
        assert "application/apply-patch+yaml" in formats
        assert patch["x-kubernetes-group-version-kind"]["kind"] == resource.kind


def test_rules_for_patching_and_applying_lists_and_maps() -> None:
    spec = openapi.v2(VERSION)["definitions"]["io.k8s.api.core.v1.ServiceSpec"]["properties"]
    marks = {key: value for key, value in spec["ports"].items() if key.startswith("x-")}
    assert marks == {
        "x-kubernetes-list-map-keys": ["port", "protocol"],
        "x-kubernetes-list-type": "map",
        "x-kubernetes-patch-merge-key": "port",
        "x-kubernetes-patch-strategy": "merge",
    }
    assert spec["externalIPs"]["x-kubernetes-list-type"] == "atomic"
    assert spec["selector"]["x-kubernetes-map-type"] == "atomic"
    node = openapi.v2(VERSION)["definitions"]["io.k8s.api.core.v1.NodeSpec"]["properties"]
    assert node["podCIDRs"]["x-kubernetes-list-type"] == "set"


# the protobuf form, parsed by field numbers of the test


def fields(raw: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for number, value in _split(raw):
        found.setdefault(number, []).append(value)
    return found


def named(raw: bytes, number: int) -> dict[str, bytes]:
    """Return a map of gnostic: entries of name (1) and value (2)."""
    entries = [fields(entry) for entry in fields(raw).get(number, [])]
    return {entry[1][0].decode(): entry.get(2, [b""])[0] for entry in entries}


def schema(raw: bytes) -> Json:
    """Return a Schema as JSON."""
    found = fields(raw)
    result: Json = {name: found[number][0].decode() for number, name in ((1, "$ref"), (2, "format"), (4, "description"))
                    if number in found}  # fmt: skip
    if 21 in found:
        result["additionalProperties"] = schema(fields(found[21][0])[1][0])
    if 22 in found:
        result["type"] = fields(found[22][0])[1][0].decode()
    if 23 in found:
        result["items"] = schema(fields(found[23][0])[1][0])
    if 25 in found:
        result["properties"] = {name: schema(value) for name, value in named(found[25][0], 1).items()}
    extensions = named(raw, 31)
    return result | {name: json.loads(fields(value)[2][0]) for name, value in extensions.items()}


def test_the_protobuf_form_has_the_same_content() -> None:
    made = openapi.v2(VERSION)
    found = fields(document(made))
    assert found[1] == [b"2.0"]
    assert fields(found[2][0]) == {1: [b"Kubernetes lab"], 2: [VERSION.encode()]}
    definitions = {name: schema(value) for name, value in named(found[9][0], 1).items()}
    assert definitions == made["definitions"]
    paths = named(found[8][0], 2)
    assert paths.keys() == made["paths"].keys()
    for path, item in paths.items():
        methods = {2: "get", 3: "put", 4: "post", 5: "delete", 8: "patch"}
        assert {methods[number] for number in fields(item)} == made["paths"][path].keys()
        for number, (operation,) in fields(item).items():
            check_operation(fields(operation), made["paths"][path][methods[number]], operation)


def check_operation(found: dict[int, list[bytes]], ours: Json, raw: bytes) -> None:
    assert [text.decode() for text in found[6]] == ours["produces"]
    assert [text.decode() for text in found[7]] == ours["consumes"]
    parameters = [fields(fields(fields(fields(each)[1][0])[2][0])[3][0]) for each in found.get(8, [])]
    assert [{"name": p[4][0].decode(), "in": p[2][0].decode(), "type": p[6][0].decode()} for p in parameters] == ours[
        "parameters"
    ]
    (response,) = [fields(fields(value)[1][0]) for value in named(found[9][0], 1).values()]
    assert schema(fields(response[2][0])[1][0]) == ours["responses"]["200"]["schema"]
    extensions = {name: json.loads(fields(value)[2][0]) for name, value in named(raw, 13).items()}
    assert extensions == {key: value for key, value in ours.items() if key.startswith("x-")}


def test_served_as_the_client_asks() -> None:
    async def test(client: Client) -> None:
        status, plain = await client.call("GET", "/openapi/v2")
        assert (status, plain["swagger"]) == (200, "2.0")
        for accept in (PROTOBUF, CONTENT_TYPE):
            async with client.session.get(f"{client.url}/openapi/v2", headers={"Accept": accept}) as r:
                assert (r.status, r.headers["Content-Type"]) == (200, CONTENT_TYPE)
                assert await r.read() == document(plain)
        _, index = await client.call("GET", "/openapi/v3")
        for base, entry in index["paths"].items():
            resources = (await client.call("GET", f"/{base}"))[1]["resources"]
            document_ = (await client.call("GET", entry["serverRelativeURL"]))[1]
            served = {r["kind"] for r in resources if "/" not in r["name"]}
            assert {kind for _, _, kind in kinds(document_["components"]["schemas"])} == served

    with_server(test)
