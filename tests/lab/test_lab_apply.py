"""Server-side apply: the owners of fields, conflicts, and the removal of fields that no manager applies any more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.apiserver.fieldsets import decoded, encoded, paths_of, shown
from lab.apiserver.managers import Manager, Operation, Owners, apply_to
from lab.apiserver.schema import KINDS
from lab.apiserver.status import ApiError
from support.lab_client import Client, Json, with_server

SERVICES = "/api/v1/namespaces/default/services"
MAPS = "/api/v1/namespaces/default/configmaps"
SERVICE, CONFIG_MAP = KINDS["v1", "Service"], KINDS["v1", "ConfigMap"]
HTTP = {"name": "http", "port": 80, "targetPort": 8080}
DNS = {"name": "dns", "port": 53, "protocol": "UDP"}
TCP80, UDP53 = 'k:{"port":80,"protocol":"TCP"}', 'k:{"port":53,"protocol":"UDP"}'


def config(*ports: Json, name: str = "web", **spec: Any) -> Json:
    body: Json = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
    return body | {"spec": {"selector": {"app": "web"}, "ports": list(ports)} | spec}


def settings(**data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}


async def apply(client: Client, body: Json, manager: str = "one", more: str = "", path: str = "") -> tuple[int, Any]:
    plural = {"Service": SERVICES, "ConfigMap": MAPS}[body.get("kind", "Service")]
    where = path or f"{plural}/{body['metadata']['name']}"
    kind = {"Content-Type": "application/apply-patch+yaml"}
    return await client.call("PATCH", f"{where}?fieldManager={manager}{more}", body, kind)


def owners(obj: Json) -> dict[str, Json]:
    """Return fieldsV1 by "manager operation"."""
    return {f"{e['manager']} {e['operation']}": e["fieldsV1"] for e in obj["metadata"].get("managedFields", [])}


# -- paths


@pytest.mark.parametrize(
    ("kind", "obj", "fields"),
    [
        (
            SERVICE,
            config(HTTP, externalIPs=["192.0.2.1"]),
            {
                "f:spec": {
                    "f:externalIPs": {},
                    "f:ports": {TCP80: {".": {}, "f:name": {}, "f:port": {}, "f:targetPort": {}}},
                    "f:selector": {},
                }
            },
        ),
        (
            KINDS["v1", "Node"],
            {"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {"podCIDRs": ["10.0.0.0/24"], "taints": []}},
            {
                "f:metadata": {"f:labels": {"f:a": {}}},
                "f:spec": {"f:podCIDRs": {'v:"10.0.0.0/24"': {}}, "f:taints": {}},
            },
        ),
        (CONFIG_MAP, settings(a="1", b=""), {"f:data": {"f:a": {}, "f:b": {}}}),
        (
            KINDS["v1", "Pod"],
            {"spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}], "dnsPolicy": None}},
            {"f:spec": {"f:containers": {'k:{"name":"c"}': {".": {}, "f:name": {}, "f:resources": {}}}}},
        ),
    ],
)
def test_applied_fields_are_owned(kind, obj: Json, fields: Json) -> None:
    paths = paths_of(obj, kind).applied
    assert encoded(paths) == fields
    assert set(decoded(fields)) == paths


def test_paths_in_words() -> None:
    texts = {shown(path) for path in paths_of(config(HTTP), SERVICE).applied}
    assert texts == {
        ".spec.selector",
        '.spec.ports[port=80,protocol="TCP"]',
        '.spec.ports[port=80,protocol="TCP"].name',
        '.spec.ports[port=80,protocol="TCP"].port',
        '.spec.ports[port=80,protocol="TCP"].targetPort',
    }
    (cidr,) = paths_of({"spec": {"podCIDRs": ["10.0.0.0/24"]}}, KINDS["v1", "Node"]).applied
    assert shown(cidr) == '.spec.podCIDRs[="10.0.0.0/24"]'


# without a server: any history of applies

keys = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), keys), min_size=1, max_size=6))
def test_any_history_of_forced_applies(history: list[tuple[str, dict[str, str]]]) -> None:
    """The object has the fields of each manager's last apply; a field has the value of the last apply."""
    live: Json = {"metadata": {"name": "c"}}
    last: dict[str, dict[str, str]] = {}
    for name, data in history:
        who = Manager(name, Operation.APPLY, "v1")
        state = Owners(live["metadata"].get("managedFields") or [], "now")
        live = apply_to(live, {"data": data}, CONFIG_MAP, state, who, force=True)
        live["metadata"]["managedFields"] = state.entries()
        # A manager that another one overrides does not own the key any more; the key stays when the manager omits it.
        last = {n: {k: v for k, v in d.items() if n == name or data.get(k, v) == v} for n, d in last.items()}
        last[name] = data
        assert live.get("data", {}) == {k: v for d in last.values() for k, v in d.items()}
        owned = {e["manager"]: set(e["fieldsV1"].get("f:data", {})) for e in live["metadata"]["managedFields"]}
        assert owned == {n: {f"f:{k}" for k in d} for n, d in last.items() if d}


