"""The option --watch: a command prints its whole answer, then repeats the question and prints the rows that are new,
changed or gone, until Ctrl-C. The command repeats the question at most once per second, and uses at most a tenth of a
CPU."""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from kubeproxy.commands import output
from kubeproxy.errors import NoAnswerError
from kubeproxy.server.text import timestamp

NEW, CHANGED, GONE = "new", "changed", "gone"
_EACH: Final = 1.0  # minimum seconds between two questions
_REST: Final = 9  # seconds of rest for each second of CPU time that the last question took
_SHOWN: Final = 50  # changes per question in the text


class Row(NamedTuple):
    """A part of an answer: the lines of text, and the value for JSON."""

    lines: tuple[str, ...]
    fields: object


class WatchedAnswer(NamedTuple):
    """An answer: its fields for JSON, a function that prints its text, its rows by key, and the exit code."""

    fields: Mapping[str, object]
    show: Callable[[], None]
    rows: Mapping[str, Row]
    status: int


def argument(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command."""
    parser.add_argument("-w", "--watch", action="store_true", help="then print changes, until Ctrl-C")


def changes(before: Mapping[str, Row], after: Mapping[str, Row], form: str) -> Iterator[tuple[str, str, Row]]:
    """Yield each row that differs between two answers, as (NEW, CHANGED or GONE; the row's key; the row). For GONE, the
    row is the former row. With the form json, JSON values are compared, else lines of text."""
    for key, row in after.items():
        if key not in before:
            yield NEW, key, row
        elif row.fields != before[key].fields if form == "json" else row.lines != before[key].lines:
            yield CHANGED, key, row
    yield from ((GONE, key, row) for key, row in before.items() if key not in after)


def answered(
    given: argparse.Namespace, look: Callable[[], WatchedAnswer], cost: Callable[[], float] = time.process_time
) -> int:
    """Print an answer, and with --watch the changes; return the exit code of the first answer. Raises KubeProxyError.

    `cost` returns the seconds of CPU time that all questions have taken."""
    answer = look()
    if not given.watch:
        output.answer(given.output, answer.fields, answer.show)
        return answer.status
    if given.output == "json":
        output.json_line(output.versioned(answer.fields))
    else:
        answer.show()
    with suppress(KeyboardInterrupt):
        _follow(answer.rows, look, given.output, cost)
    return answer.status


def _follow(rows: Mapping[str, Row], look: Callable[[], WatchedAnswer], form: str, cost: Callable[[], float]) -> None:
    """Print changes until the user interrupts the command. Raises BrokenPipeError if the reader closes standard
    output."""
    trouble, spent = "", 0.0
    while True:
        sys.stdout.flush()
        _wait(max(_EACH, _REST * spent))
        spent = cost()
        try:
            now, problem = look().rows, ""
        except NoAnswerError as error:  # the proxy may be restarting
            now, problem = rows, str(error)
        spent = cost() - spent
        if problem != trouble:
            print(output.shown(f"Error: {problem}" if problem else "answered again"), file=sys.stderr)
            trouble = problem
        _print(list(changes(rows, now, form)), form)
        rows = now


def _wait(seconds: float) -> None:
    """Sleep. Raises BrokenPipeError as soon as the reader closes standard output."""
    poller = select.poll()
    poller.register(sys.stdout, 0)  # POLLERR and POLLHUP are always reported
    if poller.poll(seconds * 1000):
        raise BrokenPipeError


def _print(found: list[tuple[str, str, Row]], form: str) -> None:
    at = timestamp(time.time())
    if form == "json":
        for kind, key, row in found:
            output.json_line({"at": at, "change": kind, "key": key, "row": row.fields})
        return
    for kind, _, row in found[:_SHOWN]:
        first, *others = row.lines
        output.say(f"{at[11:23]} {kind:<7} {first}")
        for line in others if kind != GONE else ():
            output.say(line)
    output.more(len(found) - _SHOWN)
