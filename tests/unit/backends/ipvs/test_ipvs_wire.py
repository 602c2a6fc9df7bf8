"""The counter of the kernel's refusals in ipvs mode."""

from __future__ import annotations

import pytest

from kubeproxy.backends.ipvs.layout import Rules
from kubeproxy.backends.ipvs.wire import NodeKernel
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.registry import CounterMetric
from support.cluster_objects import world


def test_rules_that_iptables_restore_refuses_are_counted(monkeypatch):
    """kubeproxy_sync_proxy_rules_iptables_restore_failures_total: the Go kube-proxy's alerts use the same metric."""
    family, answers = Family.IPV4, [ApplyError("iptables-restore: line 3 failed"), None]

    def restore(commands, pieces):
        assert "".join(pieces).startswith("*nat\n")
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(Commands, "restore", restore)
    failures = CounterMetric()
    commands = Commands("iptables-nft", family, uses_nft=True, version=(1, 8, 9))
    kernel = NodeKernel(commands, None, None, None, failures)
    rules = Rules(family, world())
    kernel.write_rules(rules, (), ())
    assert failures.value == 0
    with pytest.raises(ApplyError, match="line 3"):
        kernel.write_rules(rules, ("nat",), ())
    kernel.write_rules(rules, ("nat",), ())
    assert failures.value == 1
