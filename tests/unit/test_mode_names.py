"""Only backends/, config/ and features/ name a proxy mode. All other packages use the properties of the Mode."""

from __future__ import annotations

import ast

from kubeproxy.config.modes import MODES
from support.places import ROOT

SOURCES = ROOT / "src" / "kubeproxy"
MAY = ("backends", "config", "features", "kernel", "meaning")
"""In kernel/ and meaning/, below the modes, these are the names of commands, tables and modules."""


def names_in(text: str) -> set[tuple[int, str]]:
    """Yield the lines that name a mode: as a text, or as a name in code (an attribute, an import, an argument)."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(name)) | ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                words = {name}
            case ast.Import(names=aliases):
                words = {word for alias in aliases for word in alias.name.split(".")}
            case ast.ImportFrom(module=str(module)) if module.startswith("kubeproxy.kernel"):
                continue  # a part of the kernel, not a mode
            case ast.ImportFrom(module=str(module), names=aliases):
                words = {*module.split("."), *(alias.name for alias in aliases)}
            case _:
                continue
        found |= {(node.lineno, word) for word in words & MODES.keys()}
    return found


def test_no_source_file_outside_their_rooms_names_a_mode():
    named = {
        f"{path.relative_to(SOURCES)}:{line}": word
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in MAY
        for line, word in names_in(path.read_text())
    }
    assert named == {}


def test_names_are_seen_where_they_may_stand():
    text = """
if mode == "nftables": pass
config.ipvs.scheduler
from kubeproxy.backends.userspace import backend
from kubeproxy.backends import iptables
from kubeproxy.kernel.nftables import listing
def f(ipvs): return f"{mode} of iptables"
"""
    assert names_in(text) == {(2, "nftables"), (3, "ipvs"), (4, "userspace"), (5, "iptables"), (7, "ipvs")}
