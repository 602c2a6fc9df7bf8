"""Every mode has a page, a column in docs/modes.md, and a folder that installs it."""

import re

from kubeproxy.config.modes import MODES
from support.documents import document
from support.places import ROOT


def test_every_mode_has_its_page() -> None:
    assert [mode for mode in MODES if not (ROOT / f"docs/{mode}.md").exists()] == []


def test_every_mode_has_its_column() -> None:
    head = re.search(r"^\| \|(.*)\|$", document("docs/modes.md").path.read_text(encoding="utf-8"), re.MULTILINE)
    assert head is not None
    assert [cell.strip() for cell in head[1].split("|")] == list(MODES)


def test_every_mode_can_be_installed() -> None:
    assert [mode for mode in MODES if not (ROOT / f"deploy/kustomize/{mode}/kustomization.yaml").exists()] == []
