"""No two modules import each other, directly or through others; imports for types and inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from support.places import ROOT

PACKAGES = {"kubeproxy": ROOT / "src/kubeproxy", **{name: ROOT / name for name in ("lab", "bench", "prove")}}


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules among `modules` that a tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_circle(package: str) -> None:
    folder = PACKAGES[package]
    files = {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    graph = {
        name: {found for found in imported(ast.parse(path.read_text(encoding="utf-8")), files.keys()) if found in files}
        for name, path in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))
