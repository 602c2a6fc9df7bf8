"""Runs each test with both variants of iptables, with a separate lock."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def lock_file(tmp_path, monkeypatch) -> Path:
    """A separate lock for the test: at the same time other tests change legacy tables of other namespaces."""
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    return path


@pytest.fixture(params=["nft", "legacy"])
def variant(request, netns) -> str:
    return request.param
