"""Tables that earlier versions of ours wrote, as `nft list table` showed them, are adopted with all that is in them.

The recordings are of 6956588 (2026-11-23), whose sets had other names, and of 7d69d8f (2026-11-25).
"""

import gzip
from pathlib import Path

import pytest

from kubeproxy.backends.nftables.ruleset import client_number
from kubeproxy.features import CONNECTION_COUNTERS, RESETS
from support.cluster_objects import world
from support.nftables_ground import KernelGround, resync
from support.nftables_plans import EVERYTHING, V4, plans_of, sticky

RECORDINGS = Path(__file__).parents[2] / "recordings" / "nftables"
WORLD = RESETS.on(CONNECTION_COUNTERS.on(world(families=[V4]), True), True)
CLIENTS = {"10.1.1.1": 0, "10.1.1.2": 1, "10.1.1.3": 2}
"""Addresses of clients, and the slot that each stays with."""


def services():
    everything = {key: value for key, value in EVERYTHING.items() if key != "session_affinity"}
    return {
        ("default", "a"): sticky("a", 1, 3, **everything),
        ("default", "b"): plans_of("b", 2, 2),
        ("default", "c"): plans_of("c", 3, 0),
    }


def number(address):
    """What today's sets have for a client."""
    return int.from_bytes(client_number(bytes(map(int, address.split(".")))), "little")


def adopted(ground, recording, clients):
    """Load a table with clients, and have it adopted; return its contents before and after."""
    ground.disturb(gzip.decompress((RECORDINGS / recording).read_bytes()).decode(), *clients)
    header, before = ground.header(), ground.contents()
    backend, plans = ground.start(WORLD), services()
    assert resync(backend, plans) == 0
    assert ground.header() == header
    ground.is_clean(backend, plans)
    return before, ground.contents()


def of_services(contents):
    """The elements of Services, by today's names of sets and maps; sets of clients have a number."""
    return {
        name.replace("affinity-", "session-"): elements
        for name, elements in contents.items()
        if not name[-1].isdecimal()
    }


def fresh():
    """The chains of a new table."""
    with KernelGround.fresh() as other:
        resync(other.start(WORLD), services())
        return other.chains()


@pytest.mark.parametrize("recording", sorted(path.name for path in RECORDINGS.iterdir()))
def test_rules_are_todays_and_elements_stay(ground, recording):
    before, after = adopted(ground, recording, ())
    assert of_services(after) == of_services(before)
    assert ground.chains() == fresh()


def test_clients_stay_with_their_endpoints(ground):
    lines = [
        f"add element ip kube-proxy affinity-{slot} {{ {address} . 0.0.0.4 timeout 1h expires 30m }}"
        for address, slot in CLIENTS.items()
    ]
    _, after = adopted(ground, "2026-11-23.nft.gz", lines)
    for address, slot in CLIENTS.items():
        assert after[f"clients-{slot}"] == {f"{number(address)} . 0.0.0.4"}
