"""kube-proxy verify: compares the API server's objects, the proxy's plans and the kernel, element by element.

Without a name, the command compares all Services, their shared objects, and objects in the kernel without a Service;
with NAMESPACE/NAME, or NAME in the namespace default, only that Service, and whether the proxy has its newest version
from the API server. Exit code 0: no difference; 1: a difference; 2: unknown. The command never writes. With -w, the
command then prints differences that appear or disappear.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

from kubeproxy.ask.kernel.present import Report, verify
from kubeproxy.ask.lines import difference
from kubeproxy.ask.source import source
from kubeproxy.commands import exit_code, output
from kubeproxy.commands.services import service_name
from kubeproxy.commands.watching import Row, WatchedAnswer, answered, argument
from kubeproxy.wording import counted

_NICE = 5
"""The nice value of the command, which takes a second of CPU time and must not slow down the proxy or the node's
pods."""

_SHOWN = 50  # findings in the text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    parser.add_argument(
        "--api", action="store_true", help="query the API server for all Services (always done for NAME)"
    )
    argument(parser)


def run(given: argparse.Namespace) -> int:
    names = [service_name(given.name)] if given.name else []
    if not names:
        os.nice(_NICE)
    asked = source(given)

    def look() -> WatchedAnswer:
        report = verify(asked, names, api=given.api)
        show = partial(_print, report)
        code = exit_code(wrong=report.differs, unknown=not report.is_complete(names))
        return WatchedAnswer(report.fields(), show, _rows(report), code)

    return answered(given, look)


def _rows(report: Report) -> dict[str, Row]:
    found: dict[str, object] = {difference(*one): one._asdict() for one in (*report.seen.findings, *report.behind)}
    found |= {text: {"trouble": text} for text in report.troubles}
    found |= {one.what: one.row() for one in report.ports}
    return {text: Row((text,), fields) for text, fields in found.items()}


def _print(report: Report) -> None:
    facts, seen = report.facts, report.seen
    for findings in (seen.findings, report.behind):
        for finding in findings[:_SHOWN]:
            output.marked(output.BAD, difference(*finding))
        output.more(len(findings) - _SHOWN)
    for one in report.ports:
        output.marked(one.severity.mark, one.text)
        output.say(f"     Fix: {one.fix}")
    for trouble in report.troubles:
        output.marked(output.BAD, trouble)
    for caveat in seen.caveats:
        output.marked(output.NOTE, caveat)
    for names, what in ((seen.on_their_way, "on their way into the kernel"), (seen.unstable, "changing all the time")):
        if names:
            shown = ", ".join("/".join(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            output.marked(output.NOTE, f"{what}: {shown}")
    families = " and ".join(family.label for family in facts.world.families)
    where = f"({facts.mode}, {families})"
    if seen.findings:
        output.say(f"{counted(len(seen.findings), 'difference')}; {counted(seen.services, 'Service')} compared {where}")
        output.say(f"Fix: {report.fix}")
    elif seen.services or not (report.troubles or seen.on_their_way):
        output.marked(output.OK, f"{counted(seen.services, 'Service')} in the kernel as planned {where}")
    if report.behind:
        from kubeproxy.ask import cluster  # noqa: PLC0415 - the comparison has loaded it

        output.say(f"Fix: {cluster.late(facts)}")
