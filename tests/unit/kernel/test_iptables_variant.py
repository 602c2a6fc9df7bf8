"""The choice of the iptables variant when one of the commands that determine it fails."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import SavedTable

HINT = SavedTable("mangle", ("KUBE-IPTABLES-HINT",), ())


@pytest.fixture
def failures(monkeypatch):
    """Exceptions of the legacy command before its first success; its tables contain the hint."""
    made: list[ApplyError] = []

    def tables(name: str) -> list[SavedTable]:
        if not name.endswith("-legacy"):
            return []
        if made:
            raise made.pop()
        return [HINT]

    monkeypatch.setattr(xtables, "_TRIED_AGAIN", (0.0, 0.0))
    monkeypatch.setattr(xtables, "tables", tables)
    monkeypatch.setattr(xtables, "installed", lambda: ("iptables-nft", "iptables-legacy"))
    return made


def could_not_be_started() -> ApplyError:
    error = ApplyError("iptables-legacy-save: no buffer space available")
    error.__cause__ = OSError(errno.ENOBUFS, "no buffer space available")
    return error


def test_a_command_that_could_not_be_started_is_tried_again(failures):
    failures.extend([could_not_be_started(), could_not_be_started()])
    assert xtables.detect() == "legacy"


def test_a_command_that_fails_means_that_the_variant_is_not_in_use(failures):
    failures.append(ApplyError("iptables-legacy-save: table does not exist"))
    assert xtables.detect() == "nft"


def test_a_command_that_can_never_be_started_is_given_up(failures):
    failures.extend(could_not_be_started() for _ in range(9))
    assert xtables.detect() == "nft"
