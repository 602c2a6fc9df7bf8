"""A kernel that refuses changes makes the node unhealthy after a time, with or without pending changes."""

from __future__ import annotations

from unittest.mock import Mock

from kubeproxy.engine.observer import Commit
from kubeproxy.errors import ApplyError
from kubeproxy.model.addresses import Family
from kubeproxy.report.health import ProxyHealth
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.report.reporter import Reporter


def test_a_repair_that_fails_for_two_sync_periods_is_unhealthy():
    now = [0.0]
    metrics = ProxyMetrics()
    health = ProxyHealth(metrics, 30.0, clock=lambda: now[0])
    reporter = Reporter(metrics, health, Mock(), Mock(), Mock(), Mock())
    reporter.committed(Commit(Family.IPV4, full=True))
    reporter.refused(Family.IPV4, ApplyError("flock (pid 42) has held the iptables lock for more than 5 s"))
    assert health.healthy()
    now[0] = 60.0
    reporter.refused(Family.IPV4, ApplyError("the same"))
    assert not health.healthy()
    reporter.committed(Commit(Family.IPV4, full=True))
    assert health.healthy()
