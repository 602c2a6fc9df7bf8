"""Removes the tables that userspace mode left on a node."""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.leftovers import table_traces
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing
from kubeproxy.backends.userspace.ruleset import TABLE
from kubeproxy.kernel.nftables.messages import remove_table

_WORDS: Final = {
    "nat-prerouting": "for incoming packets",
    "nat-output": "picks the proxy's listener for packets of this node",
    "filter-prerouting": "for incoming packets",
    "filter-output": "for packets of this node",
    "filter-input": "blocks direct access to a listener",
    "firewall": "checks the client against the source ranges",
}
_PREFIXES: Final = {"carry-": "picks the proxy's listener", "refuse-": "dropped or refused clients"}


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no chains of iptables
    """Remove our tables; return the failures."""
    return remove_table(TABLE)


def traces(sight: Sight, owns: Owns) -> list[Trace]:  # noqa: ARG001 - no chains of iptables
    """Return our tables in the kernel."""
    closed = "the rules lead to closed ports of the proxy: new connections to Services are refused"
    return [trace._replace(alone=closed) for trace in table_traces(sight, TABLE)]


def decision(table: str, chain: str) -> str | None:
    """Return the decision of a chain as a text, or None if the chain is not ours."""
    if table != TABLE:
        return None
    by_origin = next((words for prefix, words in _PREFIXES.items() if chain.startswith(prefix)), "kube-proxy's own")
    return _WORDS.get(chain, by_origin)
