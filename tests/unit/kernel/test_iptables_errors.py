"""What is made of what the iptables commands say when they fail."""

from __future__ import annotations

import subprocess

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (4, "Another app is currently holding the xtables lock. Stopped waiting after 5s.\n", xtables.LockHeldError),
        (3, "ip6tables: can't initialize ip6tables table `nat': Table does not exist (do you need to insmod?)\n", None),
        (4, "ip6tables: Could not fetch rule set generation id: Permission denied\n", None),
        (1, "", None),
    ],
)
def test_a_lock_that_another_program_holds_is_told_from_what_is_missing(monkeypatch, status, said, kind):
    def runs(command, **_):
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(xtables.subprocess, "run", runs)
    with pytest.raises(ApplyError, match=r"ip6tables-save: .") as caught:
        list(xtables.tables("ip6tables"))
    assert type(caught.value) is (kind or ApplyError)
