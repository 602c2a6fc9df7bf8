"""kube-proxy conntrack: the use of the connection tracking table, its growth, its failures, and its largest users.

The command reads the kernel's counters twice, --seconds apart, and then all entries (5 us per entry). If no proxy runs,
the command counts entries by client only. Exit code 1: the table is nearly full, will be full within a minute, or
dropped packets between the two readings. With -w, the command reads again and again, and prints counts that change and
problems that begin or end. `kube-proxy flows -f` prints each connection of a Service when it begins and when it ends.

  kube-proxy conntrack
  kube-proxy conntrack --seconds 10 -o json
"""

from __future__ import annotations

import argparse
import re
import time
from functools import partial

import msgspec

from kubeproxy.ask.flows.follow import ground
from kubeproxy.ask.flows.fullness import Fillers, Fullness, fullness
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.ask.source import Source, source
from kubeproxy.commands import exit_code, output
from kubeproxy.commands.flows import seconds
from kubeproxy.commands.watching import Row, WatchedAnswer, answered, argument
from kubeproxy.errors import NoAnswerError
from kubeproxy.kernel.conntrack.tracked import entries, level, refusals
from kubeproxy.kernel.netlink.protocol import NETLINK_NETFILTER, Netlink
from kubeproxy.model.addresses import Family

_UNLISTED = "the proxy has no Services yet, so all entries are counted by client"
_NUMBER = re.compile(r"\d+")
_SHOWN = 10  # rows of a table in the text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=seconds, metavar="N", default=1.0, help="between the two readings (default 1)"
    )
    argument(parser)


def run(given: argparse.Namespace) -> int:
    asked = source(given)
    return answered(given, lambda: _look(asked, given.seconds))


def _look(asked: Source, wait: float) -> WatchedAnswer:
    try:
        unknown = "" if asked.facts().listed else _UNLISTED
    except NoAnswerError as error:
        unknown = f"{error}. All entries are counted under clients of no Service"
    who = Fillers(ServedPorts((), {}) if unknown else ground(asked).served())
    spent = time.process_time()
    with Netlink.open(NETLINK_NETFILTER) as link:
        before, began = (level(link), refusals(link)), time.monotonic()
        time.sleep(wait)
        after, passed = (level(link), refusals(link)), time.monotonic() - began
        for family in Family:
            for entry in entries(link, family):
                who.add(entry)
    state = fullness(before, after, passed, who)
    spent = time.process_time() - spent
    show = partial(_print, state, spent, unknown)
    return WatchedAnswer(msgspec.to_builtins(state), show, _rows(state), exit_code(wrong=state.problems))


def _rows(state: Fullness) -> dict[str, Row]:
    rows = {_NUMBER.sub("#", text): Row((text,), {"problem": text}) for text in state.problems}
    rows["entries"] = Row((_total(state),), {"entries": state.entries, "limit": state.limit})
    for one in (*state.services, *state.clients):
        rows[one.name] = Row((f"{one.name}  {one.entries}",), one)
    return rows


def _total(state: Fullness) -> str:
    share = f" ({state.entries * 1000 // state.limit / 10}%)" if state.limit else ""
    return f"{state.entries} of {state.limit} entries{share}"


def _print(state: Fullness, spent: float, unknown: str) -> None:
    output.say(f"{_total(state)}, {state.growth:+.1f} a second")
    for problem in state.problems:
        output.marked(output.BAD, problem)
    if not state.problems:
        output.marked(output.OK, "nothing was refused between the two readings")
    words = "{dropped} dropped, {early} removed early, {failed} not inserted, {clashes} clashes resolved, {invalid} "
    words += "invalid packets"
    output.marked(output.NOTE, f"since the node started: {words.format(**state.refused_before)}")
    if state.states:
        output.marked(output.NOTE, ", ".join(f"{count} {name}" for name, count in state.states.items()))
    for head, rows in (("SERVICE", state.services), ("CLIENT OF NO SERVICE", state.clients)):
        if rows:
            output.say()
            output.table((head, "ENTRIES"), [(one.name, str(one.entries)) for one in rows], "  ", _SHOWN)
    output.say()
    output.marked(output.NOTE, f"all entries were read, in {spent:.2f} s of CPU time")
    for fix in state.fixes:
        output.say(f"Fix: {fix}")
    if unknown:
        output.marked(output.NOTE, unknown)
