"""Findings on whether the kernel has the plan of an answer, and the question of `kube-proxy verify`: API server, plan
and kernel compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.kernel.looks import Seen, examiners
from kubeproxy.ask.kernel.looks import look as look_at
from kubeproxy.ask.kernel.probe import place
from kubeproxy.ask.lines import REPAIR, difference
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.source import Source, knowing
from kubeproxy.ask.why import THIS_NODE, Explained, Why
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.state import Finding, Kind
from kubeproxy.errors import ApplyError, KubeProxyError, NoAnswerError, Unsupported
from kubeproxy.kernel.route import source_for
from kubeproxy.model.addresses import destination_text, pack
from kubeproxy.model.plan import ServiceName
from kubeproxy.release import SAME_BUILD, build
from kubeproxy.setup import modes

_SHOWN = 10


def look(asked: Source, explained: Explained) -> tuple[Diagnosis, ...]:
    """Compare the kernel with the plan of an answer, which must have one. Raises KubeProxyError."""
    assert explained.plan is not None  # noqa: S101 - the caller looked
    key, facts = explained.plan.key, asked.facts()
    try:
        with examiners(facts, [key.family]) as kernel:
            seen = look_at(asked.services, kernel, [(key.namespace, key.name)])
    except (ApplyError, Unsupported) as error:
        return (_line(Severity.NOTE, f"what the kernel has could not be read: {error}"),)
    if seen.on_their_way or seen.unstable:
        return (_line(Severity.NOTE, f"a change of {key.namespace}/{key.name} is on its way into the kernel"),)
    return tuple(_lines(explained.why, facts, seen.findings))


def remembered(asked: Source, explained: Explained) -> str | None:
    """Return the endpoint to which session affinity binds the client of an answer, '' if it has none yet.

    None: there is no affinity, or the mode cannot read it. Raises KubeProxyError.
    """
    plan, why = explained.plan, explained.why
    if plan is None or not why.affinity:
        return None
    try:
        front = pack(place(why.destination.partition("/")[0])[0])
        client = source_for(front or b"") if why.source == THIS_NODE else pack(why.source)
        if client is None:
            return None
        with examiners(asked.facts(), [plan.key.family]) as kernel:
            telling = [each.remembered for each in kernel if each.remembered]
            found = {destination_text(one) for remembered_by in telling for one in remembered_by(plan, client)}
    except (ApplyError, Unsupported):
        return None
    return next((one.address for one in why.endpoints if one.address in found), "") if telling else None


def affinity(why: Why, kept: str | None) -> Iterator[Diagnosis]:
    """Yield the finding on session affinity from the result of `remembered`."""
    if kept:
        yield _line(Severity.FINE, f"session affinity keeps this client at {kept} (read now)")
    elif kept is not None:
        yield _line(Severity.NOTE, "session affinity keeps this client at no endpoint yet (read now)")
    elif why.forwarded and why.affinity:
        yield _line(Severity.NOTE, "a client that session affinity keeps at one of these endpoints gets that one alone")


def _lines(why: Why, facts: Facts, findings: Sequence[Finding]) -> Iterator[Diagnosis]:
    lacking = {f"{finding.what} " for finding in findings if finding.kind is Kind.MISSING}
    count = len(why.endpoints)
    there = sum(not any(f"endpoint {one.address} " in what for what in lacking) for one in why.endpoints)
    severity = Severity.BROKEN if findings else Severity.FINE
    if not count:
        words = "is not what the kernel has" if findings else "is what the kernel has"
        yield _line(severity, f"{why.outcome} {words} (read now)")
    elif modes.named(facts.mode).flows_end is FlowsEnd.PROXY:
        words = "do not lead" if findings else "lead"
        yield _line(severity, f"the kernel's rules {words} to the proxy's listener as planned (read now)")
    else:
        yield _line(severity, f"{there} of {count} ready endpoints are in the kernel (read now)")
    for finding in findings[:_SHOWN]:
        yield _line(Severity.BROKEN, difference(*finding), REPAIR)
    if len(findings) > _SHOWN:
        yield _line(Severity.NOTE, f"and {len(findings) - _SHOWN} more differences; kube-proxy verify has them")


def _line(severity: Severity, what: str, fix: str = "") -> Diagnosis:
    return Diagnosis(severity, "kernel", what, fix=fix)


class Report(Struct, frozen=True):
    """Differences between kernel and plans, outdated objects of the proxy, and other problems as sentences."""

    facts: Facts
    seen: Seen
    behind: Sequence[Finding]
    troubles: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.seen.findings or self.behind)

    def is_complete(self, names: Sequence[ServiceName]) -> bool:
        """Return whether all of the Services could be compared."""
        return not ((names and self.seen.on_their_way) or self.troubles or self.seen.unstable)

    def fields(self) -> dict[str, object]:
        """Return it for programs."""
        seen = self.seen
        return {
            "mode": self.facts.mode,
            "services": seen.services,
            "findings": [finding._asdict() for finding in seen.findings],
            "behind": [finding._asdict() for finding in self.behind],
            "onTheirWay": ["/".join(name) for name in seen.on_their_way],
            "unstable": ["/".join(name) for name in seen.unstable],
            "caveats": seen.caveats,
            "troubles": self.troubles,
        }


def verify(asked: Source, names: Sequence[ServiceName], *, api: bool) -> Report:
    """Compare these Services, or all; `api`: also compare all versions with the API server. Raises KubeProxyError."""
    facts = asked.facts()
    if asked.running and facts.version != build().name:
        raise KubeProxyError(
            f"the proxy runs version {facts.version}, this command is {build().name}: each has a layout of rules of "
            f"its own, so nothing was compared; {SAME_BUILD}"
        )
    knowing(asked)
    with examiners(facts, facts.world.families) as kernel:
        seen = look_at(asked.services, kernel, names)
    troubles = [*_troubles(facts)]
    if names and not seen.services:
        troubles.append(unwatched(names[0]))
    behind: list[Finding] = []
    if asked.running and not facts.manifests and (names or api):
        from kubeproxy.ask import cluster  # noqa: PLC0415 - it loads modules that a look at the kernel does without

        try:
            behind = cluster.behind(asked.services, facts, names)
        except NoAnswerError as error:
            troubles.append(str(error))
    return Report(facts, seen, behind, troubles)


def _troubles(facts: Facts) -> Iterator[str]:
    """Yield the problems that the proxy itself reports."""
    for part, why in facts.unready.items():
        yield f"the proxy is not ready, {part}: {why}"
    for one in facts.standings:
        if one.refusal:
            yield f"the kernel refuses the {one.family.label} changes: {one.refusal}"
        if one.difference:
            yield f"the proxy is repairing ({one.family.label}): {one.difference}"
