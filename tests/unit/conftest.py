"""Unit tests call commands in the process of the tests; `verify` and others lower the priority of their process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def priority() -> Iterator[None]:
    """Keep the priority of this process; otherwise all later tests would wait for other programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.nice", lambda _: 0)
        yield
