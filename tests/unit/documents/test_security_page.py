"""The tests and fuzzing targets that docs/security.md names exist, and the page names each target."""

from __future__ import annotations

import re

from support.fuzz.targets import TARGETS
from support.places import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_is_one() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", TEXT))
    assert named
    assert named <= there


def test_each_line_of_the_threat_model_names_a_test() -> None:
    model, _, _ = TEXT.partition("## Dependencies")
    rows = [line for line in model.splitlines() if line.startswith("| ") and line.count("|") == 4]
    lines = [line for line in rows if not line.startswith("| attack")]
    assert len(lines) > 20
    assert [line for line in lines if not re.search(r"test_\w+\.py|the same|target", line.split("|")[3])] == []


def test_the_targets_that_are_named_are_some() -> None:
    lists = re.findall(r"targets? ((?:`\w+`,? ?)+)", TEXT)
    named = {name for found in lists for name in re.findall(r"`(\w+)`", found)}
    assert named
    assert named <= TARGETS.keys()
