"""The selection of slots, computed from the text of the rules: no packet is lost, and every endpoint gets its share."""

import itertools
import re

import pytest

from kubeproxy.backends.nftables.layout import CLASSES, class_of
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.model.addresses import Family
from support.cluster_objects import world

MAPS = ["endpoints", "local-endpoints", "nodeport-endpoints", "local-nodeport-endpoints"]


def rules(family):
    return {chain: list(rules) for chain, (_, rules) in Ruleset(family, world()).chains([]).items()}


@pytest.fixture(scope="module", params=list(Family))
def table(request):
    return rules(request.param)


PUT_BACK = "put-port-back"


def reached(table, chain):
    """Return the rules of a chain and of the chains that it jumps to, without those that restore the port."""
    for rule in table[chain]:
        if rule.startswith(("jump ", "goto ")):
            if not rule.endswith(PUT_BACK):
                yield from reached(table, rule[5:])
        else:
            yield rule


def moduli(table, chain, endpoint_map):
    """Return the numbers of slots from which the rules of a chain select, one after the other."""
    found = [re.search(r"numgen random mod (\d+) map @(\S+)$", rule) for rule in reached(table, chain)]
    assert all(found)
    assert {match[2] for match in found} == {endpoint_map}
    return [int(match[1]) for match in found]


def shares(picks, count):
    """Return the probabilities of the first slot and of the last one, of all slots together, and of no slot at all.

    A rule does not match if the selected slot is missing. A selection from m slots gives each of them the same
    probability, so those of the slots in between lie between those of the first and the last slot.
    """
    left, first, last, total = 1.0, 0.0, 0.0, 0.0
    for modulus in picks:
        first += left / modulus
        last += left / modulus if modulus >= count else 0.0
        hit = min(modulus, count) / modulus
        total += left * hit
        left *= 1 - hit
    return first, last, total, left


def counts_of(size, below):
    every = range(below + 1, size + 1)
    return every if len(every) < 60 else sorted({every[0], every[1], *every[:: len(every) // 24], every[-1]})


@pytest.mark.parametrize("endpoint_map", MAPS)
def test_a_frontend_is_sent_to_the_chain_of_its_class(table, endpoint_map):
    chain = endpoint_map.replace("endpoints", "pick")
    (rule,) = table[chain]
    entries = re.fullmatch(r"th dport vmap \{ (.*) \}", rule)[1].split(", ")
    assert entries == [f"{size} : goto {chain}-{size}" for size in CLASSES]


@pytest.mark.parametrize("endpoint_map", MAPS)
def test_the_port_is_put_back_before_anything_is_picked(table, endpoint_map):
    for size in CLASSES:
        assert table[f"{endpoint_map.replace('endpoints', 'pick')}-{size}"][0] == f"jump {PUT_BACK}"
    assert table[PUT_BACK] == ["meta l4proto { tcp, udp, sctp } th dport set ct original proto-dst"]


@pytest.mark.parametrize("endpoint_map", MAPS)
def test_no_connection_is_lost_and_all_endpoints_get_their_share(table, endpoint_map):
    chain = endpoint_map.replace("endpoints", "pick")
    for below, size in itertools.pairwise((0, *CLASSES)):
        picks = moduli(table, f"{chain}-{size}", endpoint_map)
        assert picks[-1] == 1  # for a packet that loses its slots between two lookups
        for count in counts_of(size, below):
            first, last, total, lost = shares(picks, count)
            assert lost == 0
            assert total == pytest.approx(1)
            assert first * count < 1.005, (size, count)
            assert last * count > 0.995, (size, count)


@pytest.mark.parametrize("count", [*range(1, 300), 500, 1000, 5000])
def test_few_picks_miss(count):
    size = class_of(count)
    assert count <= size
    assert count / size >= (1 if count <= 8 else 0.8 if count <= 24 else 0.5 if count <= 256 else 0.25)


def test_up_to_8_endpoints_the_first_pick_hits_and_the_choice_is_exact(table):
    for count in range(1, 9):
        assert moduli(table, f"pick-{count}", "endpoints") == ([count, 1] if count > 1 else [1])
