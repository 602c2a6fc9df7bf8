"""Decodes the answers of `kube-proxy COMMAND -o json` (docs/answers.schema.json), and extracts facts.

A fact is a line of text that an answer states. Two nodes agree if their answers state the same facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from kubeproxy.ask import lines
from kubeproxy.ask.finding import Diagnosis, Probe, Severity, fixes
from kubeproxy.ask.flows.users import PortUse
from kubeproxy.ask.kernel.journeys import REFUSED
from kubeproxy.ask.kernel.verdicts import Traced, TracedReply
from kubeproxy.ask.snapshot import FINE_STATES
from kubeproxy.ask.state import DRAINED, pools
from kubeproxy.ask.why import THIS_NODE, Why
from kubeproxy.commands import exit_code
from kubeproxy.errors import NoAnswerError
from kubeproxy.model.addresses import place_of_text
from kubeproxy.wording import counted

_AVOIDED: Final = (
    "a load balancer must not send to a node without an endpoint: if it does, see whether it obeys the health check at "
    "spec.healthCheckNodePort (`kubectl kubeproxy why CLIENT NODE-IP:PORT` has the node's answer)"
)
_NUMBER: Final = re.compile(r"\d+")
_COMMAND: Final = re.compile(rb"`kube-proxy (?=(?:trace|doctor|verify|services|flows)\b|why`)")
"""Matches the beginning of a command in a node's text, to replace it by the plugin's command of the same name. `why` is
matched only without arguments, because a text with arguments already contains the plugin's command."""


class Fact(NamedTuple):
    """A line that an answer states. `more` has further lines; `expected` facts should be equal on all nodes. `fixes`
    contain commands, so addresses in them get no names.

    Facts with the same `key` count as equal; their texts differ only in numbers such as process IDs."""

    severity: Severity
    text: str
    more: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    expected: bool = False
    numbered: bool = False

    @property
    def key(self) -> tuple[Severity, str]:
        """The identity of the fact, which is equal on all nodes that state the fact."""
        return self.severity, _NUMBER.sub("#", self.text) if self.numbered else self.text


class _Answer(Struct, rename="camel", kw_only=True):
    """The fields that every answer has."""

    schema_version: Literal[1]
    version: str
    mode: str = ""


class WhyAnswer(_Answer, kw_only=True):
    """An answer of `why`. `node` is the name of the node that gave the answer; it replaces the words `this node` in
    texts. `decision` and `doubt` are the parts of the heading after the connection."""

    node: str = ""
    decision: str
    doubt: str = ""
    answer: Literal["yes", "no", "unknown"]
    why: Why
    findings: list[Diagnosis] = []
    probes: list[Probe] = []
    next: str = ""

    @property
    def fixes(self) -> list[str]:
        """The fixes that let the connection pass."""
        return fixes(self.why.fixes, self.findings)

    @property
    def severity(self) -> Severity:
        """The severity of the outcome."""
        return {"yes": Severity.FINE, "no": Severity.BROKEN, "unknown": Severity.UNKNOWN}[self.answer]

    def named(self, text: str) -> str:
        """Return a text of the answer with the node's name."""
        return text.replace(THIS_NODE, self.node)

    @property
    def connection(self) -> str:
        """The client and the destination."""
        return self.named(self.why.connection)

    @property
    def decided(self) -> str:
        """The heading after the connection."""
        return self.named(self.decision + self.doubt)

    def add(self, finding: Diagnosis) -> None:
        """Add a finding of this plugin. An error changes the answer to "no". Any other finding changes the answer "yes"
        to "unknown"."""
        self.findings.insert(0, finding)
        self.decision = f"{finding.what} ({finding.severity.mark}); {self.decision}"
        self.answer = "no" if finding.is_wrong or self.answer == "no" else "unknown"

    def cause(self, *, probes: bool) -> str:
        """Return the summary of the worst finding that is an error or makes the answer unknown; '' without such a
        finding. `probes` includes the findings of probes."""
        found = [one for one in self.findings if one.severity <= Severity.UNKNOWN]
        kept = [one for one in found if probes or one.about != "endpoints"]
        return self.named(min(kept, key=lambda one: (one.severity, one.about == "endpoints")).what) if kept else ""

    @property
    def avoided(self) -> bool:
        """Whether policy Local finds no endpoint on the node, so that a load balancer with health checks avoids the
        node."""
        first, blocking = self.why.steps[:1], [one.field for one in self.why.steps if not one.passes]
        is_balanced = [one.field for one in first] == ["status.loadBalancer.ingress"]
        return is_balanced and blocking == ["spec.externalTrafficPolicy"]

    def facts(self) -> Iterator[Fact]:
        """Yield one fact: the outcome of the connection, with the Service that owns the address, and the causes."""
        served = [step.text for step in self.why.steps[:1] if self.why.service and step.passes]
        stops = [text for each, text in lines.connection(self.why, self.findings) if each <= Severity.DEGRADED]
        heading = f"{self.why.connection}: {self.decision}{self.doubt}"
        if self.avoided:
            yield Fact(Severity.NOTE, heading, (*served, *stops, _AVOIDED))
            return
        yield Fact(self.severity, heading, (*served, *stops), tuple(self.fixes))


