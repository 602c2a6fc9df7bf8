"""The comparison with another kube-proxy, with our own program in its role."""

import json
import sys
from pathlib import Path

import pytest

from prove import switch
from support.documents import document

ADDRESSES = dict(zip(switch.DECLARED, ("203.0.113.60", "169.254.169.254", "203.0.113.50", "10.96.1.34"), strict=True))
FOUND = ["169.254.169.254", "203.0.113.50"]


@pytest.mark.slow("a history in a cluster, as `make switch` plays them")
def test_rules_of_the_same_program_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    peer = Path(sys.executable).with_name("kube-proxy")
    assert switch.main(["--peer", str(peer), "--more", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", 0 differences") == 4, shown
    assert "not understood" not in shown


def answer(*destinations: str) -> tuple[int, str]:
    groups = [{"packet": f"198.51.100.7 -> {ip}:80 tcp, in by other"} for ip in destinations]
    return (1 if groups else 0), json.dumps({"families": [{"differences": groups}, {"differences": []}]})


@pytest.mark.parametrize(
    ("mode", "found", "texts"),
    [
        ("nftables", answer(*FOUND, "10.96.1.34"), []),
        ("nftables", answer(*FOUND, "10.96.1.34", "203.0.113.60"), []),
        ("iptables", answer(*FOUND), []),
        ("iptables", answer(*FOUND, "10.96.0.1"), ["not declared: 198.51.100.7 -> 10.96.0.1:80 tcp, in by other"]),
        ("iptables", answer("203.0.113.50"), [f"no difference: {list(ADDRESSES)[1]}"]),
        ("nftables", answer(*FOUND), [f"no difference: {list(ADDRESSES)[3]}"]),
        ("nftables", (2, "not readable"), ["exit code 2"]),
    ],
)
def test_a_strict_proxy_has_only_declared_differences(mode: str, found: tuple[int, str], texts: list[str]) -> None:
    assert switch.undeclared(mode, found, ADDRESSES) == texts


def test_each_declared_difference_stays_by_the_page() -> None:
    rows = {row[0]: row[-1] for row in document("docs/migrate.md").table("For traffic")}
    assert [rows[name].split(":")[0] for name in switch.DECLARED] == ["stays"] * len(switch.DECLARED)
