"""The answer for every probe of the conformance cases is the recorded outcome of packets under the Go kube-proxy."""

from __future__ import annotations

import pytest

from kubeproxy.model.addresses import PROTOCOLS, destination_text, pack
from kubeproxy.model.answer import Answer, Notice, Outcome, Packet, answer
from kubeproxy.model.index import Index
from kubeproxy.setup import modes
from support.iptables_cases import LOCAL, case, planner_of
from support.places import CASES

BRIDGE = ("10.244.0.1", "fd00:244::1")
HERE = frozenset(pack(address) for address in (*LOCAL, *BRIDGE))
INTERFACES = {"pod": "cbr0", "self": "cbr0", "ext": "eth0", "ext2": "eth0", "host": ""}
HABITS = {name: modes.named(name).habits for name in ("nftables", "iptables")}
NUMBERS = sorted(path.stem for path in CASES.glob("*.json"))


def packet(probe: dict) -> Packet:
    source = pack(probe["src"]) if probe.get("src") else None
    protocol = PROTOCOLS[probe.get("proto", "tcp").upper()]
    return Packet(source, pack(probe["dst"]), protocol, probe["port"], INTERFACES[probe["from"]])


def predicted(made: Answer, probe: dict, recorded: object) -> object:
    """Return an answer in the words of the recordings."""
    if made.outcome is Outcome.HEALTH:
        return {"code": 200 if made.local_endpoints else 503, "localEndpoints": made.local_endpoints}
    if made.outcome is Outcome.FORWARDED:
        if probe.get("affinity"):
            return {"sticky": bool(made.affinity)}
        return {"endpoints": {_recorded(c.destination): _sources(c, probe, recorded) for c in made.choices}}
    if made.outcome is Outcome.NOT_OURS:
        # The node refuses packets to its own closed ports; packets to other addresses loop outside until they expire.
        return "refused" if pack(probe["dst"]) in HERE else "dropped"
    return "dropped" if made.notice is Notice.LATE_ICMP else made.outcome.value  # the probes wait for 0.25 s


def _recorded(destination: bytes) -> str:
    text = destination_text(destination)
    address, _, port = text.rpartition(":")
    return f"{address.strip('[]')}|{port}"


def _sources(choice, probe: dict, recorded: object) -> object:
    """Return the sources that an endpoint saw, if they agree with the answer; otherwise the answer's text."""
    seen = recorded["endpoints"].get(_recorded(choice.destination)) if isinstance(recorded, dict) else None
    if seen is None or probe["src"] is None:
        return seen
    return seen if (seen != [probe["src"]]) is choice.masqueraded else f"masqueraded: {choice.masqueraded}"


@pytest.mark.parametrize("mode", HABITS)
@pytest.mark.parametrize("number", NUMBERS)
def test_every_probe_is_answered_as_packets_were(number: str, mode: str) -> None:
    asked = 0
    played = case(number)
    config = dict(played["config"])
    block = {"masqueradeAll": config.pop("masqueradeAll", False)}
    for step in played["steps"]:
        planner = planner_of({**config, "mode": mode, mode: block}, step["objects"])
        index = Index(planner)
        for probe, recorded in zip(step["probes"], step["expected"][mode], strict=True):
            made = answer(planner, packet(probe), HERE, HABITS[mode])
            assert predicted(made, probe, recorded) == recorded, (probe, made)
            assert answer(planner, packet(probe), HERE, HABITS[mode], index) == made
            asked += 1
    assert asked
