"""The table of other Debians in docs/support.md."""

from __future__ import annotations

import re

from support.guest import matrix
from support.guest.matrix import Result, Verdict
from support.places import ROOT

RESULT = Result(
    "trixie",
    "trixie",
    [
        "6.12.48+deb13-amd64",
        "nftables v1.1.3 (Commodore Bullmoose #4)",
        "iptables v1.8.11 (nf_tables)",
        "Python 3.13.5",
    ],
    "abc1234",
    "2026-11-26",
    {"nftables": Verdict(True, "4 of 4 cases hold", 60), "crashes": Verdict(False, "1 failed", 9)},
)


def test_each_check_has_a_row_also_those_that_failed_or_were_not_run():
    lines = matrix.render([RESULT]).splitlines()
    assert "| trixie | 6.12.48+deb13-amd64 | 1.1.3 | 1.8.11 | 3.13.5 | 2026-11-26 | abc1234 |" in lines
    assert "| check | trixie, 6.12.48 |" in lines
    assert "| nftables | 4 of 4 cases hold |" in lines
    assert "| crashes | **fails**: 1 failed |" in lines
    assert "| ipvs | not run |" in lines


def test_the_page_shows_the_recorded_results():
    _, mark, rest = matrix.PAGE.read_text().partition(matrix.BEGIN)
    assert mark
    assert rest.partition(matrix.END)[0].strip() == matrix.render(matrix.read())


def test_the_last_line_is_without_durations_and_frames():
    assert matrix._last("x\n==== 12 passed in 3.21s ====\n") == "12 passed"
    assert matrix._last("nftables: 4 of 4 cases hold (0 the second time), 900 probes, 61 s\n") == (
        "nftables: 4 of 4 cases hold (0 the second time), 900 probes"
    )


def test_each_variable_that_gives_slow_machines_more_time_is_read():
    programs = "tests/conformance/agent.py", "tools/conformance", "tests/support/modes.py"
    read = {name for path in programs for name in re.findall(r'environ\.get\("(\w+)"', (ROOT / path).read_text())}
    assert {word.partition("=")[0] for word in matrix.SLOW[1:]} <= read
