"""kube-proxy services: the Services on this node.

Without a name, the command prints a line for each Service; with NAMESPACE/NAME, or NAME in the namespace default, all
properties of that Service: frontends, endpoints, the action for each kind of client, the versions of its objects, and
whether the kernel has its rules. A port without an available endpoint is marked (x); this does not change the exit
code. Exit code 1: a printed Service is not in the kernel yet; 2: the Service is unknown, or the objects are outdated
because the API server has been unreachable or silent for a minute (after 20 seconds a line says so). With NAME and
--kubeconfig or --manifests, the first line says whether the rules of a stopped proxy still serve the Service. With -w,
the command then prints the Services that are new, changed or deleted."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kubeproxy.ask.checks.doubts import doubted, outdated
from kubeproxy.ask.facts import ProgrammedService
from kubeproxy.ask.finding import Severity
from kubeproxy.ask.listing import addresses, unserved
from kubeproxy.ask.snapshot import FINE_STATES
from kubeproxy.ask.source import Running, Source, knowing, source
from kubeproxy.ask.state import service_text
from kubeproxy.commands import NO, UNKNOWN, exit_code, output
from kubeproxy.commands.watching import Row, WatchedAnswer, answered, argument
from kubeproxy.errors import ConfigError, QuestionError
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals, Policy, ServiceName, ServicePlan

_LONGEST = 63 + 1 + 253
"""The maximum length of a namespace, a slash and the name of an object of any kind."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    argument(parser)


def service_name(text: str) -> ServiceName:
    """Parse the name of a Service. Raises ConfigError if it is invalid."""
    namespace, slash, name = text.rpartition("/")
    if not name or len(text) > _LONGEST or "/" in namespace or (slash and not namespace):
        raise ConfigError(f"NAME: expected NAMESPACE/NAME, or a NAME in default, got {text[:_LONGEST]!r}")
    return (namespace or "default", name)


def run(given: argparse.Namespace) -> int:
    asked = source(given)
    name = service_name(given.name) if given.name is not None else None
    return answered(given, lambda: _look(asked, name))


def _look(asked: Source, name: ServiceName | None) -> WatchedAnswer:
    facts = knowing(asked)
    old = outdated(asked, facts)
    if not isinstance(asked, Running):
        from kubeproxy.ask.kernel.stopped import left_behind  # noqa: PLC0415 - a running proxy needs no look

        old.insert(0, left_behind(asked, facts, name))
    here = facts.world
    try:
        made = _one(asked, name, here) if name is not None else _all(asked, here)
    except QuestionError as missing:
        if name is None:
            raise
        error = doubted(missing, old)
        fields = {"namespace": name[0], "name": name[1], "state": "unknown", "reason": str(error)}
        made = WatchedAnswer(fields, partial(_raise, error), {}, UNKNOWN)

    def show() -> None:
        for finding in old if made.status != UNKNOWN else ():
            output.marked(finding.severity.mark, finding.text)
            if finding.fix:
                output.say(f"Fix: {finding.fix}")
        made.show()

    head = {"mode": facts.mode} | ({"findings": [one.row() for one in old]} if old else {})
    wrong = made.status == NO or any(one.is_wrong and one.about == "proxy" for one in old)
    unknown = made.status or any(one.severity < Severity.NOTE for one in old)
    return WatchedAnswer({**head, **made.fields}, show, made.rows, exit_code(wrong=wrong, unknown=unknown))


def _all(asked: Source, here: Globals) -> WatchedAnswer:
    held = sorted(asked.services(), key=lambda one: one.name)
    rows = [(_cells(one, row, here), row) for one in held for row in [_row(one)]]
    return WatchedAnswer(
        {"services": [fields for _, fields in rows]},
        partial(output.table, ("SERVICE", "STATE", "ENDPOINTS", "ADDRESSES"), [cells for cells, _ in rows]),
        {cells[0]: Row(("  ".join(cells).rstrip(),), fields) for cells, fields in rows},
        exit_code(wrong=any(one.state not in FINE_STATES for one in held)),
    )


def _one(asked: Source, name: ServiceName, here: Globals) -> WatchedAnswer:
    detail = asked.service(name)
    text, key = service_text(detail, here), "/".join(name)
    row = Row((key, *text.decode().strip("\n").splitlines()), detail)
    code = exit_code(wrong=detail["state"] not in FINE_STATES)
    return WatchedAnswer(detail, partial(output.page, text), {key: row}, code)


def _raise(error: QuestionError) -> None:
    raise error


def _endpoints(held: ProgrammedService) -> tuple[int, int]:
    """Return the numbers of used and of all serving endpoints, in the family that has more used endpoints."""
    by_family: dict[Family, tuple[set[bytes], set[bytes]]] = {}
    for plan in held.plans:
        used, serving = by_family.setdefault(plan.key.family, (set(), set()))
        used.update(plan.cluster, plan.local)
        serving.update(plan.serving)
    return max(((len(used), len(used | serving)) for used, serving in by_family.values()), default=(0, 0))


def _wanted(held: ProgrammedService) -> Sequence[ServicePlan]:
    return held.plans if held.wanted is None else held.wanted


def _row(held: ProgrammedService) -> dict[str, object]:
    used, serving = _endpoints(held)
    return {
        "namespace": held.name[0],
        "name": held.name[1],
        "state": held.state,
        "reason": held.reason,
        "resourceVersion": held.version,
        "slices": held.slices,
        "endpoints": used,
        "serving": serving,
        "unserved": list(unserved(held.plans)),
        "cause": held.cause,
        "addresses": list(addresses(_wanted(held))),
        "problems": [f"{problem.field}: {problem.reason}" for problem in held.problems],
    }


def _cells(held: ProgrammedService, row: Mapping[str, Any], here: Globals) -> tuple[str, ...]:
    used, serving, lacking = row["endpoints"], row["serving"], row["unserved"]
    count = str(used) if used == serving else f"{used} of {serving}"
    gone = {one for plan in held.plans for one in plan.ejected or ()}
    if ejected := max(Counter(len(one) for one in gone).values(), default=0):  # a dual-stack pod counts once
        count += f", {ejected} ejected"
    if lacking:
        count += f", none for {' '.join(lacking)} (x)" if used else " (x)"
        count += f": {held.cause}" * bool(held.cause)
    elif serving and not used and all(plan.policies.internal is Policy.LOCAL for plan in held.plans):
        count += " on this node (policy Local)"
    return ("/".join(held.name), held.state, count, " ".join(addresses(_wanted(held), here)))
