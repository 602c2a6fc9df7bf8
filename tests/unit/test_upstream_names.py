"""The table of upstream's end-to-end tests in docs/reference.md agrees with the marks of the scenarios."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.places import ROOT

SECTION = "## Upstream's end-to-end tests"


def marked() -> dict[str, set[str]]:
    """Return the files whose tests cover each of upstream's tests."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _names(path):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "upstream":
            yield from (ast.literal_eval(argument) for argument in node.args)


def test_the_table_agrees_with_the_marks() -> None:
    text = (ROOT / "docs/reference.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    rows = [row for row in rows if "`" in row[1]]
    table = {name: set(re.findall(r"`(\S+?)`", files)) for name, files in rows}
    assert len(table) == len(rows) > 50
    assert table == marked()
