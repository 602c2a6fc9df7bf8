"""What questions are asked of: the plans of a node, the mode that translates them, and what the node itself is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a command that asks a running proxy needs neither
    from kubeproxy.backends.mode import Mode
    from kubeproxy.model.addresses import Family
    from kubeproxy.model.planner import Planner


class Subject(NamedTuple):
    """A node as the proxy on it sees it, or as one would. `local` returns the node's packed addresses by family."""

    planner: Planner
    mode: Mode
    local: Callable[[], Mapping[Family, Sequence[bytes]]]
