"""Engines without waiting: in all tests of this folder they retry and look for drift within milliseconds."""

import pytest

from kubeproxy.engine import backlog


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(backlog, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(backlog, "SLOWEST_RETRY", 0.004)
    monkeypatch.setattr(backlog, "INTERVAL", 0.002)