@given(keys, keys)
def test_a_conflict_is_another_value_of_anothers_field(theirs: dict[str, str], ours: dict[str, str]) -> None:
    live: Json = {"metadata": {"name": "c"}, "data": dict(theirs)}
    entry = {"manager": "x", "operation": "Update", "apiVersion": "v1"}
    entry |= {"fieldsV1": {"f:data": {f"f:{k}": {} for k in theirs}}}
    state = Owners([entry], "now")
    who = Manager("one", Operation.APPLY, "v1")
    conflicts = sorted(k for k in ours if theirs.get(k, ours[k]) != ours[k])
    if conflicts:
        with pytest.raises(ApiError) as caught:
            apply_to(live, {"data": ours}, CONFIG_MAP, state, who, force=False)
        assert [cause["field"] for cause in caught.value.body["details"]["causes"]] == [f".data.{k}" for k in conflicts]
    else:
        assert apply_to(live, {"data": ours}, CONFIG_MAP, state, who, force=False)["data"] == theirs | ours


ORDERS = [
    ("ab", "ab", "ab"),
    ("ab", "ba", "ba"),
    ("abc", "c", "abc"),
    ("abc", "ca", "bca"),
    ("ab", "xa", "xab"),
    ("ab", "bx", "abx"),
    ("", "ba", "ba"),
]


@pytest.mark.parametrize(("there", "applied", "result"), ORDERS)
def test_the_applied_order_counts_and_others_keep_their_place(there: str, applied: str, result: str) -> None:
    numbers = {name: number for number, name in enumerate("abcx", 1)}

    def ports(names: str) -> Json:
        return {"spec": {"ports": [{"port": numbers[n], "protocol": "TCP"} for n in names]}}

    state = Owners([], "now")
    made = apply_to(ports(there), ports(applied), SERVICE, state, Manager("one", Operation.APPLY, "v1"), force=False)
    assert made == ports(result)


# over HTTP


def test_applying_creates_changes_and_leaves_alone() -> None:
    async def test(client: Client) -> None:
        status, made = await apply(client, config(HTTP, DNS))
        assert status == 201
        assert made["spec"]["type"] == "ClusterIP"
        port = {".": {}, "f:name": {}, "f:port": {}}
        wanted = {"f:ports": {TCP80: port | {"f:targetPort": {}}, UDP53: port | {"f:protocol": {}}}, "f:selector": {}}
        assert owners(made) == {"one Apply": {"f:spec": wanted}}
        status, again = await apply(client, config(HTTP, DNS))
        assert (status, again) == (200, made)
        status, less = await apply(client, config(HTTP | {"targetPort": 8081}))
        assert [(p["port"], p["targetPort"]) for p in less["spec"]["ports"]] == [(80, 8081)]
        assert less["spec"]["clusterIP"] == made["spec"]["clusterIP"]
        assert less["metadata"]["managedFields"][0]["time"] >= made["metadata"]["managedFields"][0]["time"]

    with_server(test)


def test_two_appliers_share_equal_values() -> None:
    async def test(client: Client) -> None:
        await apply(client, settings(a="1", b="2"))
        status, both = await apply(client, settings(b="2", c="3"), "two")
        assert (status, both["data"]) == (200, {"a": "1", "b": "2", "c": "3"})
        _, left = await apply(client, settings(a="1"))
        assert left["data"] == {"a": "1", "b": "2", "c": "3"}, "b is the other's still"
        _, left = await apply(client, settings(c="3"), "two")
        assert left["data"] == {"a": "1", "c": "3"}

    with_server(test)


