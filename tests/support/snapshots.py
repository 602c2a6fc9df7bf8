"""A planner with some objects, and a Snapshot of the planner, for tests of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kubeproxy.ask.snapshot import Planned, Snapshot
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Replaced
from kubeproxy.model.objects import EndpointSlice, Service
from kubeproxy.model.plan import Globals, Habits
from kubeproxy.model.planner import Planner


def planner_of(globals_: Globals, *objects: Service | EndpointSlice) -> Planner:
    """Return a planner that has compiled these Services and EndpointSlices."""
    made = Planner(globals_)
    made.apply(
        [
            Replaced("services", [o for o in objects if isinstance(o, Service)]),
            Replaced("endpointslices", [o for o in objects if not isinstance(o, Service)]),
        ]
    )
    made.take()
    return made


def snapshot(
    planner: Planner, local: Mapping[Family, Sequence[bytes]] | None = None, mode: Any = None, **more: Any
) -> Snapshot:
    """Return a Snapshot of this planner, on a node with these packed addresses by family."""
    planned = Planned(planner, local or {})
    mode = mode or SimpleNamespace(name="nftables", habits=Habits())
    made = Snapshot(build_options(parse([])), mode, planned, planned, lambda: None, 0.0)
    return made._replace(**more)
