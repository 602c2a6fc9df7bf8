"""The comparison with another kube-proxy, played with our own program as the other one."""

import sys
from pathlib import Path

import pytest

from prove import switch


@pytest.mark.slow("a history in a cluster, as `make switch` plays them")
def test_rules_of_the_same_program_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    peer = Path(sys.executable).with_name("kube-proxy")
    assert switch.main(["--peer", str(peer), "--more", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", 0 differences") == 4, shown
    assert "not understood" not in shown
