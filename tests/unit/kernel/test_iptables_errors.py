"""The error for the output of an iptables command that fails."""

from __future__ import annotations

import os

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import CommandError
from kubeproxy.kernel.xtables.xtables_lock import LockHeldError


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (4, "Another app is currently holding the xtables lock. Stopped waiting after 5s.\n", LockHeldError),
        (
            3,
            "ip6tables: can't initialize ip6tables table `nat': Table does not exist (do you need to insmod?)\n",
            CommandError,
        ),
        (4, "ip6tables: Could not fetch rule set generation id: Permission denied\n", CommandError),
        (1, "", CommandError),
    ],
)
def test_a_lock_held_by_another_program_is_not_a_missing_requirement(tmp_path, monkeypatch, status, said, kind):
    (tmp_path / "said").write_text(said)
    command = tmp_path / "ip6tables-save"
    command.write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit {status}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ApplyError, match=r"ip6tables-save: .") as caught:
        list(xtables.tables("ip6tables"))
    assert type(caught.value) is kind
