"""The meaning of the kernel's rules, by kubeproxy.meaning, compared with the objects: without planner and packets.

Judges only the Services of aimed.py and the steady Service: a few lines state which endpoints their cluster IPs have.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from kubeproxy.meaning.compare import FirstPacket, outcomes
from kubeproxy.meaning.found import place_of, rules_of_kube_proxy
from kubeproxy.model.addresses import Family
from prove.clients import ready
from prove.steps import Json
from prove.world import STEADY, World

_NAMES = re.compile(rf"{STEADY}|(sticky|late|twin|health|closed)[0-9]+")
_PROTOCOLS = {"TCP": 6, "UDP": 17}


def different(world: World) -> list[str]:
    """Return the cluster IPs whose endpoints by the rules of nftables mode differ from those of the objects.

    Blocking; runs on the node. The source of the packets is a client pod.
    """
    wrong = []
    for family in Family:
        place = place_of(family)
        rules = rules_of_kube_proxy(family, place)
        for service, address in _fronts(world, family):
            wanted = {one for one in ready(world, service["metadata"]["name"]) if (":" in one) == (":" in address)}
            for port in service["spec"]["ports"]:
                source, protocol = world.live.ips["pod"][family.label], _PROTOCOLS[port["protocol"]]
                packet = FirstPacket(source, address, protocol, port["port"], "cbr0", "")
                found = [outcome for outcome, _ in outcomes(rules, place, packet)]
                has = {str(ipaddress.ip_address(one.address)) for one in found if one.kind == "translated"}
                others = {one.kind for one in found} - {"translated"}
                if has != wanted or others != (set() if wanted else {"refused"}):
                    wrong.append(f"meaning: {packet}: {sorted(has | others)} instead of {sorted(wanted)}")
    return wrong[:5]


def _fronts(world: World, family: Family) -> Iterator[tuple[Json, str]]:
    """Yield the judged Services with their cluster IP of a family."""
    for record in world.store.records("services", "default"):
        if _NAMES.fullmatch(record.key[1]):
            service = record.decode()
            for address in service["spec"]["clusterIPs"]:
                if (":" in address) == (family is Family.IPV6):
                    yield service, address
