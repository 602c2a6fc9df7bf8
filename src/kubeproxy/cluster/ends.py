"""Combines the answers of the client's node and of the endpoints' nodes about a connection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import count, groupby
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.ask.finding import AS_CLIENT, Diagnosis, End, Severity, doubt, end_of
from kubeproxy.ask.question import NODE
from kubeproxy.ask.why import Target
from kubeproxy.cluster.answers import WhyAnswer
from kubeproxy.cluster.fleet import Reply
from kubeproxy.commands import NO, UNKNOWN, YES
from kubeproxy.model.answer import Outcome
from kubeproxy.wording import counted

MOST: Final = 16
"""The maximum number of endpoints that are checked on their nodes."""


class Delivery(Struct):
    """The delivery of a connection's packets to one endpoint: the reply of the endpoint's node, and the answer in the
    reply (None without an answer)."""

    end: Target
    reply: Reply
    answer: WhyAnswer | None = None
    listed: bool | None = None
    """Whether the API server has the endpoint, or None if unknown."""

    @property
    def judged(self) -> WhyAnswer | None:
        """The answer; None if there is none, or if the node's proxy does not have the endpoint."""
        why = self.answer.why if self.answer is not None else None
        is_known = why is not None and (why.direct or why.outcome == Outcome.HEALTH.value)  # the proxy itself answers
        return self.answer if is_known else None

    @property
    def suspects(self) -> list[str]:
        """The chains on the node that may drop the packets."""
        found = self.judged.findings if self.judged is not None else []
        return [one.what for one in found if one.about == "firewall" and one.severity is Severity.NOTE]

    @property
    def fixes(self) -> list[str]:
        """The fixes on the endpoint's node."""
        if self.judged is not None:
            probes = {one.fix for one in self.judged.findings if one.about == "endpoints"}
            return [
                self.judged.named(fix) if fix in probes else f"on {self.reply.node}: {fix}" for fix in self.judged.fixes
            ]
        return [_api_fix(self.reply.node)] if self.answer is not None and self.listed else []

    @property
    def text(self) -> str:
        """The result in one line, with the reason if the node gave no answer."""
        return self.text_for([self.end]) + f": {self.reply.reason}" * (self.answer is None)

    def text_for(self, ends: Sequence[Target]) -> str:
        """Return the result in one line, for several endpoints of the node with the same kind of result."""
        node, answer, end = self.reply.node, self.answer, _with_share(ends)
        if answer is None:
            return f"{node}, which has {end}, gave no answer"
        if self.judged is None:
            late = ", which the API server has: its objects are outdated, so it could not check the delivery"
            api = {None: "", False: ", and the API server no longer has it", True: late}[self.listed]
            return f"the proxy of {node} does not have {end} as an endpoint{api}"
        if answer.answer == "yes":
            return f"{node} delivers to {end}" if answer.probes else f"nothing on {node} stops packets to {end}"
        cause, s = answer.cause(probes=True), "s" * (len(ends) == 1)
        if answer.cause(probes=False):
            return f"{node} {'does not' if answer.answer == 'no' else 'perhaps does not'} deliver to {end}: {cause}"
        if cause and any(one.refused for one in answer.probes):
            return f"{end} refuse{s} connections, also of {node}, its node"
        return f"{end} answer{s} no probe of {node}, its node: {cause}"

    @property
    def severity(self) -> Severity:
        """The severity of the result. The missing answer of a Go kube-proxy is only a note."""
        if self.judged is None:
            return Severity.NOTE if self.reply.go or self.listed is False else Severity.UNKNOWN
        return self.judged.severity


def _with_share(ends: Sequence[Target]) -> str:
    share = sum(one.share for one in ends)
    return f"{', '.join(one.address for one in ends)} ({share:.1%} of the connections)"


def asked(answer: WhyAnswer) -> list[Target]:
    """Return the endpoints to check on other nodes: first one endpoint of each node, then a second endpoint of each
    node, and so on. Of each node's endpoints, those that a probe did not reach come first."""
    failed = {one.address for one in answer.probes if one.problem}
    ends = [one for one in answer.why.endpoints if one.client and one.node not in {"", answer.node}]
    ends.sort(key=lambda one: one.address not in failed)
    turns: defaultdict[str, count[int]] = defaultdict(count)
    rank = {one.address: next(turns[one.node]) for one in ends}
    ends.sort(key=lambda one: rank[one.address])
    return ends[:MOST] if answer.why.forwarded and answer.why.elsewhere is None else []


