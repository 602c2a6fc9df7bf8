"""The proxy modes by name, and what is left of the others. A mode's code is loaded only when it is asked for."""

from __future__ import annotations

from importlib import import_module

from kubeproxy.backends.leftovers import remove_iptables_rules
from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import MODES
from kubeproxy.errors import Unsupported


def load(name: str) -> Mode:
    """Return a mode. Raises Unsupported for one that this version does not have."""
    if name not in MODES:
        raise Unsupported(f"mode: {name} is not in this version; use one of {', '.join(MODES)}")
    mode: Mode = import_module(f"kubeproxy.backends.{name}.mode").MODE
    return mode


def remove_others(current: Mode) -> list[str]:
    """Remove what other modes, or another kube-proxy, left on this node; return what could not be removed."""
    # Chains of iptables are told apart one by one, as modes share names of them.
    others = [name for name in MODES if name not in (current.name, "iptables")]
    failures = [failure for name in others for failure in _cleaned(name)]
    # Two modes may fail at the same rules.
    return list(dict.fromkeys([*failures, *remove_iptables_rules(current.keeps)]))


def clean_up() -> list[str]:
    """Remove what any mode put into the kernel; return what could not be removed."""
    return [failure for name in MODES for failure in _cleaned(name)]


def _cleaned(name: str) -> list[str]:
    failures: list[str] = import_module(f"kubeproxy.backends.{name}.cleanup").cleanup()
    return failures
