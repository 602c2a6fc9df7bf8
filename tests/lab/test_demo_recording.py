"""The recording of the demo: its text, times and colours; and the two recorded files that the README shows."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from lab.demo.recording import Said, cast, parts, record, svg
from support.places import ROOT

PICTURES = ROOT / "docs/pictures"
SPACE = "{http://www.w3.org/2000/svg}"
SAID = [
    Said(0.1, "\x1b[1mbefore\x1b[0m\r\n\r\n"),
    Said(0.5, "\x1b[1m1. ClusterIP\x1b[0m\r\n   a <pod> & \x1b[32mok\x1b[0m\r\n"),
    Said(1.5, "\x1b[1m2. NodePort\x1b[0m\r\n   10 ok\r\n"),
]


def test_the_output_of_a_terminal_is_recorded() -> None:
    script = "import os, sys; print(os.get_terminal_size().columns, sys.stdout.isatty()); print('\\x1b[1mdone')"
    said = record([sys.executable, "-c", script])
    assert "".join(one.text for one in said) == "100 True\r\n\x1b[1mdone\r\n"
    assert [one.at for one in said] == sorted(one.at for one in said)


def test_a_command_that_fails_is_no_recording() -> None:
    with pytest.raises(Exception, match="exit status 3") as error:
        record([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"])
    assert "what went wrong" in error.value.output  # type: ignore[attr-defined]


def test_a_part_begins_at_its_number() -> None:
    assert [[line.plain for line in part] for part in parts(SAID)] == [
        ["before", ""],
        ["1. ClusterIP", "   a <pod> & ok"],
        ["2. NodePort", "   10 ok", ""],
    ]


def test_the_picture_has_every_label_at_its_column() -> None:
    root = ET.fromstring(svg(parts(SAID), "a & b"))
    found = [(element.text, element.get("x"), element.get("class")) for element in root.iter(f"{SPACE}text")]
    assert [text for text, _, _ in found] == ["before", "1. ClusterIP", "a <pod> &", "ok", "2. NodePort", "10 ok"]
    assert {text: place for text, place, _ in found}["ok"] == f"{14 + 13 * 8.4:.1f}"
    assert {text: style for text, _, style in found}["ok"] not in {None, found[0][2]}, "in a colour of its own"
    (style,) = root.iter(f"{SPACE}style")
    assert style.text is not None
    stops = [float(stop) for stop in re.findall(r"([\d.]+)%", style.text)]
    assert stops == sorted(stops)
    assert "prefers-reduced-motion" in style.text


def test_asciinema_can_play_it() -> None:
    head, *events = map(json.loads, cast(SAID, "a title").splitlines())
    assert (head["version"], head["width"], head["title"]) == (2, 100, "a title")
    assert events[0] == [0.1, "o", "\x1b[1mbefore\x1b[0m\r\n\r\n"]


def test_the_picture_of_the_readme_is_small_and_self_contained() -> None:
    for name in ("demo.svg", "change.svg"):
        text = (PICTURES / name).read_text(encoding="utf-8")
        ET.fromstring(text)
        assert len(text) < 150_000
        assert not re.search(r"<script|(?:href|src)=\"(?!#)|url\((?!#)|@import", text), name
    shown = (PICTURES / "demo.cast").read_text(encoding="utf-8")
    assert "All is well" in shown
    assert len(shown) < 150_000
    assert json.loads(shown.splitlines()[0])["version"] == 2
