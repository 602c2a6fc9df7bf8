"""The page's file: it runs only its own script, loads nothing from elsewhere, and has readable colours."""

from __future__ import annotations

import re

import pytest

from kubeproxy.page.pages import joined
from support.places import ROOT

PAGE = joined().decode()
SCHEMES = re.findall(r":root \{(.*?--bg.*?)\}", PAGE, re.DOTALL)


def test_it_is_one_file_with_one_script_and_one_style() -> None:
    assert [len(re.findall(rf"<{tag}>", PAGE)) for tag in ("script", "style")] == [1, 1]
    assert not re.search(r"<(script|style|link|img|iframe)\s[^>]*(src|href)=[\"'](?!data:)", PAGE)
    addresses = {"http://www.w3.org/2000/svg"}  # the name of a namespace, from which nothing is loaded
    assert set(re.findall(r"https?://[^\"'` ]+", PAGE)) == addresses


def test_no_file_of_it_is_longer_than_400_lines() -> None:
    files = list((ROOT / "src/kubeproxy/page/site").iterdir())
    assert len(files) > 5
    assert [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


@pytest.mark.parametrize(
    "forbidden",
    [
        r"innerHTML",
        r"outerHTML",
        r"insertAdjacent",
        r"document\.write",
        r"\beval\b",
        r"new Function",
        r"\sstyle=",
        r"\son\w+=\"",
    ],
)
def test_no_text_can_become_markup_or_code(forbidden: str) -> None:
    assert not re.search(forbidden, PAGE)


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
@pytest.mark.parametrize(
    ("text", "ground"),
    [
        *((text, ground) for text in ("ink", "dim", "accent") for ground in ("bg", "paper", "sunk")),
        *((text, ground) for text in ("bad", "warn", "ok") for ground in ("bg", "paper", f"{text}-soft")),
        *(("paper", ground) for ground in ("accent", "bad", "warn")),
        ("accent", "accent-soft"),
        ("ink", "accent-soft"),
        ("ink", "bad-soft"),
        *((line, "paper") for line in ("pod", "node", "outside")),
    ],
)
def test_texts_stand_out_from_their_ground(scheme: str, text: str, ground: str) -> None:
    """WCAG 2.1, 1.4.3: a contrast of at least 4.5 (AA)."""
    colours = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6});", scheme))
    light, dark = sorted((_luminance(colours[text]), _luminance(colours[ground])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    parts = (int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
