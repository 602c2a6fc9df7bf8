"""The resources that the server supports: names, scope, verbs, subresources and selectable fields.

Contains only a table and its lookups. Source: the discovery of a real kube-apiserver 1.36.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
META_FIELDS = ("metadata.name", "metadata.namespace")


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of one API version; `storage` is the key of the stored objects (two versions may share it)."""

    plural: str
    singular: str
    kind: str
    group: str = ""
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ("status",)
    fields: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    version: str = "v1"
    generation: bool = field(default=False)
    returns_deleted: bool = field(default=False)

    @property
    def storage(self) -> str:
        """Return the key under which the objects are stored."""
        return self.plural

    @property
    def api_version(self) -> str:
        """Return the apiVersion of the objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def all_fields(self) -> tuple[str, ...]:
        """Return the fields that a fieldSelector may contain."""
        return META_FIELDS + self.fields


EVENT_FIELDS = (
    *(
        f"involvedObject.{f}"
        for f in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
    ),
    "reason",
    "reportingComponent",
    "type",
)

RESOURCES: tuple[Resource, ...] = (
    Resource("configmaps", "configmap", "ConfigMap", short_names=("cm",), subresources=()),
    Resource("endpoints", "endpoints", "Endpoints", short_names=("ep",), subresources=()),
    Resource("events", "event", "Event", short_names=("ev",), subresources=(), fields=EVENT_FIELDS),
    Resource(
        "namespaces",
        "namespace",
        "Namespace",
        namespaced=False,
        short_names=("ns",),
        subresources=("finalize", "status"),
        fields=("status.phase",),
        verbs=tuple(v for v in VERBS if v != "deletecollection"),
        returns_deleted=True,
    ),
    Resource("nodes", "node", "Node", namespaced=False, short_names=("no",), fields=("spec.unschedulable",)),
    Resource(
        "pods",
        "pod",
        "Pod",
        short_names=("po",),
        categories=("all",),
        fields=("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP"),
        returns_deleted=True,
    ),
    Resource(
        "replicationcontrollers",
        "replicationcontroller",
        "ReplicationController",
        short_names=("rc",),
        categories=("all",),
        subresources=("scale", "status"),
        fields=("status.replicas",),
        generation=True,
    ),
    Resource(
        "serviceaccounts",
        "serviceaccount",
        "ServiceAccount",
        short_names=("sa",),
        subresources=(),
        returns_deleted=True,
    ),
    Resource(
        "services",
        "service",
        "Service",
        short_names=("svc",),
        categories=("all",),
        fields=("spec.clusterIP", "spec.type"),
        returns_deleted=True,
    ),
    Resource("events", "event", "Event", "events.k8s.io", short_names=("ev",), subresources=(), fields=EVENT_FIELDS),
    Resource("servicecidrs", "servicecidr", "ServiceCIDR", "networking.k8s.io", namespaced=False),
    Resource("leases", "lease", "Lease", "coordination.k8s.io", subresources=()),
    Resource("endpointslices", "endpointslice", "EndpointSlice", "discovery.k8s.io", subresources=(), generation=True),
)

GROUPS: tuple[str, ...] = ("events.k8s.io", "networking.k8s.io", "coordination.k8s.io", "discovery.k8s.io")
_BY_PATH = {(r.group, r.version, r.plural): r for r in RESOURCES}
_BY_KIND = {(r.api_version, r.kind): r for r in RESOURCES}


def by_path(group: str, version: str, plural: str) -> Resource | None:
    """Return the resource of a URL, or None."""
    return _BY_PATH.get((group, version, plural))


def by_kind(api_version: str, kind: str) -> Resource | None:
    """Return the resource of an object's apiVersion and kind, or None."""
    return _BY_KIND.get((api_version, kind))


def by_plural(plural: str) -> Resource:
    """Return the first resource with a plural name; raises KeyError."""
    for resource in RESOURCES:
        if resource.plural == plural:
            return resource
    raise KeyError(plural)


def of_group(group: str) -> list[Resource]:
    """Return the resources of an API group, in the order of discovery."""
    return sorted((r for r in RESOURCES if r.group == group), key=lambda r: r.plural)