def test_a_conflict_names_manager_and_field_and_can_be_forced() -> None:
    async def test(client: Client) -> None:
        await apply(client, settings(a="1", b="1"))
        status, said = await apply(client, settings(a="2"), "two")
        assert (status, said["reason"]) == (409, "Conflict")
        assert said["message"] == 'Apply failed with 1 conflict: conflict with "one": .data.a'
        cause = {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.a"}
        assert said["details"] == {"causes": [cause]}
        _, said = await apply(client, settings(a="2", b="2"), "two")
        assert said["message"] == 'Apply failed with 2 conflicts: conflicts with "one":\n- .data.a\n- .data.b'
        status, made = await apply(client, settings(a="2"), "two", "&force=true")
        assert (status, made["data"]) == (200, {"a": "2", "b": "1"})
        assert owners(made) == {"one Apply": {"f:data": {"f:b": {}}}, "two Apply": {"f:data": {"f:a": {}}}}

    with_server(test)


def test_another_manager_owns_its_changed_fields() -> None:
    async def test(client: Client) -> None:
        await apply(client, settings(a="1", b="1"))
        path = f"{MAPS}/c?fieldManager=editor"
        _, edited = await client.patch(path, {"data": {"a": "9"}}, "merge-patch")
        fields = {"f:data": {"f:a": {}}}
        assert owners(edited) == {"one Apply": {"f:data": {"f:b": {}}}, "editor Update": fields}
        status, said = await apply(client, settings(a="1", b="1"))
        assert status == 409
        assert said["message"] == 'Apply failed with 1 conflict: conflict with "editor" using v1: .data.a'
        _, gone = await client.patch(path, {"data": {"a": None, "b": None}}, "merge-patch")
        assert owners(gone) == {}
        _, made = await apply(client, settings(a="1"))
        assert made["data"] == {"a": "1"}

    with_server(test)


def test_status_is_applied_by_its_own_path_alone() -> None:
    async def test(client: Client) -> None:
        ingress = {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}
        body = config(HTTP, type="LoadBalancer") | {"status": ingress}
        _, made = await apply(client, body)
        assert made["status"] == {"loadBalancer": {}}
        status, balanced = await apply(client, body, "cloud", path=f"{SERVICES}/web/status")
        assert (status, balanced["status"]) == (200, ingress)
        assert owners(balanced)["cloud Apply"] == {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}
        entries = {e["manager"]: e.get("subresource") for e in balanced["metadata"]["managedFields"]}
        assert entries == {"one": None, "cloud": "status"}
        _, again = await apply(client, body)
        assert again["status"] == ingress
        status, _ = await apply(client, config(HTTP, name="none"), path=f"{SERVICES}/none/status")
        assert status == 404

    with_server(test)


def test_a_dry_run_changes_nothing() -> None:
    async def test(client: Client) -> None:
        status, made = await apply(client, settings(a="1"), more="&dryRun=All")
        assert (status, made["data"]) == (201, {"a": "1"})
        assert (await client.call("GET", f"{MAPS}/c"))[0] == 404
        await apply(client, settings(a="1"))
        _, changed = await apply(client, settings(a="2"), more="&dryRun=All")
        assert changed["data"] == {"a": "2"}
        assert (await client.call("GET", f"{MAPS}/c"))[1]["data"] == {"a": "1"}

    with_server(test)


NO_NAME = 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
EVENT = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"}}


@pytest.mark.parametrize(
    ("path", "body", "code", "message"),
    [
        (f"{MAPS}/c", settings(), 422, NO_NAME),
        (f"{MAPS}/c?fieldManager=x", {"metadata": {"name": "c"}}, 400, "apiVersion is missing"),
        (f"{MAPS}/c?fieldManager=x", settings() | {"kind": "Service"}, 400, "Service in kind does not match"),
        (f"{MAPS}/d?fieldManager=x", settings(), 400, "does not match the name on the URL"),
        (f"{MAPS}/c?fieldManager=x", b"a: [", 400, "error decoding YAML"),
        (f"{MAPS}/c?fieldManager=x", b"- a", 400, "it is no object"),
        (f"{MAPS}/c?fieldManager=x&fieldValidation=Strict", settings() | {"x": 1}, 400, 'unknown field "x"'),
        (f"{MAPS}/c?fieldManager=x", settings() | {"data": {"a": 1}}, 400, "cannot unmarshal number"),
        (
            f"{MAPS}/c?fieldManager=x",
            settings() | {"metadata": {"name": "c", "managedFields": [{}]}},
            400,
            "metadata.managedFields must be nil",
        ),
        (f"{SERVICES}/web?fieldManager=x", config(HTTP, HTTP | {"name": "b"}), 422, "Duplicate value"),
        (f"{EVENTS}/e?fieldManager=x", EVENT, 415, "application/apply-patch+yaml"),
    ],
)
def test_refusals_and_their_messages(path: str, body: Any, code: int, message: str) -> None:
    async def test(client: Client) -> None:
        status, said = await client.call("PATCH", path, body, {"Content-Type": "application/apply-patch+yaml"})
        assert (status, said["code"]) == (code, code)
        assert message in said["message"]

    with_server(test)


def test_yaml_is_read_as_kubernetes_does() -> None:
    head = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n"
    text = head + b"data:\n  when: 2026-01-01\n  at: 2026-01-01T00:00:00Z\n"

    async def test(client: Client) -> None:
        kind = {"Content-Type": "application/apply-patch+yaml"}
        status, made = await client.call("PATCH", f"{MAPS}/c?fieldManager=x", text, kind)
        assert (status, made["data"]) == (201, {"when": "2026-01-01", "at": "2026-01-01T00:00:00Z"})

    with_server(test)


def test_managed_fields_can_be_rewritten_and_given_up() -> None:
    """As kubectl does with the managers of client-side apply, and as a client does that wants no managed fields."""

    async def test(client: Client) -> None:
        path = f"{MAPS}/c?fieldManager=two"
        _, made = await apply(client, settings(a="1"))
        entries = [made["metadata"]["managedFields"][0] | {"manager": "other"}]
        patch = [{"op": "replace", "path": "/metadata/managedFields", "value": entries}]
        _, rewritten = await client.patch(path, patch, "json-patch")
        assert list(owners(rewritten)) == ["other Apply"]
        _, none = await client.patch(path, {"metadata": {"managedFields": [{}]}}, "merge-patch")
        assert "managedFields" not in none["metadata"]
        assert json.dumps(none["data"]) == '{"a": "1"}'

    with_server(test)
