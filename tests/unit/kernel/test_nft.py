"""The nft command when it misbehaves."""

from __future__ import annotations

import subprocess

import pytest

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.nftables import nft


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory"), "nft is missing: install the package nftables"),
        (PermissionError(13, "Permission denied"), "nft cannot be started: give the process the capability"),
        (OSError(8, "Exec format error"), "nft cannot be started: Exec format error"),
        (subprocess.TimeoutExpired("nft", 10), "nft --version did not answer within 10 s: look what it waits for"),
    ],
)
def test_a_command_that_does_not_tell_its_version_is_named(monkeypatch, error, said):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Unsupported, match=said):
        nft.version()
