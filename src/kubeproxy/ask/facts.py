"""The values that a Desk answers with, as they go over the socket in msgpack: both sides are of one version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kubeproxy.api.source import Reach
from kubeproxy.config.decode import decode
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.endpoints import Slice
from kubeproxy.model.objects import Node, Service
from kubeproxy.model.plan import Globals, Problem, ServiceName, ServicePlan


class Facts(Struct, frozen=True, kw_only=True):
    """What holds for the whole proxy. `started` is in seconds since the epoch; `unready` says why it is not ready, by
    part; `listed` whether all Services and EndpointSlices came once. `config` is the configuration as a file would have
    it, `config_file` its path, '' for none. `reach` is None where objects come from files; `node` is the Node of the
    world's name, if there is one.
    """

    version: str
    pid: int
    started: float
    mode: str
    config_file: str
    master: str
    manifests: str
    config: Mapping[str, Any]
    world: Globals
    standings: tuple[FamilyStanding, ...]
    unready: Mapping[str, str]
    listed: bool = True
    services: int
    endpoint_slices: int
    reach: Reach | None
    node: Node | None

    def configuration(self) -> KubeProxyConfiguration:
        """Return the configuration that the proxy runs with."""
        tree = {name: value for name, value in self.config.items() if name not in {"apiVersion", "kind"}}
        return decode(tree).config


class ProgrammedService(Struct, frozen=True, kw_only=True):
    """A Service as the proxy has it.

    `state` and `reason` are those of /debug/state. `version` is its resourceVersion, `slices` those of its
    EndpointSlices by name. `plans` are what the kernel last took, of all families; `wanted` what it is to have, None
    when that is the same. A Service that is gone, with rules that are not, has no version.
    """

    name: ServiceName
    state: str
    reason: str = ""
    version: str | None
    slices: Mapping[str, str | None]
    plans: tuple[ServicePlan, ...]
    wanted: tuple[ServicePlan, ...] | None = None
    problems: tuple[Problem, ...] = ()


class Objects(Struct, frozen=True):
    """What a Service's plans are made of: the Service, None when only slices name it, and its slices by name."""

    name: ServiceName
    service: Service | None
    slices: Mapping[str, Slice]
