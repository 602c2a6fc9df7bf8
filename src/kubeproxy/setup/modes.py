"""The proxy modes, and what is left of those that do not run. The list of them is in config/modes.py."""

from __future__ import annotations

from importlib import import_module

from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import MODES
from kubeproxy.errors import Unsupported


def named(name: str) -> Mode:
    """Return a mode. Raises Unsupported for one that this version does not have."""
    if name not in MODES:
        raise Unsupported(f"mode: {name} is not in this version; use one of {', '.join(MODES)}")
    mode: Mode = import_module(f"kubeproxy.backends.{name}").MODE
    return mode


def every() -> list[Mode]:
    """Return all modes."""
    return [named(name) for name in MODES]


def interfaces() -> frozenset[str]:
    """Return the interfaces that carry the addresses of Services: they may still be there when another mode runs."""
    return frozenset(mode.interface for mode in every() if mode.interface)


def remove_others(current: Mode) -> list[str]:
    """Remove what other modes, or another kube-proxy, left on this node; return what could not be removed."""
    running = current.operations()
    failures = [failure for mode in every() if mode.name != current.name for failure in mode.cleanup(running.keeps)]
    # Two modes may fail at the same rules.
    return list(dict.fromkeys([*failures, *running.remove_strays()]))


def clean_up() -> list[str]:
    """Remove what any mode put into the kernel; return what could not be removed."""
    return [failure for mode in every() for failure in mode.cleanup()]
