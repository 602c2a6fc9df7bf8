"""Authorizes requests by RBAC with the rules of kube-apiserver, and records granted and denied requests.

A request is allowed only if a binding gives the user a role that allows the request. Pure. Source: rbac/v1 and
pkg/registry/rbac/validation of Kubernetes; aggregation and nonResourceURLs are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kubeproxy.errors import ConfigError

Json = dict[str, Any]

_RULE_FIELDS = {"apiGroups", "resources", "verbs", "resourceNames"}


class Request(NamedTuple):
    """A request to authorize. `resource` is "nodes" or "nodes/status"; the namespace is '' for all namespaces and for
    none."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str

    def __str__(self) -> str:
        what = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.user}: {self.verb} {what} {self.namespace}/{self.name}"


class Grant(NamedTuple):
    """The smallest part of a rule: one verb on one resource of one group, as written in the rule."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


class _Bound(NamedTuple):
    """One role of one user; it applies in `namespace`, '' for all namespaces."""

    namespace: str
    grants: tuple[tuple[Grant, frozenset[str]], ...]


class Rbac:
    """Roles and bindings. `used` are the grants that allowed a request, `denied` the requests that no grant allowed."""

    def __init__(self, objects: Iterable[Json]) -> None:
        """Add the objects of rbac.authorization.k8s.io; other objects are ignored. Raises ConfigError."""
        found = [o for o in objects if str(o.get("apiVersion", "")).startswith("rbac.authorization.k8s.io/")]
        roles = {(o["kind"], _place(o)): o for o in found if o["kind"] in {"Role", "ClusterRole"}}
        self._bound: dict[str, list[_Bound]] = {}
        self.used: set[Grant] = set()
        self.denied: list[Request] = []
        for binding in found:
            if binding["kind"] in {"RoleBinding", "ClusterRoleBinding"}:
                self._bind(binding, roles)

    def _bind(self, binding: Json, roles: dict[tuple[str, tuple[str, str]], Json]) -> None:
        namespace = _place(binding)[0]
        wanted = binding["roleRef"]
        place = (namespace if wanted["kind"] == "Role" else "", wanted["name"])
        role = roles.get((wanted["kind"], place))
        if role is None:
            raise ConfigError(f"{binding['metadata']['name']}: roleRef: there is no {wanted['kind']} {wanted['name']}")
        bound = _Bound(namespace, tuple(_grants(role)))
        for subject in binding.get("subjects") or ():
            self._bound.setdefault(_user(subject), []).append(bound)

    def granted(self, user: str) -> set[Grant]:
        """Return all grants of a user."""
        return {grant for bound in self._bound.get(user, ()) for grant, _ in bound.grants}

    def allows(self, request: Request) -> bool:
        """Return whether a request is allowed; record the request."""
        allowed = False
        for bound in self._bound.get(request.user, ()):
            if bound.namespace in {"", request.namespace}:
                for grant, names in bound.grants:
                    if _covers(grant, names, request):
                        self.used.add(grant)
                        allowed = True
        if not allowed:
            self.denied.append(request)
        return allowed


def _place(obj: Json) -> tuple[str, str]:
    namespaced = not obj["kind"].startswith("Cluster")
    return (obj["metadata"].get("namespace", "default") if namespaced else "", obj["metadata"]["name"])


def _user(subject: Json) -> str:
    if subject["kind"] == "ServiceAccount":
        return f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    if subject["kind"] == "User":
        return str(subject["name"])
    raise ConfigError(f"subjects: the lab knows no {subject['kind']}")


def _grants(role: Json) -> Iterable[tuple[Grant, frozenset[str]]]:
    for index, rule in enumerate(role.get("rules") or ()):
        if unknown := rule.keys() - _RULE_FIELDS:
            where = f"{role['metadata']['name']}: rules[{index}]"
            raise ConfigError(f"{where}: the lab knows no {', '.join(sorted(unknown))}")
        names = frozenset(rule.get("resourceNames") or ())
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield Grant(group, resource, verb), names


def _covers(grant: Grant, names: frozenset[str], request: Request) -> bool:
    return (
        grant.group in {"*", request.group}
        and grant.resource in {"*", request.resource}
        and grant.verb in {"*", request.verb}
        and (not names or request.name in names)
    )
