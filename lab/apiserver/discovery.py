"""What the server tells about itself: version, groups, resources (plain and aggregated), OpenAPI. Pure.

Enough for kubectl: its RESTMapper reads the aggregated form, `apply` looks in OpenAPI v3 for the fieldValidation
parameter and then leaves validation to the server, `explain` reads the schemas.
"""

from __future__ import annotations

from lab.apiserver.resources import GROUPS, Resource, of_group
from lab.apiserver.schema import KINDS, ListOf, MapOf, Scalar, Struct, Type
from lab.apiserver.status import Json

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
VERSION: Json = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.0+lab",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}


def _verbs(subresource: str) -> list[str]:
    return ["update"] if subresource == "finalize" else ["get", "patch", "update"]


def resource_list(group: str) -> Json:
    """/api/v1 or /apis/GROUP/v1."""
    resources: list[Json] = []
    for r in of_group(group):
        entry: Json = {"name": r.plural, "singularName": r.singular, "namespaced": r.namespaced, "kind": r.kind}
        entry["verbs"] = list(r.verbs)
        if r.short_names:
            entry["shortNames"] = list(r.short_names)
        if r.categories:
            entry["categories"] = list(r.categories)
        resources.append(entry)
        for sub in r.subresources:
            kind: Json = {"kind": r.kind}
            if sub == "scale":
                kind = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            entry = {"name": f"{r.plural}/{sub}", "singularName": "", "namespaced": r.namespaced}
            resources.append(entry | kind | {"verbs": _verbs(sub)})
    version = f"{group}/v1" if group else "v1"
    header: Json = {"kind": "APIResourceList"}
    if group:
        header["apiVersion"] = "v1"
    return header | {"groupVersion": version, "resources": resources}


def group(name: str) -> Json:
    """One entry of /apis."""
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def one_group(name: str) -> Json:
    """/apis/GROUP."""
    return {"kind": "APIGroup", "apiVersion": "v1"} | group(name)


def group_list() -> Json:
    """/apis."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(g) for g in GROUPS]}


def api_versions(address: str) -> Json:
    """/api; `address` is where this server listens."""
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def _aggregated_resource(r: Resource) -> Json:
    entry: Json = {
        "resource": r.plural,
        "responseKind": {"group": "", "version": "", "kind": r.kind},
        "scope": "Namespaced" if r.namespaced else "Cluster",
        "singularResource": r.singular,
        "verbs": list(r.verbs),
    }
    if r.short_names:
        entry["shortNames"] = list(r.short_names)
    if r.categories:
        entry["categories"] = list(r.categories)
    subresources: list[Json] = []
    for sub in r.subresources:
        kind = {"group": "", "version": "", "kind": r.kind}
        if sub == "scale":
            kind = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        subresources.append({"subresource": sub, "responseKind": kind, "verbs": _verbs(sub)})
    if subresources:
        entry["subresources"] = subresources
    return entry


def aggregated(groups: tuple[str, ...]) -> Json:
    """The aggregated discovery (KEP-3352) of the groups; the core group's name is empty."""
    items = [
        {
            "metadata": {"name": name} if name else {},
            "versions": [
                {
                    "version": "v1",
                    "resources": [_aggregated_resource(r) for r in of_group(name)],
                    "freshness": "Current",
                }
            ],
        }
        for name in groups
    ]
    header = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}}
    return header | {"items": items}


_JSON_TYPES = {"bool": "boolean", "int32": "integer", "int64": "integer"}


def _schema(type_: Type) -> Json:
    if isinstance(type_, Scalar):
        if type_.go == "intstr.IntOrString":
            return {"type": "string", "format": "int-or-string"}
        return {} if len(type_.json) > 2 else {"type": _JSON_TYPES.get(type_.go, "string")}
    if isinstance(type_, ListOf):
        return {"type": "array", "items": _schema(type_.item)}
    if isinstance(type_, MapOf):
        return {"type": "object", "additionalProperties": _schema(type_.item)}
    return _struct(type_)


def _struct(struct: Struct) -> Json:
    schema: Json = {"type": "object", "properties": {name: _schema(t) for name, t in struct.fields.items()}}
    if struct.is_open:
        schema["x-kubernetes-preserve-unknown-fields"] = True
    return schema


def _base(group_name: str) -> str:
    return f"apis/{group_name}/v1" if group_name else "api/v1"


def openapi_index() -> Json:
    """/openapi/v3."""
    return {"paths": {_base(g): {"serverRelativeURL": f"/openapi/v3/{_base(g)}"} for g in ("", *GROUPS)}}


def openapi(group_name: str) -> Json:
    """/openapi/v3/... of one group."""
    paths: Json = {}
    schemas: Json = {}
    for r in of_group(group_name):
        gvk = {"group": r.group, "version": r.version, "kind": r.kind}
        definition = f"io.k8s.api.{r.group or 'core'}.{r.version}.{r.kind}"
        schemas[definition] = _struct(KINDS[r.api_version, r.kind]) | {"x-kubernetes-group-version-kind": [gvk]}
        validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        answer = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{definition}"}}}}
        path = f"/{_base(group_name)}/" + ("namespaces/{namespace}/" if r.namespaced else "") + r.plural
        common = {"x-kubernetes-group-version-kind": gvk, "responses": {"200": answer}}
        write = common | {"parameters": [validation]}
        paths[path] = {"post": write | {"x-kubernetes-action": "post"}}
        paths[path + "/{name}"] = {
            "get": common | {"x-kubernetes-action": "get"},
            "put": write | {"x-kubernetes-action": "put"},
            "patch": write | {"x-kubernetes-action": "patch"},
        }
    info = {"title": "Kubernetes lab", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
