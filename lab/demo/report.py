"""What the demo prints: titles, facts and tables, for a terminal in colour, for a file plain. 100 columns at most.

Only this module knows rich. Texts are plain ASCII, so that they read the same in any terminal, file or mail.
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
    """A time as people read it: 0.84 ms, 12 ms, 1.25 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


Cells = list[str | Text]


class Report:
    """Prints as things happen. Pods keep their colour throughout."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False)
        # A file has no width of its own. Tables are as wide as they are: what is cut off cannot be read at all.
        self._width = min(self._console.width, WIDTH) if self._console.is_terminal else WIDTH
        self._console.width = WIDTH
        self._gap = False
        self._styles: dict[str, str] = {}
        self._acts = 0

    def title(self, text: str) -> None:
        """The first line."""
        self._line(Text(text, style="bold"))

    def act(self, title: str, why: str) -> None:
        """A new part: what is done, and why it matters."""
        self._acts += 1
        self._line(Text(""))
        self._line(Text(f"{self._acts}. {title}", style="bold"))
        self.fact(why)

    def fact(self, text: str, style: str = "") -> None:
        """A sentence or two."""
        for line in textwrap.wrap(text, self._width - INDENT, break_long_words=False, break_on_hyphens=False):
            self.literal(line, style)

    def literal(self, line: str, style: str = "") -> None:
        """A line that stays as it is."""
        self._line(Text((" " * INDENT + line).rstrip(), style=style))

    def wrong(self, check: Check) -> None:
        """A check that does not hold, where it happened."""
        self._line(Text.assemble(" " * INDENT, ("WRONG ", "bold red"), str(check)))

    def pod(self, name: str) -> Text:
        """A pod by the part of its name that differs, in its colour."""
        style = self._styles.setdefault(name, _POD_STYLES[len(self._styles) % len(_POD_STYLES)])
        return Text(short(name), style=style)

    def count(self, name: str, number: int) -> Text:
        """How often a pod answered, in its colour."""
        shown = self.pod(name)
        shown.plain = str(number) if number else "-"
        return shown

    def verdict(self, ok: bool) -> Text:
        """The last cell of a row."""
        return Text("ok", style="green") if ok else Text("WRONG", style="bold red")

    def table(self, columns: Sequence[str | Text], rows: Iterable[Cells], right: str = "") -> None:
        """A table; `right` has an r for each column that is aligned to the right."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns):
            aligned = right[number : number + 1] == "r"
            table.add_column(column, justify="right" if aligned else "left", no_wrap=True)
        for row in rows:
            # As Text: a string's [fd00::1] would be taken for markup.
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self._line(Text(""))
        with self._console.capture() as captured:
            self._console.print(table)
        for line in captured.get().splitlines():
            self._console.out(" " * INDENT + line.rstrip(), highlight=False)
            self._gap = False
        self._line(Text(""))

    def times(self, ledger: Ledger) -> None:
        """How long every kind of change took."""
        rows: list[Cells] = [
            [change, str(len(times)), milliseconds(ledger.median(change)), milliseconds(max(times))]
            for change, times in ledger.times.items()
        ]
        self.table(["change", "times", "p50", "slowest"], rows, " rrr")

    def log(self, tail: str) -> None:
        """The end of kube-proxy's log, which goes with the cluster."""
        self._line(Text(""))
        self._line(Text("The end of kube-proxy's log:", style="bold"))
        for line in tail.splitlines():
            self.literal(line)

    def outcome(self, ledger: Ledger, seconds: float) -> None:
        """The end: what is wrong, by name, or one line that says all is well."""
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
        # One empty line is enough, whoever asks for it.
        empty = not text.plain.strip()
        if empty and self._gap:
            return
        self._gap = empty
        # Lines are never folded: a terminal that is too narrow folds them itself, and a file keeps them whole.
        self._console.print(text, soft_wrap=True)


def short(pod: str) -> str:
    """What tells a ReplicationController's pods apart."""
    return pod.rpartition("-")[2]