def _of_finding(one: Diagnosis) -> Fact:
    return Fact(one.severity, one.what, (one.why,), (one.fix,), numbered=True)


class DoctorAnswer(_Answer):
    """An answer of `doctor`; `pid` is 0 if no proxy answered the command."""

    pid: int
    findings: list[Diagnosis]
    unknown: list[str]

    def facts(self) -> Iterator[Fact]:
        """Yield the findings."""
        yield from map(_of_finding, self.findings)
        for text in self.unknown:
            yield Fact(Severity.UNKNOWN, text, numbered=True)


class _Difference(Struct):
    service: tuple[str, str] | None
    kind: str
    what: str
    where: str
    wanted: str = ""
    present: str = ""


class VerifyAnswer(_Answer):
    """An answer of `verify`."""

    services: int
    findings: list[_Difference]
    behind: list[_Difference]
    on_their_way: list[str]
    restless: list[str]
    caveats: list[str]
    troubles: list[str]
    ports: list[Diagnosis]

    def facts(self) -> Iterator[Fact]:
        """Yield the differences between API server, plan and kernel on the node."""
        for one in (*self.findings, *self.behind):
            yield Fact(Severity.BROKEN, lines.difference(*msgspec.structs.astuple(one)))
        yield from map(_of_finding, self.ports)
        yield from (Fact(Severity.UNKNOWN, text) for text in self.troubles)
        yield from (Fact(Severity.UNKNOWN, f"{name}: changing all the time") for name in self.restless)
        yield from (Fact(Severity.NOTE, f"{name}: on its way into the kernel") for name in self.on_their_way)
        yield from (Fact(Severity.NOTE, text) for text in self.caveats)
        yield Fact(Severity.FINE, f"compared {counted(self.services, 'Service')}", expected=True)


class _Service(Struct):
    namespace: str
    name: str
    state: str
    reason: str
    addresses: list[str]
    problems: list[str]
    unserved: list[str]
    serving: int


class ServicesAnswer(_Answer):
    """An answer of `services` without a name."""

    services: list[_Service]
    findings: list[Diagnosis] = []

    def facts(self) -> Iterator[Fact]:
        """Yield the reasons why objects are outdated, the state of each Service, and the ports without an endpoint for
        connections from the node."""
        yield from map(_of_finding, self.findings)
        for one in self.services:
            name, reason = f"{one.namespace}/{one.name}", f" ({one.reason})" * bool(one.reason)
            text = f"{name}: {one.state}{reason}, {counted(one.serving, 'endpoint')}: {' '.join(one.addresses)}"
            yield Fact(_severity(one.state), text, tuple(one.problems), expected=True)
            if one.unserved:
                yield Fact(Severity.NOTE, f"{name}: no endpoint for {' '.join(one.unserved)}")


class ServiceAnswer(_Answer):
    """An answer of `services NAME`."""

    namespace: str
    name: str
    state: str
    reason: str = ""
    resource_version: str | None = None
    slices: dict[str, str | None] = {}
    ports: list[dict[str, Any]] = []
    committed: list[dict[str, Any]] | None = None
    problems: list[str] = []
    findings: list[Diagnosis] = []

    def facts(self) -> Iterator[Fact]:
        """Yield facts about the Service: its state, the versions of its objects and the reasons why the objects may be
        outdated, and whether the kernel has its rules.

        Actions and local endpoints are no facts, because traffic policies make them differ between nodes; a frontend
        that drops connections because of policy Local is a note. Weights, drained endpoints and ejected endpoints are
        notes, because nodes may differ in them for a time."""
        yield from map(_of_finding, self.findings)
        reason = f" ({self.reason})" * bool(self.reason)
        yield Fact(_severity(self.state), f"{self.namespace}/{self.name}: {self.state}{reason}", expected=True)
        if self.resource_version:
            yield Fact(Severity.FINE, f"the Service in version {self.resource_version}", expected=True)
        for name, version in self.slices.items():
            yield Fact(Severity.FINE, f"slice {name} in version {version}", expected=True)
        for text in self.problems:
            yield Fact(Severity.NOTE, text)
        for port in self.ports if self.committed is None else self.committed:
            label = " ".join(filter(None, (port["name"], port["protocol"], port["family"])))
            for front in port["frontends"]:
                yield Fact(Severity.FINE, f"{front['kind']} {front['address']} ({label})", expected=True)
            groups = list(pools(port))
            ends = sorted({one for _, group in groups for one in group})
            yield from (Fact(Severity.FINE, f"endpoint {end} ({label})", expected=True) for end in ends)
            for kind, group in groups:
                if special := [text for one, text in group.items() if kind == DRAINED or text != one]:
                    yield Fact(Severity.NOTE, f"{label}: {kind} {' '.join(special)}")
            for front in port["frontends"] if ends else ():
                if dropped := [name for name in _ORIGINS if front.get(f"from{name}") == "drop"]:
                    text = f"{front['kind']} {front['address']} ({label}): dropped from {', '.join(dropped).lower()}"
                    yield Fact(Severity.NOTE, f"{text}, as policy Local has no endpoint on the node")
            if not ends:
                yield Fact(Severity.NOTE, f"no endpoint for new connections ({label})")


