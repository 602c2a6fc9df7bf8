"""Removes what iptables mode, ours or the Go kube-proxy's, left on a node."""

from __future__ import annotations

from kubeproxy.backends.leftovers import remove_iptables_rules
from kubeproxy.backends.mode import Keeps, keeps_nothing


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:
    """Remove the rules, but for chains that another mode keeps; return what could not be removed."""
    return remove_iptables_rules(keeps)
