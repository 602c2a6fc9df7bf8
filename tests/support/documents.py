"""Parses the documents for tests: headings, tables, code blocks and words in code font, each with its place.

Only the Markdown that is used here: ATX headings, tables with outer bars, fenced or indented code, spans in backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.places import ROOT

_AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
DOCUMENTS = (*(ROOT / name for name in _AT_THE_TOP), *sorted((ROOT / "docs").glob("*.md")))

_HEADING = re.compile(r"(#+) +(.*)")
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Words(NamedTuple):
    """A text of a document, and its place, such as "docs/modes.md:12"."""

    place: str
    text: str


class Document:
    """One Markdown file, divided into prose and code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.headings: list[str] = []
        self.prose: list[Words] = []
        """Return the lines outside of code blocks."""
        self.commands: list[Words] = []
        """Return the lines of code blocks."""
        fenced = False
        before = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = Words(f"{self.name}:{number}", line)
            if line.startswith("```"):
                fenced = not fenced
            elif fenced or (line.startswith("    ") and not before.lstrip().startswith(("- ", "1. "))):
                self.commands.append(words)
            else:
                self.prose.append(words)
                if heading := _HEADING.fullmatch(line):
                    self.headings.append(heading[2])
            before = line if line.strip() else ""

    def spans(self) -> Iterator[Words]:
        """Yield the texts in backticks outside of code blocks."""
        for place, text in self.prose:
            for span in _SPAN.findall(text):
                yield Words(place, span)

    def links(self) -> Iterator[Words]:
        """Yield the targets of links."""
        for place, text in self.prose:
            for target in _LINK.findall(text):
                yield Words(place, target)

    def anchors(self) -> set[str]:
        """Return the possible targets of links after "#": the headings in GitHub's form."""
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in self.headings}

    def table(self, heading: str) -> list[list[str]]:
        """Return the cells of the first table below a heading, row by row, without its head."""
        text = self.path.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
        rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert rows is not None, f"{self.name} has no table below {heading!r}"
        return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


@cache
def documents() -> tuple[Document, ...]:
    """Return all documents."""
    return tuple(Document(path) for path in DOCUMENTS if path.exists())


def document(name: str) -> Document:
    """Return the document with a name such as "docs/modes.md"."""
    return next(each for each in documents() if each.name == name)
