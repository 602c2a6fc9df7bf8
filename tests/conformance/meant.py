"""Compares the results of probes with the meaning of the rules in the kernel, as kubeproxy.meaning evaluates them.

The rules are read once for each step, in the node's network namespace.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

import topology as t

from kubeproxy.meaning.compare import FirstPacket, Shares, outcomes
from kubeproxy.meaning.found import place_of, rules_of_kube_proxy
from kubeproxy.model.addresses import Family

INTERFACES = {"ext": "eth0", "ext2": "eth0", "pod": "cbr0", "self": "cbr0", "host": ""}
PROTOCOLS = {"tcp": 6, "udp": 17}


def contradictions(probes: list[dict], answers: list[object]) -> Iterator[str]:
    """Yield a text for each probe whose result contradicts the rules in the kernel."""
    places = {family: place_of(family) for family in Family}
    rules = {family: rules_of_kube_proxy(family, place) for family, place in places.items()}
    for probe, answer in zip(probes, answers, strict=True):
        if probe["what"] != "health":
            family = Family.IPV6 if ":" in probe["dst"] else Family.IPV4
            packet = first_packet(probe, family)
            found = outcomes(rules[family], places[family], packet)
            if not agrees(found, answer, packet, probe):
                yield f"{packet}: the rules mean {found}, seen: {answer}"


def first_packet(probe: dict, family: Family) -> FirstPacket:
    """Return the first packet of a probe. The node uses its first address, or the address that it connects to."""
    source = probe["src"] or t.NODE_IP6 * (family is Family.IPV6) or t.NODE_IP
    own = (t.NODE_IP_2, "127.0.0.1", "::1")
    if probe["from"] == "host" and probe["dst"] in own:
        source = probe["dst"]
    return FirstPacket(source, probe["dst"], PROTOCOLS[probe["proto"]], probe["port"], INTERFACES[probe["from"]], "")


def agrees(found: Shares, answer: object, packet: FirstPacket, probe: dict) -> bool:
    """Return whether an answer is possible with the outcomes of a packet."""
    kinds = {outcome.kind for outcome, _ in found}
    if kinds == {"translated"}:
        if answer == {"sticky": True}:
            return len(found) == 1 or all(outcome.remembered for outcome, _ in found)
        if not isinstance(answer, dict):
            return False
        port = packet.port
        meant = {
            f"{ipaddress.ip_address(outcome.address)}|{port if outcome.port < 0 else outcome.port}": outcome.masquerade
            for outcome, _ in found
        }
        seen = {name: clients != [probe["src"]] for name, clients in answer["endpoints"].items()}
        return meant.keys() == seen.keys() and (probe["from"] == "host" or meant == seen)
    # A packet that no rule changes goes to the node itself, to a route, or nowhere.
    possible = {"refused": {"refused"}, "dropped": {"dropped"}, "passed": {"refused", "dropped"}}
    # An IPv6 socket ignores the ICMP error that comes while it sends its first SYN.
    late = {"dropped"} if ":" in packet.destination and packet.protocol == PROTOCOLS["tcp"] else set()
    return len(kinds) == 1 and answer in possible.get(kinds.pop(), set()) | late
