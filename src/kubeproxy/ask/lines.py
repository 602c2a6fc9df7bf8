"""The texts of an answer of `why` and of a difference; the JSON answer contains the same values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.why import Missing, Why
from kubeproxy.model.answer import Outcome
from kubeproxy.model.balancing import WEIGHTS
from kubeproxy.model.ejection import EJECT

_REPAIR = "the proxy repairs differences within its sync period; run `{} verify` again to see the result"
REPAIR, REPAIR_OF_NODES = map(_REPAIR.format, ("kube-proxy", "kubectl kubeproxy"))

_SHOWN = 10  # endpoints in the text
Marked = tuple[Severity, str]  # A line below a heading, printed after the mark of its severity


def difference(
    service: Sequence[str] | None, kind: str, what: str, where: str, wanted: str = "", present: str = ""
) -> str:
    """Return a line about a difference between plan and kernel, or between API server and proxy."""
    owner = "/".join(service) if service is not None else "no Service's"
    more = [f"wanted: {wanted}"] if wanted else []
    more += [f"present: {present}"] if present else []
    values = f" ({'; '.join(more)})" if more else ""
    return f"{owner}: {kind}: {what}{values} [{where}]"


def connection(why: Why, findings: Iterable[Diagnosis]) -> Iterator[Marked]:
    """Yield the lines of an answer about a connection, below its heading."""
    if why.elsewhere is not None:
        yield Severity.BROKEN, f"{why.elsewhere.reason} ({why.elsewhere.field})"
    found = list(findings)
    is_taken = any(one.about == "translation" and one.severity is Severity.UNKNOWN for one in found)
    ends = Severity.UNKNOWN if is_taken and why.outcome == Outcome.NOT_OURS.value else Severity.BROKEN
    for step in why.steps:
        yield Severity.FINE if step.passes else ends, step.text + (f" ({step.field})" if step.field else "")
    yield from _endpoints(why)
    yield from _missing(why.missing)
    for finding in found:
        yield finding.severity, finding.text


def _endpoints(why: Why) -> Iterator[Marked]:
    endpoints = why.endpoints
    for one in endpoints[:_SHOWN]:
        where = f" on {one.node}" * bool(one.node) + f" in zone {one.zone}" * bool(one.zone)
        source = ", terminating and serving: used as no endpoint is ready" * one.terminating
        source += ", sees this node as the client" * one.masqueraded
        lost = (
            "the endpoint is the client itself"
            if one.is_unnamed(why.source)
            else "its answer does not return through this node"
        )
        source += f", not masqueraded: {lost}" * (not one.returns)
        yield Severity.NOTE if one.returns else Severity.BROKEN, f"{one.share:.1%} to {one.address}{where}{source}"
    if len(endpoints) > _SHOWN:
        others = {one.share for one in endpoints[_SHOWN:]}
        each = f", {min(others):.1%} each" if len(others) == 1 else ""
        yield Severity.NOTE, f"and {len(endpoints) - _SHOWN} more{each}"


def _missing(missing: Sequence[Missing]) -> Iterator[Marked]:
    for one in missing[:_SHOWN]:
        of_slice = one.slice and one.field not in {EJECT, WEIGHTS}
        where = f"{one.field} in EndpointSlice {one.slice}" if of_slice else one.field
        yield Severity.NOTE, f"not to {one.address}: {one.reason} ({where})"
    if len(missing) > _SHOWN:
        yield Severity.NOTE, f"nor to {len(missing) - _SHOWN} others; -o json has them"
