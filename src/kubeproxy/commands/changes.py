"""kube-proxy changes: the last changes of Services and the last problems, from the memory of the running proxy.

The proxy keeps the last 1,000 changes and problems since its start. Each line has the time (UTC), the Service, the
change, and the delay from the event's arrival to the kernel. An `x` marks the beginning of a problem, `ok` its end.
With NAMESPACE/NAME, or NAME in the namespace default: the changes of that Service, and the problems of the node. With
-f, the command also prints changes and problems as they happen, until Ctrl-C or for --seconds.

  kube-proxy changes --since 10m
  kube-proxy changes default/web -f
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from kubeproxy.ask.finding import clock
from kubeproxy.ask.source import Source, source
from kubeproxy.commands import YES, output
from kubeproxy.commands.flows import seconds
from kubeproxy.commands.services import service_name
from kubeproxy.config.durations import Duration
from kubeproxy.report.journal import Happened
from kubeproxy.server.text import timestamp

_EACH = 0.5  # seconds between two questions of -f
_MARKS = {"change": "", "problem": output.BAD, "end": output.OK}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    parser.add_argument("--since", type=_duration, metavar="DURATION", help="only those of the last 90s, 10m or 1h30m")
    parser.add_argument("-f", "--follow", action="store_true", help="then show changes and problems as they happen")
    parser.add_argument("--seconds", type=seconds, metavar="N", help="seconds to follow (default: until Ctrl-C)")


def _duration(text: str) -> Duration:
    value = Duration.parse(text)
    if value <= 0:
        raise ValueError(text)
    return value


def run(given: argparse.Namespace) -> int:
    """Print the answer; return the exit code."""
    asked, service = source(given), "/".join(service_name(given.name)) if given.name else ""
    since = time.time() - given.since if given.since else 0.0
    found = asked.changes(0, since)
    entries = _of(found.entries, service)
    if given.output == "json" and not given.follow:
        output.json({"keptSince": timestamp(found.kept_since), "changes": list(map(_row, entries))})
        return YES
    if given.output != "json":
        if since < found.kept_since:
            output.marked(output.NOTE, f"nothing is stored of the time before {clock(found.kept_since)}")
        if not entries and not given.follow:
            output.say("nothing has changed")
    _print(entries, given.output)
    if given.follow:
        _follow(asked, found.entries[-1].number if found.entries else 0, service, given)
    return YES


def _follow(asked: Source, number: int, service: str, given: argparse.Namespace) -> None:
    """Print the entries after this number as they happen."""
    began, end = time.time(), time.monotonic() + (given.seconds or float("inf"))
    with suppress(KeyboardInterrupt):
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _EACH))
            if fresh := asked.changes(number, 0.0 if number else began).entries:
                number = fresh[-1].number
                _print(_of(fresh, service), given.output)


def _of(entries: Sequence[Happened], service: str) -> list[Happened]:
    """Return the entries that concern a Service, all for ''."""
    return [one for one in entries if not service or one.service in {service, ""}]


def _row(one: Happened) -> dict[str, object]:
    return {"at": timestamp(one.at), "kind": one.kind, "service": one.service, "what": one.what, "ms": one.ms}


def _print(entries: Sequence[Happened], form: str) -> None:
    for one in entries:
        if form == "json":
            output.json_line(_row(one))
            continue
        about, delay = f"{one.service}: " if one.service else "", f" ({one.ms:.1f} ms)" if one.ms is not None else ""
        output.say(f"{timestamp(one.at)[11:23]} {_MARKS[one.kind]:<2} {about}{one.what}{delay}")
    sys.stdout.flush()
