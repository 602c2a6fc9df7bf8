"""No two public classes share a name, so that a name in a message, a search or a review means one class."""

from __future__ import annotations

import ast
from collections import defaultdict

from support.places import ROOT


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "src/kubeproxy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
