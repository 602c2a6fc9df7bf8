"""Engines that do not wait: every test of this folder has retries and looks for drift within milliseconds."""

import pytest

from kubeproxy import backlog
from kubeproxy import engine as engine_module


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(backlog, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(backlog, "SLOWEST_RETRY", 0.004)
    monkeypatch.setattr(engine_module, "DRIFT_CHECK", 0.002)
