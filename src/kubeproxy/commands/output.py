"""Prints the answers of commands as JSON, or as text with tables and marks, without colours and control characters."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from shutil import get_terminal_size
from typing import Any, Final

import msgspec

from kubeproxy.ask.finding import Severity
from kubeproxy.ask.state import SCHEMA_VERSION
from kubeproxy.release import build
from kubeproxy.server.text import clean, json_bytes, printable

OK, BAD, NOTE, UNSEEN = Severity.FINE.mark, Severity.BROKEN.mark, Severity.NOTE.mark, Severity.UNKNOWN.mark
"""Marks before a line."""


def shown(text: str) -> str:
    """Return a line without control characters, which objects may contain and a terminal would interpret."""
    return printable(clean(text))


def say(text: str = "") -> None:
    """Print a line, and wrap a long line on a terminal. A command in backticks, or in a line that begins with Fix or
    Next, is not wrapped, because users copy commands."""
    line = shown(text)
    if sys.stdout.isatty() and not line.lstrip().startswith(("Fix: ", "Next: ")):
        line = wrapped(line, get_terminal_size().columns)
    sys.stdout.write(line + "\n")


def wrapped(line: str, width: int) -> str:
    """Wrap a line to a width; indent all lines but the first, and do not split text between backticks."""
    if len(line) <= width:
        return line
    parts = line.split("`")
    parts[1::2] = [part.replace(" ", _KEPT) for part in parts[1::2]]
    indent = " " * max(_INDENT, len(line) - len(line.lstrip()))
    made = textwrap.fill(
        "`".join(parts), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return made.replace(_KEPT, " ")


_KEPT: Final = "\0"  # a character that occurs in no line
_INDENT: Final = 5


def page(text: bytes) -> None:
    """Print lines that are already free of control characters."""
    sys.stdout.write(text.decode().lstrip("\n"))


def marked(mark: str, text: str) -> None:
    """Print a line with its mark below a heading."""
    say(f"  {mark:<2} {text}")


def json(value: Any) -> None:
    """Print an answer (a Struct or dictionary) and this command's version as JSON of docs/answers.schema.json."""
    sys.stdout.buffer.write(msgspec.json.format(json_bytes(versioned(value)), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def versioned(value: Any) -> dict[str, Any]:
    """Return the fields of an answer, with the versions of the schema and of this command."""
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return {"schemaVersion": SCHEMA_VERSION, "version": build().name} | fields


def answer(form: str, value: Any, show: Callable[[], None]) -> None:
    """Print an answer in the form json or text; `show` prints the text."""
    if form == "json":
        json(value)
    else:
        show()


def json_line(value: Any) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(json_bytes(value).decode() + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "", most: int | None = None) -> None:
    """Print at most `most` rows in columns below a header."""
    lines = [list(head), *rows[:most]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        row = indent + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(shown(row.rstrip()) + "\n")
    more(len(rows) - len(lines) + 1)


def more(count: int) -> None:
    """Print the number of omitted rows, if it is not 0."""
    if count > 0:
        marked(NOTE, f"and {count} more; -o json has them")
