"""kube-proxy verify: API beside plan beside kernel, element by element.

Without a name all Services, what they share, and what is in the kernel and nobody's; with NAMESPACE/NAME, or NAME in
the namespace default, that Service alone, and whether the proxy has its newest version from the API server. Ends with
0 when nothing differs, with 1 when something does, with 2 when it could not be told. It never writes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.kernel.examiners import examiners
from kubeproxy.ask.kernel.looks import Seen, look
from kubeproxy.ask.kernel.present import REPAIR, text
from kubeproxy.ask.source import Source, knowing, source
from kubeproxy.backends.examination import Finding
from kubeproxy.commands import NO, UNKNOWN, YES, output
from kubeproxy.commands.services import service_name
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.plan import ServiceName
from kubeproxy.release import SAME_BUILD, build

_NICE = 5
"""What takes a second of a processor gives way to the proxy, and to whatever else the node is for."""

_SHOWN = 50
"""Findings that are listed one by one; `-o json` has them all."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    parser.add_argument("--api", action="store_true", help="ask the API server for all Services; for NAME it always is")


class Report(Struct, frozen=True):
    """What was seen of the kernel, in what the proxy is behind the API server, and what else is wrong, in sentences."""

    seen: Seen
    behind: Sequence[Finding]
    troubles: Sequence[str]

    def status(self, names: Sequence[ServiceName]) -> int:
        """Return the exit code, for what was asked about these Services, or about all."""
        if self.seen.findings or self.behind:
            return NO
        unseen = bool(names and self.seen.on_their_way)
        return UNKNOWN if unseen or self.troubles or self.seen.restless else YES


def run(given: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    names = [service_name(given.name)] if given.name else []
    if not names:
        os.nice(_NICE)
    asked = source(given)
    facts = asked.facts()
    if asked.running and facts.version != build():
        raise KubeProxyError(
            f"the proxy runs version {facts.version}, this command is {build()}: each has its own layout of rules, so "
            f"nothing was compared; {SAME_BUILD}"
        )
    knowing(asked)
    with examiners(facts, facts.world.families) as kernel:
        seen = look(asked.services, kernel, names)
    troubles = [*_troubles(facts)]
    if names and not seen.services:
        troubles.append(f"no Service {'/'.join(names[0])} is known here")
    behind: list[Finding] = []
    if asked.running and not facts.manifests and (names or given.api):
        behind = _behind(asked, facts, names, troubles)
    report = Report(seen, behind, troubles)
    if given.output == "json":
        output.json(_json(facts, report))
    else:
        _print(facts, report)
    return report.status(names)


def _behind(asked: Source, facts: Facts, names: Sequence[ServiceName], troubles: list[str]) -> list[Finding]:
    """Return in what the proxy is behind the API server; note why when that cannot be told."""
    from kubeproxy.ask import newest  # noqa: PLC0415 - it needs what a look at the kernel does not

    try:
        return newest.behind(asked.services, facts, names)
    except newest.Unreachable as error:
        troubles.append(str(error))
        return []


def _troubles(facts: Facts) -> Iterator[str]:
    """Yield what the proxy itself says is wrong, by part or family."""
    for part, why in facts.unready.items():
        yield f"the proxy is not ready, {part}: {why}"
    for one in facts.standings:
        if one.refusal:
            yield f"the kernel refuses the {one.family.label} changes: {one.refusal}"
        if one.difference:
            yield f"the proxy is repairing ({one.family.label}): {one.difference}"


def _json(facts: Facts, report: Report) -> dict[str, object]:
    seen = report.seen
    return {
        "mode": facts.mode,
        "services": seen.services,
        "findings": [finding._asdict() for finding in seen.findings],
        "behind": [finding._asdict() for finding in report.behind],
        "onTheirWay": ["/".join(name) for name in seen.on_their_way],
        "restless": ["/".join(name) for name in seen.restless],
        "caveats": seen.caveats,
        "troubles": report.troubles,
    }


def _print(facts: Facts, report: Report) -> None:
    seen = report.seen
    for findings in (seen.findings, report.behind):
        for finding in findings[:_SHOWN]:
            output.marked(output.BAD, text(finding))
        if len(findings) > _SHOWN:
            output.marked(output.NOTE, f"and {len(findings) - _SHOWN} more; -o json has them")
    for trouble in report.troubles:
        output.marked(output.BAD, trouble)
    for caveat in seen.caveats:
        output.marked(output.NOTE, caveat)
    for names, what in ((seen.on_their_way, "on their way into the kernel"), (seen.restless, "changing all the time")):
        if names:
            shown = ", ".join("/".join(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            output.marked(output.NOTE, f"{what}: {shown}")
    families = " and ".join(family.label for family in facts.world.families)
    where = f"({facts.mode}, {families})"
    if seen.findings:
        output.say(f"{_counted(len(seen.findings), 'difference')} in {_counted(seen.services, 'Service')} {where}")
        output.say(f"Fix: {REPAIR}")
    elif seen.services or not report.troubles:
        output.marked(output.OK, f"{_counted(seen.services, 'Service')} in the kernel as planned {where}")
    if report.behind:
        output.say("Fix: the proxy does not hear of changes: kube-proxy doctor looks at its watches")


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
