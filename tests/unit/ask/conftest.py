"""These tests see no kube-proxy of the machine, no rules of other programs, and no tables of legacy iptables."""

from __future__ import annotations

import pytest

from kubeproxy.config.flags import BY_NAME
from kubeproxy.kernel import chains
from kubeproxy.kernel.proc import processes
from kubeproxy.meaning import found


@pytest.fixture(autouse=True)
def _without_programs_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "legacy_tables", lambda _: [])
    monkeypatch.setattr(chains, "chains", lambda *_: [])
    monkeypatch.setattr(chains, "iptables_chains", lambda _: [])
    monkeypatch.setattr(processes, "proxies", list)
    monkeypatch.setitem(BY_NAME, "control-socket", BY_NAME["control-socket"]._replace(default="/nowhere/control.sock"))
