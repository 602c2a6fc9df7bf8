"""Records a run of the demo: python -m lab.demo.recording FOLDER writes demo.cast and demo.svg.

demo.cast is an asciinema recording, version 2, in the demo's own time. demo.svg shows the same output part by part,
slowed down to reading speed; with the setting for reduced motion a browser shows only the end.
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from rich.color import Color
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 100, 30
_CELL, _LINE, _MARGIN = 8.4, 18, 14  # Pixels, for a font of size 14.
_SECONDS_A_LINE, _MOVING = 0.3, 0.5
"""Seconds that a reader gets for each line of a part, and the duration of the transition to the next part."""


class Said(NamedTuple):
    """Printed text, with its time in seconds after the start."""

    at: float
    text: str


def record(command: Sequence[str]) -> list[Said]:
    """Run a command in a terminal of COLUMNS by ROWS; return its output. Raises OSError or CalledProcessError."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    began, said = time.monotonic(), []
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        while piece := _read(ours):
            said.append(Said(time.monotonic() - began, decode(piece)))
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, "".join(one.text for one in said))
    return said


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: all processes have closed the other end
        return b""


def cast(said: Sequence[Said], title: str) -> str:
    """Return the recording in asciinema's format."""
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title, "env": {"TERM": "xterm-256color"}}
    lines = [json.dumps(head), *(json.dumps([round(one.at, 3), "o", one.text]) for one in said)]
    return "\n".join(lines) + "\n"


def parts(said: Sequence[Said]) -> list[list[Text]]:
    """Return the printed lines in parts; a line in bold begins a new part."""
    text = Text.from_ansi("".join(one.text for one in said).replace("\r\n", "\n"))
    found: list[list[Text]] = [[]]
    for line in text.split("\n", allow_blank=True):
        heading = line.plain[:1].isdigit() and ". " in line.plain[:4]
        if heading and found[-1]:
            found.append([])
        found[-1].append(line)
    return found


def svg(shown: Sequence[Sequence[Text]], title: str) -> str:
    """Return the parts as an animated picture: each part scrolls in, stays for the reading time, and scrolls out."""
    lines = [line for part in shown for line in part]
    width, height = COLUMNS * _CELL + 2 * _MARGIN, ROWS * _LINE + 2 * _MARGIN
    stops, at, row = [], 0.0, 0
    for part in shown:
        row += len(part)
        place = max(0, row - ROWS) * _LINE
        stops.append((at, at + _SECONDS_A_LINE * len(part), place))
        at += _SECONDS_A_LINE * len(part) + _MOVING
    frames = "".join(
        f"{100 * start / at:.2f}%,{100 * end / at:.2f}%{{transform:translateY(-{place}px)}}"
        for start, end, place in stops
    )
    last = stops[-1][2]
    rules = [
        f"text{{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:{_hex(None)};white-space:pre}}",
        f"@keyframes play{{{frames}100%{{transform:translateY(-{last}px)}}}}",
        f".lines{{animation:play {at:.1f}s infinite}}",
        f"@media(prefers-reduced-motion:reduce){{.lines{{animation:none;transform:translateY(-{last}px)}}}}",
    ]
    styles: dict[str, str] = {}
    body = "\n".join(_line(line, number, styles) for number, line in enumerate(lines) if line.plain.strip())
    rules += [f".{name}{{{rule}}}" for rule, name in styles.items()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{''.join(rules)}</style>\n"
        f'<clipPath id="screen"><rect width="{width:g}" height="{height - 2 * _MARGIN}" y="{_MARGIN}"/></clipPath>\n'
        f'<rect width="{width:g}" height="{height}" rx="8" fill="{_background()}"/>\n'
        f'<g clip-path="url(#screen)"><g class="lines">\n{body}\n</g></g>\n</svg>\n'
    )


def _line(line: Text, number: int, styles: dict[str, str]) -> str:
    """Return the pieces of one line, each at its column and with the width of its letters in a terminal."""
    pieces, baseline = [], _MARGIN + number * _LINE + 13
    cuts = sorted({0, len(line.plain), *(edge for span in line.spans for edge in (span.start, span.end))})
    for left, right in pairwise(cuts):
        text = line.plain[left:right].strip()
        if not text:
            continue
        start = line.plain.index(text, left)
        style = Style.combine([Style(), *(Style.parse(str(s.style)) for s in line.spans if s.start <= start < s.end)])
        rule = _rule(style)
        name = f' class="{styles.setdefault(rule, f"s{len(styles)}")}"' if rule else ""
        place = f'x="{_MARGIN + start * _CELL:.1f}" y="{baseline}" textLength="{len(text) * _CELL:.1f}"'
        pieces.append(f"<text {place}{name}>{escape(text)}</text>")
    return "".join(pieces)


def _rule(style: Style) -> str:
    colour = f"fill:{_hex(style.color)};" if style.color is not None and not style.color.is_default else ""
    return colour + (
        "font-weight:bold;fill:#fff;" if style.bold and not colour else "font-weight:bold;" * bool(style.bold)
    )


def _hex(colour: Color | None) -> str:
    return (colour or Color.default()).get_truecolor(MONOKAI).hex


def _background() -> str:
    return Color.default().get_truecolor(MONOKAI, foreground=False).hex


def main(folder: Path) -> None:
    """Run the demo and write both files. Raises OSError or CalledProcessError."""
    said = record([sys.executable, "-m", "lab", "demo"])
    title = "make demo: a cluster in network namespaces, a real kube-proxy, and the pods that answer each client"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.cast").write_text(cast(said, title), encoding="utf-8")
    (folder / "demo.svg").write_text(svg(parts(said), title), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the demo failed:\n{error.output}")
