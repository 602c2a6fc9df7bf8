"""Compiles a Service without returning to the event loop in between."""

from __future__ import annotations

from typing import Any

from kubeproxy.model.compile import compiling
from kubeproxy.model.plan import Compiled


def compile_service(*given: Any, **more: Any) -> Compiled:
    """Return the plans of a Service; see kubeproxy.model.compile.compiling."""
    steps = compiling(*given, **more)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Compiled = end.value
            return found
