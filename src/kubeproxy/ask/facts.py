"""The values of a Desk's answers. The socket transfers these values as msgpack; proxy and command must have the same
version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kubeproxy.api.source import Reach
from kubeproxy.config.load import decode
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.objects import Node, Service
from kubeproxy.model.plan import Globals, Problem, ServiceName, ServicePlan


class Facts(Struct, frozen=True, kw_only=True):
    """The facts about the proxy as a whole."""

    version: str
    pid: int
    started: float  # seconds since the epoch
    mode: str
    config_file: str  # '' for none
    master: str
    manifests: str
    config: Mapping[str, Any]  # in the form of a configuration file
    world: Globals
    standings: tuple[FamilyStanding, ...]
    unready: Mapping[str, str]  # reasons, by name of the readiness check
    listed: bool = True  # all Services and EndpointSlices were listed once
    awaits: str = ""  # the missing Node without which the proxy writes nothing, as text; '' for none
    services: int
    endpoint_slices: int
    reach: Reach | None  # None if the source is a folder
    began: Mapping[str, float] = {}  # start times of the present problems, as in Journal.began
    node: Node | None  # this proxy's Node, or None if it never existed
    node_deleted: bool = False  # the Node was deleted while the proxy ran

    @property
    def writes(self) -> bool:
        """Whether the proxy has received all lists and its Node, and can write rules."""
        return self.listed and not self.awaits

    def configuration(self) -> KubeProxyConfiguration:
        """Return the running configuration, decoded."""
        tree = {name: value for name, value in self.config.items() if name not in {"apiVersion", "kind"}}
        return decode(tree).config


class ProgrammedService(Struct, frozen=True, kw_only=True):
    """The state of a Service in the proxy."""

    name: ServiceName
    state: str  # as in /debug/state
    reason: str = ""
    version: str | None  # the Service's resourceVersion, or None for a deleted Service with rules in the kernel
    slices: Mapping[str, str | None]  # the resourceVersions of its EndpointSlices by name
    plans: tuple[ServicePlan, ...]  # the last plans of all families that the kernel accepted
    wanted: tuple[ServicePlan, ...] | None = None  # the desired plans, or None if equal to `plans`
    problems: tuple[Problem, ...] = ()
    cause: str = ""  # the reason why ports have no available endpoint, as in listing.cause


class NodeListener(Struct, frozen=True):
    """A port on which the proxy itself listens for a Service. An address of zeros stands for all addresses."""

    service: str  # NAMESPACE/NAME
    field: str
    addresses: tuple[bytes, ...]
    port: int


class Objects(Struct, frozen=True):
    """The inputs of a Service's plans: the Service (None if only slices refer to it), and its slices by name."""

    name: ServiceName
    service: Service | None
    slices: Mapping[str, Slice]
