"""Prints the demo's titles, facts and tables: in colour on a terminal, plain in a file, at most 100 columns wide.

Only this module imports rich. Texts are plain ASCII, so they look the same in any terminal, file or mail.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.demo.ledger import Check, Ledger

WIDTH = 100
INDENT = 3
_POD_STYLES = ("cyan", "magenta", "yellow", "blue", "bright_cyan", "bright_magenta")


def milliseconds(seconds: float) -> str:
    """Return a time with a unit: 0.84 ms, 12 ms, 1.25 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


Cells = list[str | Text]


class Report:
    """Prints results as they arrive. Each pod keeps its colour."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False)
        # A file has no width. Tables have their full width, because a reader cannot recover truncated text.
        self._width = min(self._console.width, WIDTH) if self._console.is_terminal else WIDTH
        self._console.width = WIDTH
        self._gap = False
        self._styles: dict[str, str] = {}
        self._acts = 0

    def title(self, text: str) -> None:
        """Print the first line."""
        self._line(Text(text, style="bold"))

    def act(self, title: str, why: str) -> None:
        """Begin a new part: print its title and its purpose."""
        self._acts += 1
        self._line(Text(""))
        self._line(Text(f"{self._acts}. {title}", style="bold"))
        self.fact(why)

    def fact(self, text: str, style: str = "") -> None:
        """Print one or two sentences."""
        for line in textwrap.wrap(text, self._width - INDENT, break_long_words=False, break_on_hyphens=False):
            self.literal(line, style)

    def literal(self, line: str, style: str = "") -> None:
        """Print a line without wrapping."""
        self._line(Text((" " * INDENT + line).rstrip(), style=style))

    def wrong(self, check: Check) -> None:
        """Print a failed check at the place of the failure."""
        self._line(Text.assemble(" " * INDENT, ("WRONG ", "bold red"), str(check)))

    def pod(self, name: str) -> Text:
        """Return the distinguishing part of a pod's name, in the pod's colour."""
        style = self._styles.setdefault(name, _POD_STYLES[len(self._styles) % len(_POD_STYLES)])
        return Text(short(name), style=style)

    def count(self, name: str, number: int) -> Text:
        """Return the number of a pod's answers, in the pod's colour."""
        shown = self.pod(name)
        shown.plain = str(number) if number else "-"
        return shown

    def verdict(self, ok: bool) -> Text:
        """Return the text of a row's last cell."""
        return Text("ok", style="green") if ok else Text("WRONG", style="bold red")

    def table(self, columns: Sequence[str | Text], rows: Iterable[Cells], right: str = "") -> None:
        """Print a table; `right` contains an r for each right-aligned column."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns):
            aligned = right[number : number + 1] == "r"
            table.add_column(column, justify="right" if aligned else "left", no_wrap=True)
        for row in rows:
            # A Text, because rich would take [fd00::1] in a string for markup.
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self._line(Text(""))
        with self._console.capture() as captured:
            self._console.print(table)
        for line in captured.get().splitlines():
            self._console.out(" " * INDENT + line.rstrip(), highlight=False)
            self._gap = False
        self._line(Text(""))

    def times(self, ledger: Ledger) -> None:
        """Print the duration of each kind of change."""
        rows: list[Cells] = [
            [change, str(len(times)), milliseconds(ledger.median(change)), milliseconds(max(times))]
            for change, times in ledger.times.items()
        ]
        self.table(["change", "times", "p50", "slowest"], rows, " rrr")

    def log(self, tail: str) -> None:
        """Print the end of kube-proxy's log, because the log is removed with the cluster."""
        self._line(Text(""))
        self._line(Text("The end of kube-proxy's log:", style="bold"))
        for line in tail.splitlines():
            self.literal(line)

    def outcome(self, ledger: Ledger, seconds: float) -> None:
        """Print the end: the names of the failed checks, or one sentence that all checks hold."""
        self._line(Text(""))
        wrong, number = ledger.wrong, len(ledger.checks)
        for check in wrong:
            self.wrong(check)
        if wrong:
            last = f"Not well: {len(wrong)} of {number} checks failed, named above."
            self._line(Text(last, style="bold red"))
            return
        held = f"{number} checks and {ledger.connections:,} connections in {seconds:.1f} s, and none failed"
        self._line(Text(f"All is well: {held}.", style="bold green"))

    def _line(self, text: Text) -> None:
        # Two calls in a row print only one empty line.
        empty = not text.plain.strip()
        if empty and self._gap:
            return
        self._gap = empty
        # rich never wraps lines: a narrow terminal wraps them itself, and a file keeps them whole.
        self._console.print(text, soft_wrap=True)


def short(pod: str) -> str:
    """Return the distinguishing part of the name of a ReplicationController's pod."""
    return pod.rpartition("-")[2]
