"""kube-proxy changes: the last changes of Services and the last problems, from the memory of the running proxy.

The proxy stores the last 1,000 changes and problems since its start. Each line contains the time (UTC), the Service,
the change, and the delay from the event's arrival until the kernel has the change. `x` marks the beginning of a
problem, `ok` its end. With NAMESPACE/NAME, or NAME in the namespace default, the command prints the changes of that
Service and the problems of the node. With -f, it then prints changes and problems as they happen, until Ctrl-C or for
--seconds. Exit code 2: no such Service exists, and no change of it is stored.

  kube-proxy changes --since 10m
  kube-proxy changes default/web -f
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress

from kubeproxy.ask.finding import clock
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.source import Source, source
from kubeproxy.commands import YES, output
from kubeproxy.commands.flows import seconds
from kubeproxy.commands.services import service_name
from kubeproxy.config.durations import Duration
from kubeproxy.errors import QuestionError
from kubeproxy.model.plan import ServiceName
from kubeproxy.report.journal import Happened
from kubeproxy.server.text import timestamp

_EACH = 0.5  # with -f: seconds between two queries
_MARKS = {"change": "", "problem": output.BAD, "end": output.OK}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    parser.add_argument("--since", type=Duration.parse, metavar="DURATION", help="only the last 90s or 1h30m")
    parser.add_argument("-f", "--follow", action="store_true", help="then print changes and problems as they happen")
    parser.add_argument("--seconds", type=seconds, metavar="N", help="seconds to follow (default: until Ctrl-C)")


def run(given: argparse.Namespace) -> int:
    asked, about = source(given), {"/".join(service_name(given.name)), ""} if given.name else ()
    since = time.time() - given.since if given.since is not None else 0.0
    kept_since, found = asked.changes(0, since)
    if given.name and (strange := _unknown_service(asked, service_name(given.name))):
        if not given.follow:
            raise QuestionError(strange)
        if given.output != "json":
            output.marked(output.NOTE, strange)
    if given.output == "json" and not given.follow:
        rows = [_row(one) for one in found if not about or one.service in about]
        output.json({"keptSince": timestamp(kept_since), "changes": rows})
        return YES
    if given.output != "json" and since < kept_since:
        output.marked(output.NOTE, f"nothing is stored from the time before {clock(kept_since)}")
    end, number = time.monotonic() + (given.seconds or float("inf")) if given.follow else 0.0, 0
    with suppress(KeyboardInterrupt):
        while True:
            for one in found:
                if not about or one.service in about:
                    _print(one, given.output)
            sys.stdout.flush()
            if time.monotonic() >= end:
                break
            time.sleep(_EACH)
            number = found[-1].number if found else number
            _, found = asked.changes(number, since)
    return YES


def _unknown_service(asked: Source, name: ServiceName) -> str:
    is_known = any(True for _ in asked.services([name])) or "/".join(name) in {
        one.service for one in asked.changes(0, 0.0).entries
    }
    return "" if is_known else f"{unwatched(name)}; and no change of it is stored"


def _row(one: Happened) -> dict[str, object]:
    return {"at": timestamp(one.at), "kind": one.kind, "service": one.service, "what": one.what, "ms": one.ms}


def _print(one: Happened, form: str) -> None:
    if form == "json":
        output.json_line(_row(one))
        return
    about, delay = f"{one.service}: " if one.service else "", f" ({one.ms:.1f} ms)" if one.ms is not None else ""
    output.say(f"{timestamp(one.at)[11:23]} {_MARKS[one.kind]:<2} {about}{one.what}{delay}")
