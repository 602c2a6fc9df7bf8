"""Removes the tables of nftables mode, which have the same names in this program and in the Go kube-proxy."""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.leftovers import table_traces
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing
from kubeproxy.backends.nftables.layout import SCRATCH, TABLE, parse_chain_name
from kubeproxy.kernel.nftables.messages import remove_table

_WORDS: Final = {
    "services": "finds the Service of this address",
    "nodeports": "finds the Service of this NodePort",
    "cluster": "the address is a cluster IP",
    "external": "the address is external, and its connections are masqueraded",
    "policy-local": "the Service's policy is Local",
    "nodeport-external": "connections to this NodePort are masqueraded",
    "nodeport-policy-local": "the NodePort's policy is Local",
    "put-port-back": "restores the packet's port",
    "masquerading": "masquerades packets with the mark",
    "firewall-check": "checks the client against the source ranges",
    "source-ranges": "checks the client against the source ranges",
    "source-allowed": "the source ranges admit the client",
    "service-endpoints-check": "checks whether this address has endpoints",
    "nodeport-endpoints-check": "checks whether this NodePort has endpoints",
    "cluster-ips-check": "checks whether a cluster IP has this port",
    "localhost-nodeports-check": "NodePorts do not answer on loopback",
    "refuse-localhost": "NodePorts do not answer on loopback",
    "fast-forward": "the next packets of a long connection skip all rules",
    "gone-endpoints-check": "checks whether the connection's endpoint is deleted",
    "reset-gone": "the connection's endpoint is deleted: reset",
    "ranges": "finds the Service of this address and range of ports",
    "range-sources": "checks the client against the source ranges",
    "range-endpoints-check": "checks whether this address has endpoints",
    "range-go": "an endpoint is picked",
    "range-out": "an endpoint is picked",
    "session-choose": "an endpoint is picked",
    "refuse": "no endpoint, or no such port",
    "nat-prerouting": "for incoming packets",
    "nat-output": "for packets from this node",
    "nat-postrouting": "for outgoing packets",
    "filter-input": "for packets to this node",
    "filter-forward": "for forwarded packets",
    "filter-output": "for packets from this node",
    "filter-prerouting-pre-dnat": "for incoming packets",
    "filter-output-pre-dnat": "for packets from this node",
}
_PICKED: Final = "an endpoint is picked"
_STICKY: Final = "picks the client's former endpoint or another endpoint"


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove the tables; return the failures."""
    return remove_table(TABLE) + remove_table(SCRATCH)


def traces(sight: Sight, owns: Owns) -> list[Trace]:  # noqa: ARG001 - no chains of iptables
    """Return a trace for each of our tables in the kernel."""
    return table_traces(sight, TABLE)


def decision(table: str, chain: str) -> str | None:
    """Return the description of a chain; None if the chain is not ours."""
    if table != TABLE:
        return None
    if (words := _WORDS.get(chain) or _WORDS.get(chain.removeprefix("range-"))) is not None:
        return words
    name = parse_chain_name(chain)
    if chain.endswith("local-affinity") or chain.startswith("session-go") or (name is not None and name.affinity):
        return _STICKY
    return _PICKED if "pick" in chain or "try" in chain or name is not None else "kube-proxy's own"
