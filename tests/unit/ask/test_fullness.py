"""When connection tracking is too full, and the text of the finding."""

from __future__ import annotations

import pytest

from kubeproxy.ask.flows.fullness import Fillers, fullness
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.kernel.conntrack.tracked import ANSWERED, Level, Refusals, Tracked, target_of
from kubeproxy.model.addresses import PROTOCOLS, pack
from support.nftables_plans import plans_of

TCP, UDP = PROTOCOLS["TCP"], PROTOCOLS["UDP"]


def fillers(*entries: tuple[str, str, int, int, int]) -> Fillers:
    """Entries as client, destination, protocol, TCP state and number."""
    found = Fillers(ServedPorts(plans_of("web", 1, 2), {}))
    for client, destination, protocol, state, count in entries:
        target = target_of(pack(destination) or b"", protocol, 80)
        for _ in range(count):
            found.add(Tracked(target, (pack(client) or b"") + b"\0\1", b"", ANSWERED, state, b""))
    return found


def look(entries: int, before: int | None = None, limit: int = 1000, who: Fillers | None = None, **refused: int):
    start = (Level(entries if before is None else before, limit), Refusals(dropped=7, early=2))
    end = (Level(entries, limit), Refusals(**{"dropped": 7, "early": 2} | refused))
    return fullness(start, end, 1.0, who or fillers())


def test_with_room_all_is_well():
    state = look(500)
    assert (state.problems, state.fixes, state.refused, state.refused_before["dropped"]) == (
        (),
        (),
        Refusals()._asdict(),
        7,
    )


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (look(1000), "it is full: new connections are dropped"),
        (look(900), "it is nearly full: 90%"),
        (look(99_999, limit=100_000), "it is nearly full: 99%"),
        (look(500, before=450), "at the present rate, the table is full in 10 s"),
        (look(500, dropped=10), "3 packets were dropped just now, because the table had no room"),
        (look(500, early=4), "2 entries were removed just now"),
        (look(500, dropped=8), "1 packet was dropped just now"),
        (look(500, failed=4), "4 packets were dropped just now, as their entry or"),
        (look(500, chains=1), "the hash table is too small"),
    ],
)
def test_errors_are_reported(state, said):
    (problem,) = state.problems
    assert said in problem
    assert "conntrack.maxPerCore" in state.fixes[-1]


def test_a_slow_growth_is_no_problem():
    assert look(501, before=500).problems == ()


def test_without_a_limit_nothing_fills():
    assert look(10**6, before=0, limit=0).problems == ()


def test_the_largest_users_are_named_and_services_are_separate():
    who = fillers(
        ("10.0.0.1", "10.96.0.1", TCP, 3, 5), ("10.0.0.2", "10.0.0.9", UDP, 0, 20), ("10.0.0.3", "10.0.0.9", TCP, 7, 1)
    )
    state = look(26, limit=26, who=who)
    assert [(one.name, one.entries) for one in state.services] == [("default/web", 5)]
    assert [(one.name, one.entries) for one in state.clients] == [("10.0.0.2", 20), ("10.0.0.3", 1)]
    assert state.states == {"UDP answered": 20, "TCP established": 5, "TCP time-wait": 1}
    assert state.fixes[0].startswith("10.0.0.2 has 20 of 26 entries")
    assert any("conntrack.udpTimeout" in fix for fix in state.fixes)


@pytest.mark.parametrize(("state", "field"), [(3, "tcpEstablishedTimeout"), (5, "tcpCloseWaitTimeout")])
def test_the_timeout_that_would_help_is_named(state, field):
    found = look(10, limit=10, who=fillers(("10.0.0.1", "10.0.0.9", TCP, state, 10)))
    assert any(field in fix for fix in found.fixes)
