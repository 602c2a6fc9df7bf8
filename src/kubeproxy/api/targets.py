"""What is watched at the API server: the four resources, their paths and selectors. As kube-proxy v1.36 does."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kubeproxy.api.connection import LIST, OBJECT
from kubeproxy.model.objects import Resource

NO_PROXY_NAME: Final = "!service.kubernetes.io/service-proxy-name"
NO_HEADLESS: Final = "!service.kubernetes.io/headless"
NO_CLUSTER_IP_NONE: Final = "spec.clusterIP!=None"


class WatchTarget(Struct, frozen=True, kw_only=True):
    """What one reflector watches. `optional`: the server may lack it (404). `api_group` is for RBAC messages.

    `most` is how many bytes a list of it may have.
    """

    resource: Resource
    path: str
    api_group: str
    labels: str = ""
    fields: str = ""
    fields_needed: bool = False
    optional: bool = False
    most: int


def targets(node_name: str) -> tuple[WatchTarget, ...]:
    """Return what kube-proxy v1.36 watches (cmd/kube-proxy/app/server.go)."""
    return (
        WatchTarget(
            resource="services",
            most=LIST,
            path="/api/v1/services",
            api_group="",
            labels=NO_PROXY_NAME,
            fields=NO_CLUSTER_IP_NONE,
        ),
        WatchTarget(
            resource="endpointslices",
            most=LIST,
            path="/apis/discovery.k8s.io/v1/endpointslices",
            api_group="discovery.k8s.io",
            labels=NO_HEADLESS,
        ),
        WatchTarget(
            resource="nodes",
            most=OBJECT,
            path="/api/v1/nodes",
            api_group="",
            fields=f"metadata.name={node_name}",
            fields_needed=True,
        ),
        WatchTarget(
            resource="servicecidrs",
            most=LIST,
            path="/apis/networking.k8s.io/v1/servicecidrs",
            api_group="networking.k8s.io",
            optional=True,
        ),
    )
