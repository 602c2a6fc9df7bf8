"""The text about the age of the proxy's objects."""

import pytest
from msgspec.structs import replace

from kubeproxy.api.source import BOOKMARKED, Reach, ResourceStatus, why_stale


def status(resource, *, synced=True, connected=False, heard=0.0, trouble=""):
    made = ResourceStatus(resource)
    made.synced, made.connected, made.last_contact, made.trouble = synced, connected, heard, trouble
    return made


REFUSED = "10.0.0.1:6443: connection refused"


@pytest.mark.parametrize(
    ("services", "unreachable", "why"),
    [
        ({"connected": True}, "", None),
        ({"connected": True, "trouble": "x"}, "", None),
        ({"heard": 700.0}, REFUSED, None),
        ({}, "", "nothing received about services from the API server for 1000 s"),
        ({"trouble": "forbidden"}, "", "nothing received about services from the API server for 1000 s: forbidden"),
        ({"synced": False, "heard": 990.0}, "", "no list of services received from the API server for 10 s"),
        (
            {"synced": False, "heard": 990.0, "trouble": "Unauthorized"},
            "",
            "no list of services received from the API server for 10 s: Unauthorized",
        ),
        (
            {"synced": False, "heard": 990.0, "trouble": "from before"},
            REFUSED,
            f"no list of services received from the API server for 10 s: cannot reach the API server at {REFUSED}",
        ),
    ],
)
def test_the_first_reason_is_given_with_its_details(services, unreachable, why):
    statuses = [status("nodes", connected=True), status("services", **services)]
    assert why_stale(statuses, unreachable, 1000.0) == why


def test_a_refused_list_or_watch_has_a_text_with_the_resources():
    refused = {"trouble": "services: Unauthorized (code 401)"}
    old = status("servicecidrs", connected=True, trouble="from before")
    watched = [one.standing(1000.0) for one in (status("services", **refused), old, status("nodes", **refused))]
    reach = Reach(server="https://h", trouble="", watched=tuple(watched), certificates={})
    assert reach.failing == "the lists or watches of services, nodes fail: Unauthorized (code 401)"
    assert replace(reach, watched=(watched[1],)).failing == ""


def test_a_source_that_has_just_begun_is_not_as_old_as_the_machine():
    """Before the first answer of the server the age is the time since the start of the process."""
    fresh = ResourceStatus("services")
    assert 0.0 <= fresh.staleness(fresh.last_contact + 2.0) <= 2.0
    assert fresh.last_contact > 0.0


@pytest.mark.parametrize(
    ("bookmarked", "silent", "age"),
    [(True, BOOKMARKED, 0.0), (True, BOOKMARKED + 1, BOOKMARKED + 1), (False, 500.0, 0.0)],
)
def test_an_open_watch_is_stale_once_a_bookmark_is_overdue(bookmarked, silent, age):
    made = status("services", connected=True, heard=1000.0)
    made.bookmarked = bookmarked
    assert made.staleness(1000.0 + silent) == made.standing(1000.0 + silent).stale == age


@pytest.mark.parametrize("connected", [True, False])
def test_an_open_watch_has_no_trouble_of_earlier_attempts(connected):
    assert status("services", connected=connected, trouble="x").standing(1.0).trouble == "x" * (not connected)
