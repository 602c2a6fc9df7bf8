"""Files, folders and sections that the documents name exist."""

import os
import re
from functools import cache
from pathlib import Path

from support.documents import Words, documents
from support.places import ROOT

# Files that programs create while they run.
MADE = (".venv/", "bench/out", "dist/")
PLACEHOLDERS = {"NAME", "NNNN", "STEP", "MODE"}
PATH = re.compile(r"[\w.-]+(?:/[\w.-]*)+")
SOURCE = re.compile(r"[\w/-]+\.py")


@cache
def tree() -> frozenset[str]:
    """Return all files and folders of the repository, each by its path and by every end of its path."""
    ends = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name for name in folders if name in {".ci", ".github"} or not name.startswith((".", "__pycache__"))
        ]
        for name in (*folders, *files):
            parts = (Path(folder) / name).relative_to(ROOT).parts
            ends |= {"/".join(parts[start:]) for start in range(len(parts))}
    return frozenset(ends)


def is_of_the_repository(word: str) -> bool:
    """Return whether a word in code font can only be a file of the repository; paths on a node begin with a slash."""
    rooms = {path.name for room in (".", "src/kubeproxy", "src/kubeproxy/backends") for path in (ROOT / room).iterdir()}
    if word.startswith(MADE) or PLACEHOLDERS & set(re.split(r"[/.-]", word)):
        return False
    return bool(SOURCE.fullmatch(word)) or (
        "/" in word and bool(PATH.fullmatch(word)) and word.split("/", maxsplit=1)[0] in rooms
    )


def missing(named: list[Words]) -> list[str]:
    """Return the paths that do not exist, with their places."""
    return [f"{place}: {word}" for place, word in named if word.rstrip("/") not in tree()]


def test_files_in_code_font_exist() -> None:
    named = [words for document in documents() for words in document.spans() if is_of_the_repository(words.text)]
    assert len(named) > 30
    assert missing(named) == []


def test_files_in_commands_exist() -> None:
    named = [
        Words(line.place, word)
        for document in documents()
        for line in document.commands
        for word in re.findall(r"(?<![\w./-])(?:deploy|docs|tests|tools|lab|bench|src)/[\w./-]+", line.text)
        if not word.startswith(MADE)
    ]
    assert len(named) >= 4
    assert missing(named) == []


def test_links_lead_to_files_and_sections() -> None:
    links = [
        (document, words)
        for document in documents()
        for words in document.links()
        if not words.text.startswith(("http:", "https:"))
    ]
    dead = []
    for document, (place, target) in links:
        name, _, anchor = target.partition("#")
        path = document.path.parent / name if name else document.path
        if not path.exists() or (anchor and anchor not in anchors_of(os.path.relpath(path, ROOT))):
            dead.append(f"{place}: {target}")
    assert len(links) >= 20
    assert dead == []


def anchors_of(name: str) -> set[str]:
    """Return the anchors of the document of this name; none if there is no such document."""
    return next((document.anchors() for document in documents() if document.name == name), set())


def test_a_reader_of_the_readme_finds_every_document() -> None:
    linked = {"README.md"}
    while (
        more := {
            os.path.relpath(document.path.parent / target.partition("#")[0], ROOT)
            for document in documents()
            if document.name in linked
            for _, target in document.links()
        }
        - linked
    ):
        linked |= more
    assert [document.name for document in documents() if document.name not in linked] == []
