"""What our chains decide, in words: for who reads a trace of the kernel's."""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.nftables.layout import TABLE, parse_chain_name

_WORDS: Final = {
    "services": "which Service has this address",
    "nodeports": "which Service has this NodePort",
    "cluster": "it is a cluster IP",
    "external": "it is an address for clients from outside, masqueraded",
    "policy-local": "its policy is Local",
    "nodeport-external": "it is a NodePort, masqueraded",
    "nodeport-policy-local": "it is a NodePort whose policy is Local",
    "put-port-back": "the packet has its port again, and its endpoint is picked",
    "masquerading": "whether the source becomes this node's",
    "firewall-check": "whether the source ranges let the client in",
    "source-ranges": "whether the source ranges let the client in",
    "source-allowed": "the source ranges let the client in",
    "service-endpoints-check": "whether somebody serves this address",
    "nodeport-endpoints-check": "whether somebody serves this NodePort",
    "cluster-ips-check": "whether a cluster IP has this port",
    "localhost-nodeports-check": "NodePorts do not answer on loopback",
    "refuse-localhost": "NodePorts do not answer on loopback",
    "fast-forward": "it has lasted: what follows passes no rule",
    "gone-endpoints-check": "whether the connection's endpoint is gone",
    "reset-gone": "its endpoint is gone: reset",
    "refuse": "nobody serves it: refused",
    "nat-prerouting": "of what comes in",
    "nat-output": "of what this node sends",
    "nat-postrouting": "of what leaves",
    "filter-input": "of what is for this node",
    "filter-forward": "of what is passed on",
    "filter-output": "of what this node sends",
    "filter-prerouting-pre-dnat": "of what comes in",
    "filter-output-pre-dnat": "of what this node sends",
}
_PICKED: Final = "an endpoint is picked"
_STICKY: Final = "the endpoint that had the client before, or another one"


def decision(table: str, chain: str) -> str | None:
    """Return what a chain decides, None for one that is not ours."""
    if table != TABLE:
        return None
    if (words := _WORDS.get(chain)) is not None:
        return words
    name = parse_chain_name(chain)
    if chain.endswith("local-affinity") or (name is not None and name.affinity):
        return _STICKY
    return _PICKED if "pick" in chain or "try" in chain or name is not None else "kube-proxy's own"
