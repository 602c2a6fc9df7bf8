"""Our chains and rules are the same as those of the Go kube-proxy v1.36 for the same objects.

The recordings are iptables-save's output for the states of some conformance cases. The comparison ignores counters, the
order of chains, and the order of Services in shared chains.
"""

from __future__ import annotations

import pytest

from kubeproxy.backends.iptables.skeleton import SHARED
from kubeproxy.model.addresses import FAMILIES
from support.fake_tables import backend, normalised, parsed
from support.iptables_cases import NUMBERS, case, planner_of, saved

SHARED_CHAINS = frozenset(chain for _, chain in SHARED)


@pytest.mark.parametrize("uses_nft", [True, False], ids=["nft", "legacy"])
@pytest.mark.parametrize("label", ["IPv4", "IPv6"])
@pytest.mark.parametrize("number", NUMBERS)
def test_the_rules_are_those_of_the_go_proxy(number: str, label: str, uses_nft: bool):
    recorded, family = case(number), FAMILIES[label]
    made = None
    for n, step in enumerate(recorded["steps"]):
        planner = planner_of(recorded["config"], step["objects"])
        plans = {name: tuple(p for p in c.plans if p.key.family is family) for name, c in planner.compiled.items()}
        if made is None:
            made = backend(planner.world, family, uses_nft=uses_nft)
            list(made.resync(plans))
        else:
            made.set_world(planner.world)
            gone = {name: () for name in made._contents.entries if name not in plans}
            list(made.sync(list((plans | gone).items())))
        expected = normalised(parsed(saved(number, n, family)), family, SHARED_CHAINS)
        seen = normalised(made.tables.chains, family, SHARED_CHAINS)
        assert seen.keys() == expected.keys() | {
            p for p in seen if p[1] in ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
        }
        for place, rules in expected.items():
            assert seen[place] == rules, place
