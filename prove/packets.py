"""Compares real packets with the model: connections to a sample of frontends must have the modelled outcome."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Container, Iterator

from kubeproxy.ask.facts import Facts
from kubeproxy.model.addresses import PROTOCOL_NAMES, pack, unpack
from kubeproxy.model.answer import Answer as Predicted
from kubeproxy.model.answer import Notice, Outcome, Packet, answer
from kubeproxy.model.planner import Planner
from kubeproxy.setup import host, modes
from lab.probes import Answer, NoAnswer, ask
from prove import truth
from prove.world import World

SAMPLES = 8
"""Number of connection attempts at each quiet moment."""
WAITS = 2
"""Maximum number of attempts with a timeout, or with a refusal that TCP gets only after its second SYN."""
DROPPED = 0.15
"""Seconds without an answer after which a packet counts as dropped; answers take a few milliseconds."""
PLACES = ("pod", "node", "outside")
ANSWERED = (3000, 3001)
"""The ports on which pods answer."""
_JUDGED = {Outcome.FORWARDED, Outcome.REFUSED, Outcome.DROPPED}


async def foretold(world: World, facts: Facts, planner: Planner, chance: random.Random) -> list[str]:
    """Return the packets whose outcome differs from the expected one."""
    local = await world.inside("node", lambda: host.packed_local_addresses(facts.world.families))
    everything = frozenset(address for found in local.values() for address in found)
    habits = modes.named(facts.mode).habits
    pods = frozenset(pack(ip) for pod, ips in world.live.ips.items() if pod[0] in "ab" for ip in ips.values())
    waits, questions = WAITS, []
    for place, protocol, packet in _sample(world, planner, chance):
        predicted = answer(planner, packet, everything, habits)
        late = predicted.notice in {Notice.TIMEOUT, Notice.LATE_ICMP}
        waits -= late
        if _answerable(pods, predicted) and (waits >= 0 or not late):
            questions.append(_asked(world, place, protocol, packet, predicted))
    return [one for found in await asyncio.gather(*questions) for one in found]


def _sample(world: World, planner: Planner, chance: random.Random) -> Iterator[tuple[str, str, Packet]]:
    """Yield random places, protocols and packets to frontends."""
    plans = [plan for found in truth.plans(planner).values() for plan in found]
    fronts = [(plan, frontend) for plan in plans for frontend in plan.all_frontends]
    for plan, frontend in chance.sample(fronts, min(SAMPLES, len(fronts))):
        place, family = chance.choice(PLACES), plan.key.family.label
        protocol = PROTOCOL_NAMES[frontend.protocol].lower()
        destination = frontend.address or pack(world.live.ips["node"][family])
        source = None if place == "node" else pack(world.live.ips[place][family])
        if protocol != "sctp" and destination is not None:
            interface = {"pod": "cbr0", "outside": "eth0"}.get(place, "")
            answering = [port for port in ANSWERED if frontend.port <= port <= frontend.last_port]
            port = chance.choice(answering or [frontend.port, frontend.last_port])
            yield place, protocol, Packet(source, destination, frontend.protocol, port, interface)


def _answerable(pods: Container[bytes | None], predicted: Predicted) -> bool:
    """Return whether every endpoint is a pod that answers with its name."""
    return predicted.outcome in _JUDGED and all(
        choice.destination[:-2] in pods and int.from_bytes(choice.destination[-2:], "big") in ANSWERED
        for choice in predicted.choices
    )


async def _asked(world: World, place: str, protocol: str, packet: Packet, predicted: Predicted) -> list[str]:
    wanted = {unpack(choice.destination[:-2]) for choice in predicted.choices}
    for _ in range(3 if predicted.outcome is Outcome.FORWARDED else 1):
        got = await _probe(world, place, protocol, packet, DROPPED if predicted.outcome is Outcome.DROPPED else 3.0)
        fine = {
            Outcome.FORWARDED: isinstance(got, Answer) and got.ip in wanted,
            Outcome.REFUSED: got == "refused",
            Outcome.DROPPED: got == "timeout",
        }[predicted.outcome]
        if not fine:
            steps = "; ".join(step.text for step in predicted.steps)
            met = f"{predicted.outcome.value} {sorted(wanted)} expected ({steps}), got {got}"
            return [f"packet: {place} {protocol} {unpack(packet.destination)}:{packet.port}: {met}"]
    return []


async def _probe(world: World, place: str, protocol: str, packet: Packet, timeout: float) -> Answer | NoAnswer:
    """Send a request; repeat it once if it could not leave: another socket of the node may use its UDP port."""
    got: Answer | NoAnswer = NoAnswer.UNREACHABLE
    for _ in range(3):
        question = functools.partial(ask, protocol, unpack(packet.destination), packet.port, timeout)
        got = await world.inside(place, question)
        if got != NoAnswer.UNREACHABLE or protocol == "tcp":
            break
    return got
