"""The server's version and discovery: groups and resources, plain and aggregated; kubectl reads the aggregated form.
Pure."""

from __future__ import annotations

from lab.apiserver.resources import GROUPS, Resource, of_group
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
    """Return the aggregated discovery (KEP-3352) of the groups; the core group's name is empty."""
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
