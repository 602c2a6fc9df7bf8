"""--cleanup on a node without the programs that wrote the rules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.namespaces import inside, namespace, run

TABLE = """
table {family} kube-proxy {{
    map verdicts {{ type inet_service : verdict; elements = {{ 80 : jump service }} }}
    chain service {{ counter accept; }}
    chain out {{ type filter hook output priority 0; tcp dport vmap @verdicts; }}
}}
table {family} kube-proxy-check {{ }}
table {family} others {{ }}
"""


@pytest.mark.parametrize("family", ["ip", "ip6"])
def test_tables_are_removed_without_nft_and_failed_searches_are_reported(family, tmp_path) -> None:
    def clean_up() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kubeproxy.cli", "--cleanup"]
        return subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)

    with namespace() as name:
        inside(name, lambda: run("nft", "-f", "-", text=TABLE.format(family=family)))
        ended = inside(name, clean_up)
        assert ended.returncode == 0, ended.stderr
        assert inside(name, lambda: run("nft", "list", "tables")) == f"table {family} others\n"
    assert "iptables is not installed: leftover rules" in ended.stderr
