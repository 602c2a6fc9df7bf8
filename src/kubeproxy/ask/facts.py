"""The values of a Desk's answers. The socket carries these values as msgpack, so proxy and command must have the same
version.
"""

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
    """The facts of the whole proxy.

    `started` is in seconds since the epoch. `unready` contains the reasons why the proxy is not ready, by check.
    `listed`: all Services and EndpointSlices were listed once. `awaits`: the reason why nothing is written before the
    Node is known, '' for none. `config` is the configuration in the form of a file, `config_file` its path, '' for
    none. `reach` is None if objects come from files. `node` is this proxy's Node, None if it does not exist.
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
    awaits: str = ""
    services: int
    endpoint_slices: int
    reach: Reach | None
    node: Node | None

    @property
    def writes(self) -> bool:
        """Whether the proxy has all lists and its Node, which it needs before it writes rules."""
        return self.listed and not self.awaits

    def configuration(self) -> KubeProxyConfiguration:
        """Return the running configuration, decoded."""
        tree = {name: value for name, value in self.config.items() if name not in {"apiVersion", "kind"}}
        return decode(tree).config


class ProgrammedService(Struct, frozen=True, kw_only=True):
    """The state of a Service in the proxy.

    `state` and `reason` are those of /debug/state. `version` is the resourceVersion of the Service, `slices` has those
    of its EndpointSlices by name. `plans` are the plans of all families that the kernel accepted last; `wanted` are the
    desired plans, None if equal. A deleted Service with rules in the kernel has no version.
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
    """The inputs of a Service's plans: the Service, None if only slices name it, and its slices by name."""

    name: ServiceName
    service: Service | None
    slices: Mapping[str, Slice]
