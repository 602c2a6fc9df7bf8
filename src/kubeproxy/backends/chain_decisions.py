"""What the iptables chains of kube-proxy decide, in words: for who reads a trace of the kernel's. Both modes with such
chains share their names.
"""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.leftovers import CHAINS, PREFIXES

_TABLES: Final = frozenset({"nat", "filter", "mangle"})
_WORDS: Final = {
    "KUBE-SERVICES": "which Service has this address",
    "KUBE-EXTERNAL-SERVICES": "whether somebody serves this address",
    "KUBE-NODEPORTS": "which Service has this NodePort",
    "KUBE-NODE-PORT": "which Service has this NodePort",
    "KUBE-LOAD-BALANCER": "whether the source ranges let the client in",
    "KUBE-SOURCE-RANGES-FIREWALL": "whether the source ranges let the client in",
    "KUBE-PROXY-FIREWALL": "whether the source ranges let the client in",
    "KUBE-POSTROUTING": "whether the source becomes this node's",
    "KUBE-FORWARD": "connections of Services are passed on",
    "KUBE-MARK-MASQ": "the source is to become this node's",
    "KUBE-SVC-": "an endpoint is picked",
    "KUBE-SVL-": "an endpoint on this node is picked",
    "KUBE-SEP-": "the endpoint",
    "KUBE-EXT-": "it is an address for clients from outside",
    "KUBE-FW-": "whether the source ranges let the client in",
}


def decision(table: str, chain: str) -> str | None:
    """Return what a chain decides, None for one that is not a kube-proxy's."""
    if table not in _TABLES:
        return None
    key = next((prefix for prefix in PREFIXES if chain.startswith(prefix)), chain)
    if key in _WORDS:
        return _WORDS[key]
    return "kube-proxy's own" if key in CHAINS or key in PREFIXES else None
