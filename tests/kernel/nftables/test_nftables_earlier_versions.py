"""Tables of earlier versions, as recorded by `nft list table`, are adopted with all of their contents.

The recordings are of 6956588 (2026-11-23), whose sets had other names, and of 7d69d8f (2026-11-25), which had a chain
of session affinity for each number of endpoints, and a set of clients for each slot.
"""

import gzip
from pathlib import Path

import pytest

from kubeproxy.backends.nftables.affinity import client_number
from kubeproxy.features import CONNECTION_COUNTERS, RESETS
from support.cluster_objects import world
from support.nftables_ground import KernelGround, resync, without_slots
from support.nftables_plans import EVERYTHING, V4, plans_of, sticky

RECORDINGS = Path(__file__).parents[2] / "recordings" / "nftables"
WORLD = RESETS.on(CONNECTION_COUNTERS.on(world(families=[V4]), True), True)
CLIENTS = {"10.1.1.1": 0, "10.1.1.2": 1, "10.1.1.3": 2}
"""Addresses of clients, and the slot of each."""


def services():
    everything = {key: value for key, value in EVERYTHING.items() if key != "session_affinity"}
    return {
        ("default", "a"): sticky("a", 1, 3, **everything),
        ("default", "b"): plans_of("b", 2, 2),
        ("default", "c"): plans_of("c", 3, 0),
    }


def number(address):
    """Return the elements of the present version's sets for a client."""
    return int.from_bytes(client_number(bytes(map(int, address.split(".")))), "little")


def adopted(ground, recording, clients):
    """Load a table with clients, and let a backend adopt it; return its contents before and after."""
    ground.disturb(gzip.decompress((RECORDINGS / recording).read_bytes()).decode(), *clients)
    header, before = ground.header(), ground.contents()
    backend, plans = ground.start(WORLD), services()
    resync(backend, plans)
    assert ground.header() == header
    ground.is_clean(backend, plans)
    assert resync(ground.start(WORLD), plans) == 0
    return before, ground.contents()


def mapped(elements):
    return dict(element.split(" : ") for element in elements)


def fresh():
    """Return contents and chains of a new table."""
    with KernelGround.fresh() as other:
        resync(other.start(WORLD), services())
        return other.contents(), other.chains()


@pytest.mark.parametrize("recording", sorted(path.name for path in RECORDINGS.iterdir()))
def test_rules_are_todays_and_endpoints_keep_their_slots(ground, recording):
    before, after = adopted(ground, recording, ())
    contents, chains = fresh()
    assert ground.chains() == chains
    assert after.keys() == contents.keys()
    assert without_slots(after) == without_slots(contents)
    there = mapped(before["endpoints"])
    slots, endpoints = mapped(after["session-slots"]), mapped(after["session-endpoints"])
    for frontend, number in mapped(after["session-pools"]).items():
        protocol = frontend.split(" . ")[1]
        for slot in range(3):
            assert endpoints[f"{slots[f'{number} . {slot}']} . {protocol}"] == there[f"{frontend} . {slot}"]
    kept = {key: value for key, value in there.items() if key.startswith("10.96.0.2 ")}
    assert kept
    assert kept.items() <= mapped(after["endpoints"]).items()


@pytest.mark.parametrize(
    ("recording", "form"), [("2026-11-23.nft.gz", "affinity-{}"), ("2026-11-25.nft.gz", "clients-{}")]
)
def test_clients_stay_with_their_endpoints(ground, recording, form):
    lines = [
        f"add element ip kube-proxy {form.format(slot)}"
        f" {{ {address if 'affinity' in form else number(address)} . 0.0.0.4 timeout 1h expires 30m }}"
        for address, slot in {**CLIENTS, "10.1.1.3": 1}.items()
        for slot in {slot, CLIENTS[address]}
    ]
    _, after = adopted(ground, recording, lines)
    slots = mapped(after["session-slots"])
    first = {"10.1.1.1": 0, "10.1.1.2": 1, "10.1.1.3": 1}  # the lower one of two slots
    assert mapped(after["session-clients"]) == {
        f"{number(address)} . 0.0.0.4": slots[f"0.0.0.4 . {slot}"] for address, slot in first.items()
    }
