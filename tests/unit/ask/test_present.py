"""Findings of `why` about the kernel's state for its answer."""

from __future__ import annotations

from types import SimpleNamespace

from kubeproxy.ask.finding import Severity
from kubeproxy.ask.kernel import present
from kubeproxy.ask.why import Target, Why
from kubeproxy.backends.state import Finding, Kind


def test_a_missing_frontend_is_the_error_and_not_the_endpoints_that_are_there():
    ends = tuple(Target(f"10.0.0.{end}:80", 0.5, masqueraded=False) for end in (2, 3))
    why = Why(source="10.0.0.9", destination="10.96.0.1:80/tcp", outcome="forwarded", client_sees="", endpoints=ends)
    frontend = Finding(("default", "web"), Kind.MISSING, "10.96.0.1:80/tcp", "map cluster-services", "forwarded")
    gone = Finding(("default", "web"), Kind.MISSING, "endpoint 10.0.0.2:80 of 10.96.0.1:80/tcp", "map endpoints")
    facts = SimpleNamespace(mode="nftables")
    marks = [(one.severity, one.what[:21]) for one in present._lines(why, facts, [frontend])]
    assert marks == [(Severity.FINE, "the kernel has 2 of 2"), (Severity.BROKEN, "default/web: missing:")]
    (first, _) = present._lines(why, facts, [gone])
    assert (first.severity, first.what) == (Severity.BROKEN, "the kernel has 1 of 2 endpoints (read now)")