def unchecked(answer: WhyAnswer, deliveries: Sequence[Delivery]) -> list[Target]:
    """Return the endpoints on other nodes that were not checked because there are more than `MOST`."""
    checked = {one.end.address for one in deliveries}
    others = [one for one in answer.why.endpoints if one.node not in {"", answer.node} and one.address not in checked]
    return others if deliveries else []


def outdated(answer: WhyAnswer, listed: Collection[End] | None) -> Diagnosis | None:
    """Return a finding if a node's proxy sends the connection to endpoints that the API server no longer has."""
    gone = [one for one in answer.why.endpoints if listed is not None and end_of(one.address) not in listed]
    if not gone:
        return None
    ends = ", ".join(f"{one.address} ({one.share:.1%} of the connections)" for one in gone)
    return Diagnosis(
        Severity.BROKEN,
        "api",
        f"the proxy of {answer.node} has outdated objects: the API server does not have {ends} as an endpoint",
        "if the endpoints have just changed, ask again",
        _api_fix(answer.node),
    )


def _api_fix(node: str) -> str:
    return f"see whether the proxy of {node} reaches the API server: `kubectl kubeproxy doctor --node {node}`"


def contrast(near: WhyAnswer, far: Delivery) -> None:
    """Add a finding to the answer of the endpoint's node if a probe from that node got a UDP reply, but a probe from
    the client's node got none."""
    quiet = {one.address for one in near.probes if one.unanswered}
    if far.judged is None or far.judged.answer != "yes" or far.end.address not in quiet:
        return
    if any(one.address == far.end.address and not (one.problem or one.unanswered) for one in far.judged.probes):
        what = f"{near.node} got no UDP reply, and {far.reply.node} got one"
        why = "; ".join(far.suspects) or "see the network between the nodes"
        far.judged.add(Diagnosis(Severity.UNKNOWN, "firewall", f"{what}: {why}"))
        far.reply.status = UNKNOWN


def confirm(near: WhyAnswer, far: Delivery) -> None:
    """If the client is a node, and the client's probe failed, too, report the failed probe from the endpoint's node as
    an error."""
    failed = {one.address for one in near.probes if one.problem}
    judged, connect = far.judged, AS_CLIENT.format(far.end.address)
    if judged is None or near.why.client != NODE or far.end.address not in failed:
        return
    if any(one.is_doubt for one in judged.findings):
        why = f"{near.node}, which is the client, does not reach it either"
        judged.findings = [
            replace(one, severity=Severity.BROKEN, why=why, fix=one.fix.replace(connect, "")) if one.is_doubt else one
            for one in judged.findings
        ]
        judged.answer, far.reply.status = "no", NO


def settle(near: WhyAnswer, deliveries: Sequence[Delivery]) -> None:
    """Remove the uncertain findings about probes of an endpoint if its own node certainly does not deliver to it."""
    lost = [one.end.address for one in deliveries if one.severity is Severity.BROKEN]
    near.findings = [one for one in near.findings if not (one.is_doubt and one.endpoint in lost)]


