"""These tests do not read tables of legacy iptables, which other programs may have created on the host."""

from __future__ import annotations

import pytest

from kubeproxy.meaning import found


@pytest.fixture(autouse=True)
def _without_legacy_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "legacy_tables", lambda _: [])
