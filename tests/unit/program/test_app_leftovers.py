"""Leftovers of another mode are removed eventually, even after errors."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from kubeproxy.backends import leftovers
from kubeproxy.backends.mode import Mode
from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.xtables.xtables import SavedTable
from kubeproxy.program import app
from kubeproxy.setup import modes


def test_a_failed_removal_is_retried_and_logged_once(monkeypatch, caplog):
    """As when another program holds the iptables lock: stale rules would remain in effect until a restart."""
    answers = [["held"], ["held"], ["held", "other"], []]
    monkeypatch.setattr(modes, "remove_others", lambda mode: answers.pop(0))
    asyncio.run(app.remove_others(modes.named("nftables"), Backoff(0.001, 0.001)))
    assert answers == []
    assert [record.getMessage().rpartition("=")[2] for record in caplog.records] == ["'held'", "'other'"]


def test_a_variant_that_cannot_be_looked_up_does_not_end_the_proxy(monkeypatch):
    def keeps(*_):
        raise Unsupported("no ip6tables works")

    monkeypatch.setattr(leftovers.xtables, "installed", lambda: ["ip6tables-nft"])
    monkeypatch.setattr(leftovers.xtables, "commands", lambda _: Mock(uses_nft=False))
    monkeypatch.setattr(leftovers.xtables, "tables", lambda _: [SavedTable("nat", ("KUBE-SERVICES",), ())])
    assert leftovers.remove_iptables_rules(keeps) == ["no ip6tables works"]


def test_a_failure_of_two_modes_is_reported_once(monkeypatch):
    monkeypatch.setattr(Mode, "cleanup", lambda mode, keeps: ["iptables-legacy: Permission denied"])
    assert modes.remove_others(modes.named("nftables")) == ["iptables-legacy: Permission denied"]
