"""OpenAPI versions 2 and 3 of the served kinds, made from the tables of schema.py. Pure.

kubectl up to 1.28 needs version 2 in protobuf for `apply` and `explain` (openapi_protobuf.py); later releases request
version 3, and version 2 if version 3 is not sufficient. Both versions contain the rules for patching and applying
fields (x-kubernetes-*). Unnamed fields of open structs are not included.
"""

from __future__ import annotations

import functools

from lab.apiserver.fieldtypes import ListOf, MapOf, Scalar, Struct, Type
from lab.apiserver.patching import APPLY_PATCH, FORMATS
from lab.apiserver.resources import GROUPS, RESOURCES, Resource, of_group
from lab.apiserver.schema import KINDS
from lab.apiserver.status import Json

# From these parameters kubectl detects that the server supports field validation, apply and dry run.
_WRITE = ("dryRun", "fieldManager", "fieldValidation")
_PARAMETERS = {"get": (), "post": _WRITE, "put": _WRITE, "patch": (*_WRITE, "force"), "delete": ("dryRun",)}
_META = {"ObjectMeta", "OwnerReference", "ManagedFieldsEntry"}
_NUMBERS = {"int32": ("integer", "int32"), "int64": ("integer", "int64")}
_TIMES = {"v1.Time", "v1.MicroTime"}


def base(group: str) -> str:
    """Return the path of a group's version without a leading slash: api/v1, apis/GROUP/v1."""
    return f"apis/{group}/v1" if group else "api/v1"


@functools.cache
def v2(version: str) -> Json:
    """/openapi/v2, of all groups; `version` is the server's."""
    definitions: Json = {}
    paths: Json = {}
    for resource in RESOURCES:
        name = _define(definitions, resource, "#/definitions/")
        reference = {"$ref": f"#/definitions/{name}"}
        consumes = {"post": ["*/*"], "put": ["*/*"], "patch": [*FORMATS, APPLY_PATCH]}
        for path, methods in _paths(resource).items():
            paths[path] = {
                method: _operation(resource, method)
                | {"parameters": [{"name": name, "in": "query", "type": "string"} for name in _PARAMETERS[method]]}
                | {"consumes": consumes.get(method, ["*/*"]), "produces": ["application/json"]}
                | {"responses": {"200": {"description": "OK", "schema": reference}}}
                for method in methods
            }
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes lab", "version": version},
        "paths": paths,
        "definitions": definitions,
    }


def v3_index() -> Json:
    """/openapi/v3."""
    return {"paths": {base(g): {"serverRelativeURL": f"/openapi/v3/{base(g)}"} for g in ("", *GROUPS)}}


@functools.cache
def v3(group: str, version: str) -> Json:
    """/openapi/v3/... of one group."""
    schemas: Json = {}
    paths: Json = {}
    for resource in of_group(group):
        name = _define(schemas, resource, "#/components/schemas/")
        schema = {"schema": {"$ref": f"#/components/schemas/{name}"}}
        formats = {"post": ("*/*",), "put": ("*/*",), "patch": (*FORMATS, APPLY_PATCH)}
        for path, methods in _paths(resource).items():
            paths[path] = {}
            for method in methods:
                operation = _operation(resource, method)
                string = {"type": "string"}
                operation["parameters"] = [{"name": n, "in": "query", "schema": string} for n in _PARAMETERS[method]]
                operation["responses"] = {"200": {"description": "OK", "content": {"application/json": schema}}}
                if method in formats:
                    operation["requestBody"] = {"content": dict.fromkeys(formats[method], schema)}
                paths[path][method] = operation
    info = {"title": "Kubernetes lab", "version": version}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _paths(resource: Resource) -> dict[str, tuple[str, ...]]:
    path = f"/{base(resource.group)}/" + ("namespaces/{namespace}/" if resource.namespaced else "") + resource.plural
    return {path: ("get", "post"), path + "/{name}": ("get", "put", "patch", "delete")}


def _operation(resource: Resource, method: str) -> Json:
    return {"x-kubernetes-action": method, "x-kubernetes-group-version-kind": _gvk(resource)}


def _gvk(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _define(definitions: Json, resource: Resource, at: str) -> str:
    """Add the kind of a resource, and the structs that it refers to, to definitions; return the name of the kind's
    definition."""
    package = f"io.k8s.api.{resource.group.partition('.')[0] or 'core'}.{resource.version}"
    struct = KINDS[resource.api_version, resource.kind]
    name = _Definitions(definitions, package, at).of(struct)
    definitions[name]["x-kubernetes-group-version-kind"] = [_gvk(resource)]
    return name


class _Definitions:
    """Adds structs to definitions, each once. `at` is the prefix of references."""

    def __init__(self, definitions: Json, package: str, at: str) -> None:
        self._definitions = definitions
        self._package = package
        self._at = at

    def of(self, struct: Struct) -> str:
        """Return the name of a struct's definition; add the definition if it is new."""
        short = struct.go.rpartition(".")[2]
        package = "io.k8s.apimachinery.pkg.apis.meta.v1" if short in _META else self._package
        name = f"{package}.{short}"
        if name not in self._definitions:
            definition: Json = {"type": "object", "description": f"{short} as the lab knows it"}
            self._definitions[name] = definition
            definition["properties"] = {key: self._schema(field) for key, field in struct.fields.items()}
            if struct.is_open:
                definition["x-kubernetes-preserve-unknown-fields"] = True
            if struct.is_atomic:
                definition["x-kubernetes-map-type"] = "atomic"
        return name

    def _schema(self, field: Type) -> Json:
        if isinstance(field, Scalar):
            return _scalar(field)
        if isinstance(field, ListOf):
            return {"type": "array", "items": self._schema(field.item)} | _list_marks(field)
        if isinstance(field, MapOf):
            mark = {"x-kubernetes-map-type": "atomic"} if field.is_atomic else {}
            return {"type": "object", "additionalProperties": self._schema(field.item)} | mark
        return {"$ref": self._at + self.of(field)}


def _scalar(field: Scalar) -> Json:
    if field.go == "intstr.IntOrString":
        return {"type": "string", "format": "int-or-string"}
    if field.go in _TIMES:
        return {"type": "string", "format": "date-time"}
    if field.go in _NUMBERS:
        return dict(zip(("type", "format"), _NUMBERS[field.go], strict=True))
    return {"type": "boolean" if field.go == "bool" else "string"}


def _list_marks(field: ListOf) -> Json:
    marks: Json = {"x-kubernetes-list-type": "map" if field.keys else "set" if field.is_set else "atomic"}
    if field.keys:
        marks["x-kubernetes-list-map-keys"] = list(field.keys)
    if field.merge_key:
        marks["x-kubernetes-patch-merge-key"] = field.merge_key
    if field.merge_key or field.is_set:
        marks["x-kubernetes-patch-strategy"] = "merge"
    return marks
