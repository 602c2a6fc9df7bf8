"""Selects the tests to run: those that a kube-proxy decides, by upstream's names; each omitted test has a reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from e2e.errors import E2EError

DECIDED: Final = (
    r"^\[sig-network\] (Services |Networking |Conntrack|KubeProxy|Traffic|Topology|EndpointSlice |Service CIDRs"
    r"|Connectivity|LoadBalancers|\[Feature:(IPv6DualStack|ServiceCIDRs)\])"
)
"""Regular expression of the names of tests that a kube-proxy decides."""

LEFT_OUT: Final[Mapping[str, str]] = {
    r"\[Flaky\]": "upstream marks it as unreliable",
    r"\[Disruptive\].*restarting|restarting .*\[Disruptive\]": "restarts a pod of the control plane or of kube-proxy: "
    "here they are processes",
    r"\[Disruptive\]": "deletes rules of a node over SSH",
    r"(?i)sctp": "needs SCTP sockets, which many kernels do not have",
    r"NFAcct": "reads the metrics of a kube-proxy that runs as a pod",
    r"finalizer": "tests the cloud's service controller",
    r"Internet": "the cluster has no Internet",
    r"iperf2": "measures throughput with an image that cannot be made here",
    r"using https": "the API server's proxy to a pod over TLS: no kube-proxy on the path",
    r"LoadBalancers ESIPP|GCE": "tests a certain cloud's load balancer",
    r"Migration": "tests the API server's allocation of addresses",
}
"""The reasons for omitting tests, by a pattern of their names; the first matching pattern counts."""

_SLOW: Final = (r"rolling update", r"LoadBalancers", r"\[Slow\]", r"affinity|Conntrack|up and down|Dual")
"""Long tests begin first, so that the last worker does not wait for one of them."""


def reason_left_out(name: str, reasons: Mapping[str, str] = LEFT_OUT) -> str:
    """Return the reason for omitting a test; "" if it runs."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, name)), "")


def choose(names: Iterable[str], focus: str = "") -> tuple[list[str], dict[str, str]]:
    """Return the tests to run, long ones first, and the omitted tests with reasons.

    A focus is searched in the names of all tests that a kube-proxy decides. Raises E2EError if no test remains.
    """
    decided = sorted({name for name in names if re.search(DECIDED, name) and re.search(focus, name)})
    left_out = {name: reason for name in decided if (reason := reason_left_out(name))}
    chosen = sorted((name for name in decided if name not in left_out), key=_rank)
    if not chosen:
        raise E2EError(f"FOCUS={focus}: no test to run; left out: {left_out or 'none'}")
    return chosen, left_out


def _rank(name: str) -> int:
    return next((rank for rank, pattern in enumerate(_SLOW) if re.search(pattern, name)), len(_SLOW))


def is_serial(name: str) -> bool:
    """Return whether a test must run alone."""
    return "[Serial]" in name or "[Disruptive]" in name


def pattern(name: str) -> str:
    """Return a regular expression of Go that matches only this name;

    Ginkgo searches it behind the name of the suite.
    """
    return f"(^| ){re.escape(name).replace(chr(92) + ' ', ' ')}$"