class FlowsAnswer(_Answer):
    """An answer of `flows`."""

    ports: list[PortUse]

    def facts(self) -> Iterator[Fact]:
        """Yield the Services with unanswered connections."""
        for name in dict.fromkeys(one.service for one in self.ports if one.unanswered):
            yield Fact(Severity.BROKEN, f"{name}: connections to which nothing came back for a second")


class TraceAnswer(Traced, frozen=True, kw_only=True):
    """An answer of `trace`."""

    schema_version: Literal[1]
    version: str
    mode: str = ""

    @property
    def drops(self) -> str:
        """The effect of the node on a packet: "refuses it", "drops it", or '' if no packet ended on the node."""
        lost = next((one for one in self.journeys if one.lost and not self.verdict.passed), None)
        if lost is None:
            return ""
        return "refuses it" if any(met.verdict == REFUSED for met in lost.met) else "drops it"

    @property
    def unanswered(self) -> bool:
        """Whether a request left the node and no answer arrived."""
        answers = any(one.direction == "answer" for one in self.journeys)
        return self.departed and self.verdict.passed is False and not answers

    @property
    def reset(self) -> bool:
        """Whether resets of the endpoint or of a firewall, from outside of the node, are the only answers."""
        answers = [one for one in self.journeys if one.direction == "answer"]
        outside = all(one.refusal == "reset" and not one.local for one in answers)
        return bool(answers) and outside and not self.verdict.passed and not self.drops

    @property
    def kept(self) -> TracedReply:
        """The conntrack entry of the last connection. If a reset removed the entry, the result is made from the
        addresses of the reset."""
        if not self.reset:
            return self.served[-1]
        answer = next(one for one in reversed(self.journeys) if one.direction == "answer")
        return TracedReply(answer.source, answered=True, client=place_of_text(answer.destination)[0])

    @property
    def status(self) -> int:
        """The exit code of the result."""
        return exit_code(wrong=self.verdict.passed is False, unknown=self.verdict.passed is None)

    def facts(self) -> Iterator[Fact]:
        """Yield no facts, because each node traces different packets."""
        return iter(())


_ORIGINS: Final = ("Pods", "Node", "Outside")  # the kinds of clients in names of fields, such as fromPods


def _severity(state: str) -> Severity:
    return Severity.FINE if state in FINE_STATES else Severity.BROKEN


NodeAnswer = WhyAnswer | DoctorAnswer | VerifyAnswer | ServicesAnswer | ServiceAnswer | FlowsAnswer | TraceAnswer

_KINDS: Final[dict[str, type[NodeAnswer]]] = {
    "why": WhyAnswer,
    "doctor": DoctorAnswer,
    "verify": VerifyAnswer,
    "services": ServicesAnswer,
    "flows": FlowsAnswer,
    "trace": TraceAnswer,
}


def decoded(text: bytes, command: str, arguments: Sequence[str]) -> tuple[NodeAnswer, list[Fact]]:
    """Decode an answer; return the answer and its facts. Raises NoAnswerError if the form is invalid, or if the text
    is the error of a command."""
    try:
        kind: type[NodeAnswer] = ServiceAnswer if command == "services" and arguments else _KINDS[command]
        tree = msgspec.json.decode(_COMMAND.sub(b"`kubectl kubeproxy ", text), type=dict[str, Any])
        if "error" in tree:
            error = {part: str(tree.get(part, "")) for part in ("fact", "fix", "kind", "more")}
            raise NoAnswerError(**error | {"fact": error["fact"] or str(tree["error"])})
        for name in ("findings", "ports"):  # a Diagnosis has the field `about`; differences and ports do not
            rows = msgspec.convert(tree.get(name, []), list[dict[str, Any]])
            tree[name] = [
                Diagnosis.from_row(msgspec.convert(row, dict[str, str])) if "about" in row else row for row in rows
            ]
        answer = msgspec.convert(tree, kind)
        return answer, list(answer.facts())
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise NoAnswerError(f"this plugin cannot decode the node's answer: {error}") from None
