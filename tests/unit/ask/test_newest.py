"""Objects of which the proxy has an older version than the API server: only lasting delays are reported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec import structs

from kubeproxy.api.lists import Versions
from kubeproxy.api.source import Reach, WatchStanding
from kubeproxy.ask import cluster
from kubeproxy.ask.facts import ProgrammedService
from kubeproxy.backends.state import Kind
from kubeproxy.model.plan import Globals

A = ("default", "a")


class Facts:
    world = Globals("node-a")
    reach = Reach(
        server="https://api",
        trouble="",
        certificates=(),
        watched=(
            WatchStanding(resource="endpointslices", synced=True, connected=False, stale=12.4, trouble="no route"),
        ),
    )


def held(version="5", **slices) -> ProgrammedService:
    return ProgrammedService(name=A, state="programmed", version=version, slices=slices, plans=())


@pytest.fixture
def behind(monkeypatch):
    monkeypatch.setattr(cluster, "PAUSE", 0.0)

    def compare(read, *answers):
        said = [list(answer) for answer in answers]
        monkeypatch.setattr(cluster, "ask", lambda *_: read)
        return cluster.behind(lambda _: said.pop(0) if len(said) > 1 else said[0], Facts, [A])

    return compare


def test_the_same_versions_are_fine(behind):
    assert behind({A: Versions("5", {"a-1": "7"})}, [held(**{"a-1": "7"})]) == []


def test_a_version_that_arrives_a_moment_later_is_no_problem(behind):
    assert behind({A: Versions("6")}, [held()], [held("6")]) == []


def test_an_outdated_slice_is_reported_with_the_silence_of_the_watch(behind):
    (finding,) = behind({A: Versions("5", {"a-1": "8"})}, [held(**{"a-1": "7"})])
    assert (finding.service, finding.kind) == (A, Kind.DIFFERENT)
    assert finding.what == "EndpointSlice a-1 as the proxy has it"
    assert finding.wanted == "resourceVersion 8"
    assert finding.present == "resourceVersion 7; its watches received nothing about endpointslices for 12 s"


def test_a_service_that_one_of_them_lacks(behind):
    assert [one.kind for one in behind({A: Versions("5")}, [])] == [Kind.MISSING]
    assert [one.kind for one in behind({}, [held()])] == [Kind.EXTRA]


@pytest.mark.parametrize(
    ("trouble", "mode", "begin", "end"),
    [
        ("(code 403)", "nftables", "no watch of endpointslices for 90 seconds: (code 403): bind the identity", ""),
        ("", "nftables", "if `kube-proxy changes` shows that the object cannot be used, correct", "s continue"),
        ("", "userspace", "if `kube-proxy changes` shows", "but those that it relays end"),
    ],
)
def test_the_fix_is_that_of_the_watch_or_a_restart(trouble, mode, begin, end):
    watched = WatchStanding(
        resource="endpointslices", synced=True, connected=not trouble, stale=90.0 * bool(trouble), trouble=trouble
    )
    fix = cluster.late(SimpleNamespace(reach=structs.replace(Facts.reach, watched=(watched,)), mode=mode))
    assert fix.startswith(begin)
    assert fix.endswith(end)
