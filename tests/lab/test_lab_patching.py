"""Patches as tables: the patch of kubectl or another client, and the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.apiserver.patching import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, apply_patch, merge
from lab.apiserver.status import ApiError

SERVICE = ("v1", "Service")
BASE: dict[str, Any] = {
    "metadata": {"name": "web", "labels": {"a": "1", "b": "2"}, "finalizers": ["x", "y"]},
    "spec": {
        "type": "ClusterIP",
        "externalIPs": ["1.1.1.1"],
        "ports": [{"name": "http", "port": 80, "protocol": "TCP"}, {"name": "dns", "port": 53, "protocol": "UDP"}],
    },
}


def patched(patch: Any, kind: str) -> dict[str, Any]:
    before = copy.deepcopy(BASE)
    result = apply_patch(SERVICE, BASE, patch, kind)
    assert before == BASE, "the input stays as it is"
    return result


@pytest.mark.parametrize(
    ("patch", "ports"),
    [
        ([{"port": 80, "targetPort": 8080}], ["http:80/TCP>8080", "dns:53/UDP"]),
        ([{"port": 443, "name": "https"}], ["http:80/TCP", "dns:53/UDP", "https:443/None"]),
        ([{"$patch": "delete", "port": 80}], ["dns:53/UDP"]),
        ([{"$patch": "delete", "port": 9}], ["http:80/TCP", "dns:53/UDP"]),
        ([{"$patch": "replace"}, {"port": 1, "name": "one"}], ["one:1/None"]),
        ([{"port": 53, "protocol": "UDP", "name": "d"}], ["http:80/TCP", "d:53/UDP"]),
    ],
)
def test_strategic_ports(patch: Any, ports: list[str]) -> None:
    result = patched({"spec": {"ports": patch}}, STRATEGIC_PATCH)["spec"]["ports"]

    def shown(p: dict[str, Any]) -> str:
        target = f">{p['targetPort']}" if "targetPort" in p else ""
        return f"{p.get('name')}:{p['port']}/{p.get('protocol')}{target}"

    assert [shown(p) for p in result] == ports


def test_strategic_tells_protocols_of_one_port_apart() -> None:
    both = [{"name": "u", "port": 53, "protocol": "UDP"}, {"name": "t", "port": 53, "protocol": "TCP"}]
    patch = {"spec": {"ports": [{"port": 53, "protocol": "TCP", "name": "tcp"}]}}
    result = apply_patch(SERVICE, {"spec": {"ports": both}}, patch, STRATEGIC_PATCH)
    assert [p["name"] for p in result["spec"]["ports"]] == ["u", "tcp"]


def test_strategic_order_and_other_directives() -> None:
    patch = {
        "metadata": {"labels": {"a": None, "c": "3"}, "$deleteFromPrimitiveList/finalizers": ["x"]},
        "spec": {"ports": [{"port": 8080, "name": "n"}], "$setElementOrder/ports": [{"port": 8080}, {"port": 53}]},
    }
    result = patched(patch, STRATEGIC_PATCH)
    assert result["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert result["metadata"]["finalizers"] == ["y"]
    assert [p["port"] for p in result["spec"]["ports"]] == [8080, 53, 80]


def test_strategic_replace_and_retain_keys() -> None:
    assert patched({"spec": {"$patch": "replace", "type": "X"}}, STRATEGIC_PATCH)["spec"] == {"type": "X"}
    kept = patched({"spec": {"$retainKeys": ["type"], "type": "NodePort"}}, STRATEGIC_PATCH)["spec"]
    assert kept == {"type": "NodePort"}
    assert patched({"spec": {"externalIPs": ["2.2.2.2"]}}, STRATEGIC_PATCH)["spec"]["externalIPs"] == ["2.2.2.2"]


def test_strategic_merges_conditions_and_addresses_by_type() -> None:
    node = {"status": {"addresses": [{"type": "InternalIP", "address": "1.1.1.1"}], "conditions": []}}
    patch = {
        "status": {"addresses": [{"type": "InternalIP", "address": "2.2.2.2"}, {"type": "Hostname", "address": "n"}]}
    }
    result = apply_patch(("v1", "Node"), node, patch, STRATEGIC_PATCH)
    assert [a["address"] for a in result["status"]["addresses"]] == ["2.2.2.2", "n"]


@pytest.mark.parametrize(
    ("operation", "path", "expected"),
    [
        ({"op": "add", "path": "/spec/ports/-", "value": {"port": 1}}, ("spec", "ports", 2), {"port": 1}),
        ({"op": "add", "path": "/spec/ports/0", "value": {"port": 1}}, ("spec", "ports", 0), {"port": 1}),
        ({"op": "add", "path": "/metadata/labels/x~1y~0z", "value": "v"}, ("metadata", "labels", "x/y~z"), "v"),
        ({"op": "replace", "path": "/spec/type", "value": "NodePort"}, ("spec", "type"), "NodePort"),
        ({"op": "copy", "from": "/metadata/name", "path": "/spec/externalName"}, ("spec", "externalName"), "web"),
        ({"op": "move", "from": "/metadata/name", "path": "/spec/externalName"}, ("spec", "externalName"), "web"),
        ({"op": "test", "path": "/spec/type", "value": "ClusterIP"}, ("spec", "type"), "ClusterIP"),
        ({"op": "remove", "path": "/spec/ports/0"}, ("spec", "ports", 0, "name"), "dns"),
    ],
)
def test_json_patch(operation: Any, path: tuple[Any, ...], expected: Any) -> None:
    result: Any = patched([operation], JSON_PATCH)
    for part in path:
        result = result[part]
    assert result == expected


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/spec/type", "value": "Other"},
        {"op": "remove", "path": "/spec/none"},
        {"op": "replace", "path": "/spec/none", "value": 1},
        {"op": "add", "path": "/spec/ports/9", "value": {}},
        {"op": "add", "path": "/none/deep", "value": 1},
        {"op": "spin", "path": "/spec"},
        {"op": "add", "path": "spec", "value": 1},
        {"op": "add"},
        "add",
        None,
    ],
)
def test_json_patch_that_does_not_fit(operation: Any) -> None:
    with pytest.raises(ApiError) as e:
        patched([operation], JSON_PATCH)
    assert e.value.code in {400, 422}


@pytest.mark.parametrize("kind", [MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH])
@pytest.mark.parametrize("patch", [1, "x", None, 2.5])
def test_patch_of_another_type_is_refused(kind: str, patch: Any) -> None:
    with pytest.raises(ApiError) as e:
        patched(patch, kind)
    assert e.value.code == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


@given(OBJECT, OBJECT)
def test_merge_is_idempotent(current: dict[str, Any], patch: dict[str, Any]) -> None:
    once = merge(current, patch)
    assert merge(once, patch) == once


@given(OBJECT)
def test_empty_merge_changes_nothing(current: dict[str, Any]) -> None:
    assert merge(current, {}) == current
