"""Removes what iptables mode, ours or the Go kube-proxy's, left on a node."""

from __future__ import annotations

from kubeproxy.backends.leftovers import remove_iptables_rules


def cleanup() -> list[str]:
    """Remove the rules; return what could not be removed."""
    return remove_iptables_rules()