def unanswered(near: WhyAnswer, deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return the deliveries to endpoints that a probe from the client's node did not reach, if the endpoint's node has
    no problem."""
    doubts = {one.endpoint for one in near.findings if one.is_doubt}
    return [one for one in deliveries if one.severity is Severity.FINE and one.end.address in doubts]


def excuse(near: WhyAnswer, reply: Reply, far: Delivery, probe: WhyAnswer) -> None:
    """Turn the uncertain findings about failed probes into notes if the endpoint's node drops packets that the client's
    node itself sends, because such probes are no evidence about the client. `probe` is the answer of the endpoint's
    node about these packets."""
    if probe.answer != "no":
        return
    why = f"{far.reply.node} drops packets of {near.node} itself ({probe.cause(probes=False)}), but not this client's"
    near.findings = [
        replace(one, severity=Severity.NOTE, why=why, fix="")
        if one.is_doubt and one.endpoint == far.end.address
        else one
        for one in near.findings
    ]
    near.doubt = doubt(near.probes, near.findings) if near.doubt else ""
    if all(one.severity > Severity.UNKNOWN for one in near.findings) and near.answer == "unknown":
        near.answer, reply.status = "yes", YES


def question(end: Target, destination: str) -> tuple[str, str]:
    """Return the arguments of `kube-proxy why` on an endpoint's node; `destination` is the connection's destination."""
    return end.client, f"{end.address}/{destination.rpartition('/')[2]}"


def heading(answer: WhyAnswer, deliveries: Sequence[Delivery]) -> str:
    """Return the first line: the connection, and the node that drops or delivers it."""
    lost = {one.end.address for one in deliveries if one.severity is Severity.BROKEN}
    is_lost = bool(lost) and lost.union(_lost_here(answer, deliveries)) >= {one.address for one in answer.why.endpoints}
    none = "no endpoint gets it: " * (is_lost and len(answer.why.endpoints) > 1)
    return f"{answer.connection}: {none}{'; '.join(_parts(answer, deliveries))}"


def drops_elsewhere(answer: WhyAnswer, deliveries: Sequence[Delivery]) -> bool:
    """Return whether the endpoints' nodes stop the connection, and the client's node does not. Failed probes of the
    endpoints on these nodes are no problem of the client's node."""
    stops = any(one.severity < Severity.NOTE for one in deliveries)
    return stops and not answer.cause(probes=False) and not _lost_here(answer, deliveries)


def _lost_here(answer: WhyAnswer, deliveries: Sequence[Delivery]) -> list[str]:
    """Return the endpoints that were not checked on their own nodes, and that the connection does not reach from the
    client's node."""
    others = {one.end.address for one in deliveries}
    wrong = {one.endpoint for one in answer.findings if one.is_wrong}
    return [one.address for one in answer.why.endpoints if one.address in wrong - others]


def _parts(answer: WhyAnswer, deliveries: Sequence[Delivery]) -> Iterator[str]:
    doubtful = {one.reply.node for one in deliveries if one.severity < Severity.NOTE}
    fine = sorted({one.reply.node for one in deliveries if one.severity is Severity.FINE} - doubtful)
    carried = f"{', '.join(fine)} deliver{'s' * (len(fine) == 1)} it"
    if not any(one.answer is not None and one.answer.probes for one in deliveries):
        carried = f"nothing on {', '.join(fine)} stops it"
    here = answer.decided
    is_open = answer.answer == "yes" and all(one.severity is not Severity.BROKEN for one in deliveries)
    if is_open or not drops_elsewhere(answer, deliveries):
        if answer.answer == "yes" or not deliveries:
            yield f"{here}, and {carried}" if fine else here
        else:
            yield f"on {answer.node}, " * (answer.node not in answer.decision) + here
            if fine and not answer.cause(probes=False):
                routes = (one for one in answer.findings if one.about == "routes" and one.severity is Severity.NOTE)
                lost = {one.address for one in answer.probes if one.problem}
                here_only = lost and not any(one.end.address in lost for one in deliveries)
                causes = ("see the network between the nodes", *(f"{one.what} (-)" for one in routes))
                between = () if here_only else causes
                yield ": ".join((carried, *between))
    kinds = groupby(sorted(deliveries, key=_kind_of_result), key=_kind_of_result)
    for several in (list(group) for (severity, *_), group in kinds if severity < Severity.NOTE):
        one = several[0]
        yield f"{one.text_for([each.end for each in several])} ({one.severity.mark})"
    if others := unchecked(answer, deliveries):
        share = sum(one.share for one in others)
        yield f"{counted(len(others), 'more endpoint')} ({share:.1%} of the connections) could not be checked (?)"
    if not answer.cause(probes=False):
        seen = [(one.reply.node, what) for one in deliveries if one.severity is Severity.FINE for what in one.suspects]
        yield from (f"on {where}, {what} (-)" for where, what in dict.fromkeys(seen) if where not in doubtful)


def _kind_of_result(one: Delivery) -> tuple[Severity, str, bool]:
    return one.severity, one.reply.node, one.judged is not None
