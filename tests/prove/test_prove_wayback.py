"""The way back: the counts of requests, and our failures beyond the Go kube-proxy's own. Pure."""

import itertools

import pytest

from prove.asking import KINDS, Asked, Figures, figures
from prove.wayback import GO, IPT, JOURNEYS, NFT, OFFERS, OURS, Program, Step, faults, unsynced

FINE = Figures(1000, 0, 0.1)


def step(before, after, **found):
    """Return a change between programs such as 'ours nftables', with the results of each kind of requests."""
    programs = (Program(*text.split()) for text in (before, after))
    kinds = {name.replace("_", " "): each for name, each in found.items()}
    return Step(*programs, dict.fromkeys(KINDS, FINE) | kinds, ["new TCP from pod: 3", "new UDP from pod: 2"])


def test_figures_count_requests_and_the_longest_time_without_an_answer():
    steady = [Asked(at, at + 0.01) for at in range(10)]
    cut = [Asked(0, 0.5), Asked(3, 3.9, "timeout"), Asked(4, 4.9, "refused"), Asked(6, 6.25), Asked(9, 9.5)]
    assert figures([steady], 2, 5) == Figures(3, 0, 1.0)
    assert figures([steady, cut], 2, 8) == Figures(9, 2, 4.25)
    assert figures([cut], 0, 10) == Figures(5, 2, 5.75)


def test_a_gap_counts_as_far_as_it_is_between_and_until_the_end():
    cut = [Asked(0, 1), Asked(2, 3, "timeout"), Asked(9, 10)]
    assert figures([cut], 4, 7).gap == 3
    assert figures([cut[:2]], 0, 20) == Figures(2, 1, 19)
    assert figures([[]], 0, 20) == Figures(0, 0, 0)


@pytest.mark.parametrize("after", ["ours nftables", "Go nftables"])
def test_failures_on_the_way_to_ours_or_beyond_the_baseline_are_faults(after):
    own = step("Go nftables", "Go nftables")
    found = list(faults([step("ours nftables", after, new_TCP=Figures(1000, 3, 0.4)), own]))
    assert found[0].startswith(f"ours nftables to {after}, new TCP: 3 of 1000 failed, 0.4 s")
    assert found[1:] == ["  new TCP from pod: 3"]
    assert not list(faults([step("ours nftables", after), own]))


def test_failures_of_the_baseline_are_no_fault_unless_they_last_longer():
    own = step("Go nftables", "Go iptables", new_TCP=Figures(1000, 80, 1.2))
    same = step("ours nftables", "Go iptables", new_TCP=Figures(1000, 90, 1.3))
    longer = step("ours nftables", "Go iptables", new_TCP=Figures(1000, 90, 4.0))
    others = step("ours nftables", "Go iptables", new_UDP=Figures(1000, 1, 0.9))
    assert not list(faults([same, own]))
    assert "80 of 1000 and 1.2 s without us" in next(faults([longer, own]))
    assert "none may" not in next(faults([others, own]))
    assert "none may" in next(faults([same]))


def test_a_failed_sync_shows_in_a_log_or_a_metric():
    go = 'E1125 16:39:06.7 482 proxier.go:1723] "nftables sync failed" err=<'
    harmless = 'E1125 16:39:06.7 482 metrics.go:406] "failed to collect nfacct counter" err="object not found"'
    assert unsynced(GO, f"I1125 ok\n{harmless}\n{go}\n", "") == [go]
    assert unsynced(OURS, harmless, "") == [harmless]
    series = 'kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"}'
    assert unsynced(GO, "", f"{series} 0\n") == []
    assert unsynced(GO, "", f"{series} 2\n") == [f"{series} 2"]


def test_the_row_of_a_step_has_its_figures():
    row = step("ours nftables", "Go iptables", new_UDP=Figures(900, 4, 1.25)).line
    assert row == "| ours nftables | Go iptables | 0 of 1000 | 0 of 1000 | 4 of 900 | 0 of 1000 | 1.2 s |"


def test_journeys_have_all_ways_and_the_last_one_those_of_the_go_kube_proxy_alone():
    ways = {(a, b) for journey in JOURNEYS for a, b in itertools.pairwise(journey)}
    assert {(a.mode, b.mode) for a, b in ways if (a.name, b.name) == (OURS, GO)} == {
        (a, b) for a in (NFT, IPT) for b in (NFT, IPT)
    }
    assert {(a.mode, b.mode) for a, b in ways if a.name == GO} >= {(a, b) for a in (NFT, IPT) for b in (NFT, IPT)}
    assert {program.name for program in JOURNEYS[-1]} == {GO}


def test_services_use_the_features_that_leave_most_in_the_kernel():
    specs = [offer.spec for offer in OFFERS.values()]
    affinity = [spec for spec in specs if spec.get("sessionAffinity") == "ClientIP"]
    assert {spec.get("externalTrafficPolicy") for spec in affinity} == {None, "Local"}
    assert any(spec.get("internalTrafficPolicy") == "Local" for spec in affinity)
    assert any("loadBalancerSourceRanges" in spec for spec in specs)
    assert {name.partition("/")[2] for offer in OFFERS.values() for name in offer.annotations} == {
        "algorithm",
        "port-ranges",
        "weights",
    }
