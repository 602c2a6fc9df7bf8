"""RBAC and tokens of the lab's API server: permissions, the text of refusals, the expiry of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kubeproxy.errors import ConfigError
from lab.apiserver.authentication import Tokens
from lab.apiserver.authorization import Grant, Rbac, Request
from lab.apiserver.options import verb_of
from lab.apiserver.server import ServerConfig
from lab.volumes import ServiceAccountVolume, Volume
from support.lab_client import Client, with_server

Json = dict[str, Any]
RBAC = "rbac.authorization.k8s.io/v1"
USER = "system:serviceaccount:kube-system:kube-proxy"


def role(*rules: Json, kind: str = "ClusterRole", namespace: str = "") -> Json:
    metadata = {"name": "proxier"} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": RBAC, "kind": kind, "metadata": metadata, "rules": list(rules)}


def binding(kind: str = "ClusterRoleBinding", role_kind: str = "ClusterRole", namespace: str = "") -> Json:
    metadata = {"name": "proxier"} | ({"namespace": namespace} if namespace else {})
    subject = {"kind": "ServiceAccount", "name": "kube-proxy", "namespace": "kube-system"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": "proxier"}
    return {"apiVersion": RBAC, "kind": kind, "metadata": metadata, "roleRef": reference, "subjects": [subject]}


def rule(group: str = "", resource: str = "services", verb: str = "list", **more: Any) -> Json:
    return {"apiGroups": [group], "resources": [resource], "verbs": [verb], **more}


def asked(verb: str = "list", group: str = "", resource: str = "services", namespace: str = "", name: str = ""):
    return Request(USER, verb, group, resource, namespace, name)


CASES = {
    "the verb": ([role(rule()), binding()], asked(), True),
    "another verb": ([role(rule()), binding()], asked("watch"), False),
    "another group": ([role(rule()), binding()], asked(group="apps"), False),
    "another resource": ([role(rule()), binding()], asked(resource="secrets"), False),
    "a part of the resource": ([role(rule()), binding()], asked(resource="services/status"), False),
    "that part": ([role(rule(resource="services/status")), binding()], asked(resource="services/status"), True),
    "everything": ([role(rule("*", "*", "*")), binding()], asked("delete", "apps", "daemonsets"), True),
    "another user": ([role(rule()), binding()], asked()._replace(user="nobody"), False),
    "no binding": ([role(rule())], asked(), False),
    "the name": ([role(rule(verb="get", resourceNames=["a"])), binding()], asked("get", name="a"), True),
    "another name": ([role(rule(verb="get", resourceNames=["a"])), binding()], asked("get", name="b"), False),
    "a namespace": ([role(rule()), binding("RoleBinding", namespace="dev")], asked(namespace="dev"), True),
    "beyond it": ([role(rule()), binding("RoleBinding", namespace="dev")], asked(), False),
    "a namespaced role": (
        [role(rule(), kind="Role", namespace="dev"), binding("RoleBinding", "Role", "dev")],
        asked(namespace="dev"),
        True,
    ),
}


@pytest.mark.parametrize(("objects", "request_", "allowed"), CASES.values(), ids=CASES)
def test_rules(objects: list[Json], request_: Request, allowed: bool) -> None:
    rbac = Rbac([{"apiVersion": "v1", "kind": "ConfigMap"}, *objects])
    assert rbac.allows(request_) is allowed
    assert rbac.denied == ([] if allowed else [request_])


def test_used_grants_are_recorded() -> None:
    rbac = Rbac([role(rule(), rule(verb="watch")), binding()])
    assert rbac.granted(USER) == {Grant("", "services", "list"), Grant("", "services", "watch")}
    rbac.allows(asked("watch"))
    assert rbac.used == {Grant("", "services", "watch")}
    assert [str(grant) for grant in rbac.granted(USER) - rbac.used] == ["list services"]


@pytest.mark.parametrize(
    "objects",
    [[binding()], [role({"nonResourceURLs": ["/metrics"], "verbs": ["get"]}), binding()]],
    ids=["a role that is missing", "a rule that is not understood"],
)
def test_unsupported_objects_are_refused(objects: list[Json]) -> None:
    with pytest.raises(ConfigError, match="proxier"):
        Rbac(objects)


@pytest.mark.parametrize(
    ("method", "query", "name", "verb"),
    [
        ("GET", {}, "", "list"),
        ("GET", {"watch": "true"}, "", "watch"),
        ("GET", {"watch": "0"}, "", "list"),
        ("GET", {}, "a", "get"),
        ("POST", {}, "", "create"),
        ("PUT", {}, "a", "update"),
        ("PATCH", {}, "a", "patch"),
        ("DELETE", {}, "a", "delete"),
        ("DELETE", {}, "", "deletecollection"),
    ],
)
def test_verbs(method: str, query: dict[str, str], name: str, verb: str) -> None:
    assert verb_of(method, query, name) == verb


def test_a_refusal_is_worded_as_the_api_does() -> None:
    rbac = Rbac([role(rule()), binding()])

    async def test(client: Client) -> None:
        token = client.server.tokens.issue(USER)
        bearer = {"Authorization": f"Bearer {token}"}
        assert (await client.call("GET", "/api/v1/services", headers=bearer))[0] == 200
        assert (await client.call("GET", "/version", headers=bearer))[0] == 200
        status, body = await client.call("GET", "/api/v1/nodes/node-a", headers=bearer)
        wanted = (
            f'nodes "node-a" is forbidden: User "{USER}" cannot get resource "nodes" in API group "" '
            "at the cluster scope"
        )
        assert (status, body["reason"], body["message"]) == (403, "Forbidden", wanted)
        assert body["details"] == {"name": "node-a", "kind": "nodes"}
        assert [str(d) for d in rbac.denied] == [f"{USER}: get nodes /node-a"]
        assert (await client.call("GET", "/api/v1/services"))[0] == 401
        client.server.tokens.end(token, 0)
        assert (await client.call("GET", "/api/v1/services", headers=bearer))[0] == 401

    with_server(test, ServerConfig(rbac=rbac))


def test_an_old_token_is_good_for_its_grace() -> None:
    now = 100.0
    tokens = Tokens({}, lambda: now)
    header = f"Bearer {tokens.issue(USER)}"
    tokens.end(header.partition(" ")[2], 10)
    assert tokens.user_of(header) == USER
    now = 110.5
    assert tokens.user_of(header) is None
    assert tokens.refused == 1


def test_a_volume_changes_as_a_whole(tmp_path) -> None:
    volume = Volume(tmp_path / "config")
    volume.write({"config.conf": "a", "kubeconfig.conf": "b"})
    first = (volume.folder / "..data").resolve()
    assert (volume.folder / "config.conf").readlink().as_posix() == "..data/config.conf"
    volume.write({"config.conf": "c"})
    assert sorted(p.name for p in volume.folder.iterdir() if not p.name.startswith("..0")) == ["..data", "config.conf"]
    assert (volume.folder / "config.conf").read_text() == "c"
    assert not first.exists()


def test_a_service_account_rotates(tmp_path) -> None:
    (tmp_path / "ca.crt").write_text("PEM")
    tokens = Tokens({})
    account = ServiceAccountVolume(tmp_path / "account", tokens, USER, tmp_path / "ca.crt")
    old = (account.folder / "token").read_text()
    assert tokens.user_of(f"Bearer {old}") == USER
    account.rotate(grace=0)
    assert tokens.user_of(f"Bearer {old}") is None
    assert tokens.user_of(f"Bearer {(account.folder / 'token').read_text()}") == USER
    assert (account.folder / "namespace").read_text() == "kube-system"
