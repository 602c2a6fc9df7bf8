"""kube-proxy verify: API beside plan beside kernel, element by element.

Without a name all Services, what they share, and what is in the kernel and nobody's; with NAMESPACE/NAME, or NAME in
the namespace default, that Service alone, and whether the proxy has its newest version from the API server. Ends with
0 when nothing differs, with 1 when something does, with 2 when it could not be told. It never writes.
"""

from __future__ import annotations

import argparse

from kubeproxy.backends.examination import Finding
from kubeproxy.commands import NO, UNKNOWN, YES, output
from kubeproxy.commands.kernel import examiners
from kubeproxy.commands.looks import Seen, look
from kubeproxy.commands.services import service_name
from kubeproxy.commands.source import source
from kubeproxy.control.wire import Facts

REPAIR = "the proxy repairs them by itself within its sync period; `kube-proxy verify` again shows it"

_SHOWN = 50
"""Findings that are listed one by one; `-o json` has them all."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")


def run(given: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    names = [service_name(given.name)] if given.name else []
    asked = source(given)
    facts = asked.facts()
    with examiners(facts, facts.world.families) as kernel:
        seen = look(asked.services, kernel, names)
    troubles = _troubles(facts)
    if names and not seen.services:
        troubles.append(f"no Service {'/'.join(names[0])} is known here")
    if given.output == "json":
        output.json({"mode": facts.mode, **_json(seen), "troubles": troubles})
    else:
        _print(facts, seen, troubles)
    if seen.findings:
        return NO
    unseen = bool(names and seen.on_their_way)
    return UNKNOWN if unseen or troubles or seen.restless else YES


def _troubles(facts: Facts) -> list[str]:
    """Return what the proxy itself says is wrong, by part or family."""
    found = [f"the proxy is not ready, {part}: {why}" for part, why in facts.unready.items()]
    for one in facts.standings:
        if one.refusal:
            found.append(f"the kernel refuses the {one.family.label} changes: {one.refusal}")
        if one.difference:
            found.append(f"the proxy is repairing ({one.family.label}): {one.difference}")
    return found


def _json(seen: Seen) -> dict[str, object]:
    return {
        "services": seen.services,
        "findings": [finding._asdict() for finding in seen.findings],
        "onTheirWay": ["/".join(name) for name in seen.on_their_way],
        "restless": ["/".join(name) for name in seen.restless],
        "caveats": seen.caveats,
    }


def _print(facts: Facts, seen: Seen, troubles: list[str]) -> None:
    for finding in seen.findings[:_SHOWN]:
        output.marked(output.BAD, text(finding))
    if len(seen.findings) > _SHOWN:
        output.marked(output.NOTE, f"and {len(seen.findings) - _SHOWN} more; -o json has them")
    for trouble in troubles:
        output.marked(output.BAD, trouble)
    for caveat in seen.caveats:
        output.marked(output.NOTE, caveat)
    for names, what in ((seen.on_their_way, "on their way into the kernel"), (seen.restless, "changing all the time")):
        if names:
            shown = ", ".join("/".join(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            output.marked(output.NOTE, f"{what}: {shown}")
    families = " and ".join(family.label for family in facts.world.families)
    if not seen.findings and not troubles:
        output.marked(output.OK, f"{seen.services} Services are in the kernel as planned ({facts.mode}, {families})")
    if not seen.findings:
        return
    output.say(f"{len(seen.findings)} differences in {seen.services} Services ({facts.mode}, {families})")
    output.say(f"Fix: {REPAIR}")


def text(finding: Finding) -> str:
    """Return a finding as a line."""
    whose = "/".join(finding.service) if finding.service is not None else "no Service's"
    more = [f"wanted: {finding.wanted}"] if finding.wanted else []
    more += [f"present: {finding.present}"] if finding.present else []
    values = f" ({'; '.join(more)})" if more else ""
    return f"{whose}: {finding.kind}: {finding.what}{values} [{finding.where}]"
