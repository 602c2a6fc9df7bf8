"""A failed start leaves the host unchanged; a start that only prepares the host has changed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.namespaces import inside, namespace, run

CLOSE_WAIT = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
MANGLED = "apiVersion: v1\nkind: Config\nclusters: []\n"


def started(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a proxy for a few seconds in a namespace; return how it ended."""
    command = [sys.executable, "-m", "kubeproxy.cli", "--conntrack-tcp-timeout-close-wait=123s", *arguments]
    return inside(
        name, lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    )


def close_wait(name: str) -> str:
    return inside(name, lambda: run("sysctl", "-n", CLOSE_WAIT)).strip()


@pytest.mark.parametrize(
    ("kubeconfig", "arguments"),
    [(None, []), (MANGLED, []), (None, ["--proxy-mode=iptables"]), (None, ["--proxy-mode=userspace"])],
    ids=["no kubeconfig", "no cluster in it", "iptables", "userspace"],
)
def test_a_start_that_fails_has_not_touched_the_host(tmp_path: Path, kubeconfig, arguments) -> None:
    path = tmp_path / "kubeconfig"
    if kubeconfig is not None:
        path.write_text(kubeconfig)
    with namespace() as name:
        before = close_wait(name), inside(name, lambda: run("nft", "list", "ruleset"))
        ended = started(name, f"--kubeconfig={path}", *arguments)
        assert ended.returncode == 1
        assert "kubeconfig" in ended.stderr
        assert (close_wait(name), inside(name, lambda: run("nft", "list", "ruleset"))) == before


def test_init_only_needs_no_api_server(tmp_path: Path) -> None:
    with namespace() as name:
        ended = started(name, f"--kubeconfig={tmp_path / 'none'}", "--init-only")
        assert ended.returncode == 0, ended.stderr
        assert close_wait(name) == "123"
