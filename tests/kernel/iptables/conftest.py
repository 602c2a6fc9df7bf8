"""Each test by both variants of iptables, with a lock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def lock_file(tmp_path, monkeypatch) -> Path:
    """A lock of the test's own: other tests change legacy tables of other namespaces meanwhile."""
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    return path


@pytest.fixture(params=["nft", "legacy"])
def variant(request, netns) -> str:
    return request.param
