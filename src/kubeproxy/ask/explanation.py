"""The answer about one connection: the proxy's decision with findings, the first line, and the fixes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from kubeproxy.ask.checks import strangers
from kubeproxy.ask.finding import MISLEADS, STOPS, Diagnosis, Effect, End, Probe, Severity, doubt, end_of, fixes
from kubeproxy.ask.why import Why
from kubeproxy.model.answer import Outcome

_FOREIGN: Final = ("firewall", "notrack", "translation")
_OUTDATES: Final = ("conntrack", "api")  # the checks of the connection to the API server
_OPEN: Final = (
    "endpoints",
    "proxy",
    "arrival",
    "source",
    "routes",
    "mark",
    "leftovers",
    strangers.PRESENT,
    *_FOREIGN,
)  # checks that make the whole answer unknown if their result is unknown
_DOUBTS: Final = {
    "arrival": "unless its packets arrive by another interface",
    "source": "unless another program's source address keeps answers from returning",
    "routes": "unless a next hop is silent",
    "mark": "unless another program's mark changes its route",
}


class Explanation(Struct, frozen=True):
    """An answer: the proxy's decision, and findings about the kernel, other programs on this node, and the
    endpoints."""

    why: Why
    findings: tuple[Diagnosis, ...] = ()
    probes: tuple[Probe, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether a finding is an error, which makes the answer "no"."""
        return any(finding.is_wrong for finding in self.findings)

    @property
    def answer(self) -> str:
        """Whether an endpoint gets the connection: yes, no, or unknown. Unknown means, for example, that another node
        handles the connection, that no kube-proxy runs on this node, or that a probe failed and the client may still
        reach the endpoint."""
        if self.why.elsewhere is not None:
            return "no" if self.stopped else "unknown"
        if self.stopped or not (self.why.passes or self._is_left or self._leaves_open("translation")):
            return "no"
        return "unknown" if any(map(self._leaves_open, _OPEN)) else "yes"

    @property
    def ends(self) -> frozenset[End]:
        """All endpoints of the connection."""
        return frozenset(end_of(one.address) for one in self.why.endpoints)

    @property
    def surely_lost(self) -> frozenset[End]:
        """The endpoints that the connection certainly does not reach."""
        is_stopped = any(one.harm == STOPS and one.is_wrong for one in self.findings)
        return self.ends if is_stopped else self.lost(Effect.LOSES)

    def lost(self, *effects: Effect) -> frozenset[End]:
        """Return the endpoints of the findings with one of these effects."""
        return frozenset().union(*(one.harm.ends for one in self.findings if one.harm.effect in effects))

    def _cause(self, *effects: Effect) -> str:
        """Return the text of the worst error with one of these effects; '' without an error, or if it only means that
        answers bypass this node."""
        found = [one for one in self.findings if one.is_wrong and one.harm.effect in effects]
        worst = min(found, key=lambda one: one.harm.effect is Effect.MISLEADS, default=None)
        return worst.what if worst is not None and worst.about != "masquerade" else ""

    def _leaves_open(self, about: str) -> bool:
        """Return whether a finding of the check `about` makes the answer unknown, for example a failed probe."""
        return any(one.severity is Severity.UNKNOWN and one.about == about for one in self.findings)

    @property
    def _is_left(self) -> bool:
        """Whether rules in the kernel determine the outcome until a kube-proxy runs."""
        left = [one for one in self.findings if one.about in {"leftovers", strangers.PRESENT} and one.harm != MISLEADS]
        return any(one.severity is Severity.UNKNOWN for one in left)

    def _doubts(self) -> Iterator[str]:
        """Yield the reasons, for the heading, why the answer is unknown."""
        yield from (text for about, text in _DOUBTS.items() if self._leaves_open(about))
        first = [one.table for one in self.findings if one.severity is Severity.UNKNOWN and one.about in _FOREIGN]
        if first:
            yield f"unless rules of {' or '.join(dict.fromkeys(first))} come first"

    def _wrong(self, *abouts: str) -> str:
        """Return the text of the first error about one of these subjects; '' without such an error."""
        return next((one.what for one in self.findings if one.about in abouts and one.is_wrong), "")

    def _noted(self, about: str) -> str:
        """Return the text of the first note about a subject; '' without such a note."""
        return next((one.what for one in self.findings if one.about == about and one.severity is Severity.NOTE), "")

    @property
    def heading(self) -> str:
        """The answer in one line."""
        return f"{self.why.connection}: {self.decision}{self.doubt}"

    @property
    def decision(self) -> str:
        """The answer in one line, without the connection and the doubt about the endpoints."""
        if overruled := self._overruled():
            return self.why.decision(overruled)
        planned = "kube-proxy would forward it" * self.why.forwarded
        is_planned = not self.why.direct and self._leaves_open("proxy")
        decision = self.why.decision(planned, is_planned=True) if is_planned else self.why.decision()
        return decision + "".join(self._reservations())

    @property
    def doubt(self) -> str:
        """The end of the heading: the endpoints that a probe did not reach, and that the connection may reach."""
        is_open = self.answer == "unknown" and self.why.elsewhere is None and not self._overruled()
        return doubt(self.probes, self.findings) if is_open else ""

    def _overruled(self) -> str:
        """Return the outcome, for the heading, if a finding determines it; '' if the proxy determines it."""
        is_foreign = self.why.outcome == Outcome.NOT_OURS.value and not self._wrong("leftovers")
        worst = Severity.UNKNOWN if is_foreign else Severity.DEGRADED
        first = next((one for one in self.findings if one.about == "translation" and one.severity <= worst), None)
        if first is not None:
            program = "kube-proxy" if first.left_mode else "program"
            return f"another {program} takes it first: {first.what} ({first.severity.mark})"
        left = next(
            (one for one in self.findings if one.about == strangers.PRESENT and one.severity < Severity.NOTE), None
        )
        if left is not None and not (self.why.passes or self._leaves_open("proxy")):
            return f"{left.what} (?)"  # the proxy hangs, and the objects have no endpoint
        untracked = next((one for one in self.findings if one.about == "notrack"), None) if self.why.forwarded else None
        if untracked is not None and untracked.severity is not Severity.UNKNOWN:
            end = "no endpoint gets it" if untracked.is_wrong else "a program of this node gets it"
            return f"not translated, {end} ({untracked.severity.mark})"
        if stop := self._stop():
            return f"it does not get through: {stop} (x)"
        refused = self.why.outcome == Outcome.REFUSED.value
        closed = next((one for one in self.findings if refused and one.about == "sysctl" and one.harm == STOPS), None)
        return f"dropped, the client sees a timeout: {closed.what} (x)" if closed is not None else ""

    def _stop(self) -> str:
        """Return the cause that stops a connection which the proxy forwards or answers; '' without such a cause."""
        stop = next((one for one in self.findings if one.harm == STOPS and one.is_wrong), None)
        is_taken = stop is not None and stop.about == "ports"  # another program answers
        lost_all = self.lost(Effect.DELAYS, Effect.LOSES) >= self.ends > frozenset()
        is_answered = self.why.passes or self.why.outcome == Outcome.HEALTH.value
        if not (is_taken or (is_answered and (stop is not None or lost_all))):
            return ""
        first = stop or next((one for one in self.findings if one.harm.ends >= self.ends), None)
        cause = first.what if first is not None else "no endpoint is reached"
        outdated = self._wrong(*_OUTDATES) if stop is None else ""
        return cause + f" (x), and the objects may be outdated: {outdated}" * bool(outdated)

    def _reservations(self) -> Iterator[str]:
        """Yield the texts after the proxy's decision in the heading: lost connections, doubts and other findings."""
        why, failing = self.why, self.lost(Effect.LOSES)
        left = next((one for one in self.findings if one.about == "leftovers" and one.harm == MISLEADS), None)
        is_partial = bool(failing) and why.passes
        cause = self._cause(Effect.LOSES) if is_partial else self._cause(*Effect)
        if is_partial:
            lost = sum(one.share for one in why.endpoints if end_of(one.address) in failing)
            least = "at least " * self._leaves_open("endpoints")
            yield f", but {least}{lost:.1%} of the connections do not get through{': ' * bool(cause)}{cause} (x)"
        elif why.passes and self.answer == "no" and not left:
            yield f", but not all is well: {cause} (x)"
        if why.elsewhere is not None and self.stopped:
            yield f"; this node stops it: {cause} (x)"
        if why.elsewhere is None and self.answer == "unknown":
            yield from (f", {doubt} (?)" for doubt in self._doubts())
        if left:
            leads = strangers.leading(left.leads)
            yield f", unless another kube-proxy's rules take it first{leads} ({left.severity.mark})"
        if self._is_left:
            now = (one.what for one in self.findings if one.about == strangers.PRESENT)
            yield f"; {next(now, strangers.UNTIL + 'the rules in the kernel decide')} (?)"
        outdated = self._wrong(*_OUTDATES)
        if outdated and (failing or not why.passes):
            yield f", but the objects may be outdated: {outdated} (x)"
        if misnamed := self._wrong("node"):
            yield f", but the proxy may have another node's name: {misnamed} (x)"
        if older := self._noted("api"):
            yield f"; the objects may be old: {older} (-)"
        if self.answer == "yes" and (note := self._noted("firewall")):
            yield f"; {note} (-)"
        if why.outcome == Outcome.REFUSED.value and self._wrong("firewall"):
            yield ", unless a firewall of this node drops it first (x)"

    @property
    def fixes(self) -> list[str]:
        """The fixes that let the connection pass."""
        return fixes(self.why.fixes, self.findings)

    def fields(self) -> dict[str, object]:
        """Return the answer in the form of JSON."""
        return {
            "heading": self.heading,
            "decision": self.decision,
            "doubt": self.doubt,
            "answer": self.answer,
            "why": self.why,
            "findings": [finding.row() for finding in self.findings],
            "probes": self.probes,
            "fixes": self.fixes,
            "next": self.why.next,
        }
