"""`trace` on both ends: follows a packet on the client's node. If the packet leaves and gets no answer or a reset,
`trace` follows further packets of the connection on the endpoint's node. The result names the node that drops the
packets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from kubeproxy.ask.kernel.verdicts import TracedReply
from kubeproxy.ask.question import NODE
from kubeproxy.ask.why import Why
from kubeproxy.cluster.answers import TraceAnswer
from kubeproxy.cluster.fleet import Fleet
from kubeproxy.commands import NO, UNKNOWN, YES
from kubeproxy.errors import CANNOT_SEND
from kubeproxy.model.addresses import place_of_text
from kubeproxy.wording import counted

Flow: TypeAlias = tuple[str, str]  # client and destination, the arguments of `kube-proxy trace`
Ask: TypeAlias = Callable[[Mapping[str, Flow], int], Fleet]
"""Runs `kube-proxy trace` on each of these nodes at the same time, for a number of packets."""

_AGAIN: Final = 10
"""The number of packets in the second attempt. The client's node sends one packet per second; a trace that starts later
on the endpoint's node misses a few packets."""
_CERTAIN: Final = 2  # if this many packets left and none arrived, the network lost them


class Followed(NamedTuple):
    """The traces: the replies of one or two nodes, the flow that each node traced, the result, and the exit code."""

    fleet: Fleet
    flows: Mapping[str, Flow]
    text: str
    status: int


def follow(ask: Ask, node: str, client: str, why: Why, decider: str) -> Followed:
    """Trace a connection from `client` on the client's node (`node`) and on the endpoint's node. `why` is the answer of
    the node `decider`; if the destination itself is the endpoint, `decider` is the endpoint's node."""
    flows = {node: (client, why.destination)}
    fleet = ask(flows, 1)
    first = _answer(fleet, node)
    if first is None:
        return Followed(fleet, flows, f"{node} gave no answer: {fleet.replies[0].reason}", UNKNOWN)
    here = f"{node} {first.drops}: {first.verdict.text}" if first.drops else f"on {node}, {first.verdict.text}"
    where, doubt = _further(node, first, why, decider)
    if not where:
        others = len(why.endpoints) - 1 if first.verdict.passed else 0
        doubt += f"; `kubectl kubeproxy why` checks the other {counted(others, 'endpoint')}" * (others > 0)
        if first.unanswered and not doubt:
            here = _silent(node, first.served[-1].endpoint)
        return Followed(fleet, flows, f"{here}{doubt}", first.status)
    kept = first.kept
    end = f"{kept.endpoint}/{why.destination.rpartition('/')[2]}"
    flows[where] = kept.client, end
    # Packets directly to the endpoint have the client's own address. They are sent only if the client is the node, or
    # if packets through the Service also reach the endpoint with this address.
    direct = client == NODE or (first.sent and kept.client == client)
    again = ask({where: flows[where], node: (client, end if direct else why.destination)}, _AGAIN)
    (reply,) = (reply for reply in again.replies if reply.node == where)
    fleet.replies.append(reply)
    far, second = _answer(again, where), _answer(again, node)
    if far is None:
        text = f"{here}; {where}, which has {kept.endpoint}, gave no answer: {reply.reason}"
        return Followed(fleet, flows, text, UNKNOWN)
    fleet.answers[where] = far
    # Only requests prove the arrival: replies may belong to earlier connections of the client to the endpoint.
    if any(one.direction == "request" for one in far.journeys):
        lost = {one.address for one in why.endpoints if not one.returns}
        return Followed(fleet, flows, *_result_if_arrived(node, where, kept.endpoint, far, second, lost))
    if second is not None and _left(second, kept, client) >= _CERTAIN:
        text = f"it leaves {node} for {kept.endpoint}, but no rule of {where} meets it: see the network between them"
        return Followed(fleet, flows, text, NO)
    text = f"{here}; {where} received no further packet of it: let the client connect again during the trace"
    return Followed(fleet, flows, text, first.status)


def unsent(fleet: Fleet, node: str) -> str:
    """Return why a node cannot send packets from the client's network namespace; '' if the node can send."""
    reply = next(reply for reply in fleet.replies if reply.node == node)
    return reply.problem if reply.kind == CANNOT_SEND else ""


def _further(node: str, first: TraceAnswer, why: Why, decider: str) -> tuple[str, str]:
    """Return the node to which the packet left. If the node is unknown, return '' and the reason; the reason is '' if
    the packet did not leave."""
    if not (first.departed or first.reset):
        return "", ""
    endpoint = first.kept.endpoint
    is_there = decider != node and why.destination.startswith(f"{endpoint}/")
    where = decider if is_there else next((one.node for one in why.endpoints if one.address == endpoint), "")
    unknown = f"; the node of {endpoint} is unknown, so only this node was asked"
    return (where, "") if where not in {"", node} else ("", unknown * (not where))


def _result_if_arrived(
    node: str, where: str, endpoint: str, far: TraceAnswer, second: TraceAnswer | None, lost: Collection[str]
) -> tuple[str, int]:
    """Return the result and its exit code; `lost` contains the endpoints whose answers do not return through the
    node `where`."""
    if far.drops:
        return f"{where} {far.drops}: {far.verdict.text}", NO
    if far.unanswered:
        return _silent(where, far.kept.endpoint, lost), NO
    if not far.verdict.passed:
        return f"on {where}, {far.verdict.text}", far.status
    if second is not None and second.verdict.passed:
        return f"{where} delivers it, and {endpoint} answers; the first packet had no answer in time", YES
    if second is not None and (second.reset or second.lost_answers):
        return f"{where} delivers it, and {endpoint} answers, but on {node}, {second.verdict.text}", NO
    missing = f"but no answer arrives on {node}: see the network between the nodes"
    return f"{where} delivers it, and {endpoint} answers, {missing}", NO


def _silent(where: str, endpoint: str, lost: Collection[str] = ()) -> str:
    if endpoint in lost:
        return f"{where} forwards it to {endpoint}, whose answer does not return through {where}"
    return (
        f"{where} forwards it to {endpoint}, and nothing comes back: see the endpoint's pod (its process, and the rules"
        " in its network namespace)"
    )


def _left(second: TraceAnswer, kept: TracedReply, client: str) -> int:
    """Return how many packets left the client's node for the endpoint. If the client is the node itself, count only
    packets with the source address that the endpoint's node traced."""
    return sum(
        one.direction == "request"
        and bool(one.met)
        and one.met[-1].destination == kept.endpoint
        and (client != NODE or place_of_text(one.source)[0] == kept.client)
        for one in second.journeys
        if second.departed or second.reset
    )


def _answer(fleet: Fleet, node: str) -> TraceAnswer | None:
    found = fleet.answers.get(node)
    return found if isinstance(found, TraceAnswer) else None
