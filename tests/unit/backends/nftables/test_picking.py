"""How slots are picked, worked out from the text of the rules: nothing is lost, and every endpoint gets its share."""

import re
from collections import defaultdict

import pytest

from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.model.addresses import Family
from support.cluster_objects import world

MAPS = ["endpoints", "local-endpoints", "nodeport-endpoints", "local-nodeport-endpoints"]
SIZES = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536]


def rules(family):
    found = defaultdict(list)
    for chain, rule in re.findall(r"^add rule \S+ \S+ (\S+) (.*)", Ruleset(family, world()).skeleton([]), re.MULTILINE):
        found[chain].append(rule)
    return found


@pytest.fixture(scope="module", params=list(Family))
def table(request):
    return rules(request.param)


def moduli(table, chain, endpoint_map):
    """The numbers of slots that the rules of a chain pick from, one after the other."""
    rules = [r for rule in table[chain] for r in (table[rule[5:]] if rule.startswith("jump ") else [rule])]
    found = [re.search(r"numgen random mod (\d+) map @(\S+)$", rule) for rule in rules]
    assert all(found)
    assert {match[2] for match in found} == {endpoint_map}
    return [int(match[1]) for match in found]


def shares(picks, count):
    """The probability of each slot, and that of no slot at all: a slot that is not there makes the rule not match."""
    left, chances = 1.0, [0.0] * count
    for modulus in picks:
        for slot in range(min(modulus, count)):
            chances[slot] += left / modulus
        left *= 1 - min(modulus, count) / modulus
    return chances, left


def counts_of(size, below):
    every = range(below + 1, size + 1)
    return every if len(every) < 60 else sorted({every[0], every[1], *every[:: len(every) // 24], every[-1]})


@pytest.mark.parametrize("endpoint_map", MAPS)
def test_a_frontend_is_sent_to_the_chain_of_its_class(table, endpoint_map):
    chain = endpoint_map.replace("endpoints", "pick")
    *classes, last = table[chain]
    assert last == f"goto {chain}-1"  # a frontend that changes its class while the packet looks for it
    found = [re.search(r"@(\S+) goto (\S+)$", rule) for rule in classes]
    assert [match.groups() for match in found] == [(f"{endpoint_map}-{size}", f"{chain}-{size}") for size in SIZES]


@pytest.mark.parametrize("endpoint_map", MAPS)
def test_no_connection_is_lost_and_all_endpoints_get_their_share(table, endpoint_map):
    chain = endpoint_map.replace("endpoints", "pick")
    for below, size in zip([0, *SIZES], SIZES, strict=False):
        picks = moduli(table, f"{chain}-{size}", endpoint_map)
        for count in counts_of(size, below):
            chances, lost = shares(picks, count)
            assert lost == 0
            assert sum(chances) == pytest.approx(1)
            assert max(chances) * count < 1.005, (size, count)
            assert min(chances) * count > 0.96, (size, count)


def test_few_endpoints_get_almost_exactly_their_share(table):
    for count, size in ((1, 1), (2, 4), (3, 4), (4, 4)):
        chances, _ = shares(moduli(table, f"pick-{size}", "endpoints"), count)
        assert max(chances) - min(chances) < 0.001


def test_one_endpoint_needs_one_rule(table):
    assert len(table["pick-1"]) == 1
