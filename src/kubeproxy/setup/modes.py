"""Finds proxy modes by name, and removes the rules of other modes. The list of modes is in config/modes.py."""

from __future__ import annotations

from importlib import import_module

from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import MODES
from kubeproxy.errors import Unsupported


def named(name: str) -> Mode:
    """Return the mode with this name. Raises Unsupported if this version does not have it."""
    if name not in MODES:
        raise Unsupported(f"mode: {name} is not in this version; use one of {', '.join(MODES)}")
    mode: Mode = import_module(f"kubeproxy.backends.{name}").MODE
    return mode


def every() -> list[Mode]:
    """Return all modes."""
    return [named(name) for name in MODES]


def interfaces() -> frozenset[str]:
    """Return the interfaces to which any mode adds addresses of Services; such an interface may remain after a change
    of the mode."""
    return frozenset(mode.interface for mode in every() if mode.interface)


def remove_others(current: Mode) -> list[str]:
    """Remove the rules of other modes and of another kube-proxy from this node; return the failures."""
    running = current.operations()
    failures = [failure for mode in every() if mode.name != current.name for failure in mode.cleanup(running.keeps)]
    # Two modes may report the same failure.
    return list(dict.fromkeys([*failures, *running.remove_displaced()]))


def clean_up() -> list[str]:
    """Remove the rules of all modes from the kernel; return the failures."""
    return [failure for mode in every() for failure in mode.cleanup()]
