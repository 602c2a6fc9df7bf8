"""URL paths of resources. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lab.apiserver.resources import GROUPS, Resource, by_path
from lab.apiserver.status import unknown_resource
from lab.apiserver.store import Key


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a URL path: a resource, its namespace ('' for all namespaces or none), and optionally an object and
    a subresource."""

    resource: Resource
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> Key:
        """Return the object's key in the store."""
        return (self.namespace if self.resource.namespaced else "", self.name)

    @property
    def scope(self) -> str | None:
        """Return the namespace to list, None for all."""
        return self.namespace or None


def parse_path(path: str) -> Target | None:
    """The target of a path; None if it is not the path of a resource. Raises ApiError 404 for an unknown resource.

    /api/v1/[namespaces/NS/]PLURAL[/NAME[/SUBRESOURCE]], /apis/GROUP/v1/...
    """
    parts = path.strip("/").split("/")
    if parts[:2] == ["api", "v1"] and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3 and parts[1] in GROUPS and parts[2] == "v1":
        group, rest = parts[1], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource, *more = [*rest, "", ""] if len(rest) < 3 else rest
    resource = by_path(group, "v1", plural)
    known = resource is not None and not any(more) and (not subresource or subresource in resource.subresources)
    if resource is None or not known:
        raise unknown_resource()
    return Target(resource, namespace, name, subresource)
