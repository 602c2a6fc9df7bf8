"""A Snapshot of a planner, for tests of what is answered from it."""

from __future__ import annotations

from types import SimpleNamespace

from kubeproxy.ask.offline import Planned
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.model.plan import Habits


def snapshot(planner, local=None, mode=None, **more) -> Snapshot:
    """Of this planner, on a node with these packed addresses by family."""
    planned = Planned(planner, local or {})
    mode = mode or SimpleNamespace(name="nftables", habits=Habits())
    made = Snapshot(build_options(parse([])), mode, planned, planned, lambda: None, 0.0)
    return made._replace(**more)
