"""The updates of pages: changed rows, the durations of changes, and when a page must reload everything."""

from __future__ import annotations

from typing import ClassVar

import pytest
from msgspec.structs import asdict, replace

from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.objects import (
    Annotations,
    EndpointConditions,
    EndpointHints,
    EndpointPort,
    EndpointSlice,
    Labels,
    NameHint,
    ObjectMeta,
    Service,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
)
from kubeproxy.model.plan import FamilyGlobals, Globals
from kubeproxy.model.planner import Planner
from kubeproxy.page.news import MOST_CHANGES, MOST_ROWS, News, row_of
from kubeproxy.report import journal as module
from kubeproxy.report.journal import Journal
from support import cluster_objects as kubernetes
from support.snapshots import planner_of, snapshot

WORLD = Globals("node-a", "zone-a", ipv4=FamilyGlobals(), ipv6=None)
CONDITIONS = {
    "": None,
    "unready": EndpointConditions(ready=False, serving=False),
    "draining": EndpointConditions(ready=False, serving=True, terminating=True),
    "serving": EndpointConditions(ready=False, serving=True),
}


def service(name, number=1, **spec):
    spec = {"cluster_ip": f"10.96.{number // 256}.{number % 256}", "ports": [ServicePort(port=80)]} | spec
    meta = ObjectMeta(name=name, namespace="default", creation_timestamp="2026-01-01T00:00:00Z")
    return Upserted("services", Service(meta, ServiceSpec(**spec)))


def endpoints(name, *found, piece="x", triggered=None, hints=None):
    """Endpoints are addresses, with a condition after a slash: 10.244.0.1/unready."""
    parts = [text.partition("/") for text in found]
    entries = [SliceEndpoint([address], CONDITIONS[state], "node-b", hints=hints) for address, _, state in parts]
    annotations = Annotations(triggered) if triggered else None
    meta = ObjectMeta(name=f"{name}-{piece}", namespace="default", labels=Labels(name), annotations=annotations)
    return Upserted("endpointslices", EndpointSlice(meta, "IPv4", entries, [EndpointPort(8080)]))


class Node:
    """A planner with its updates for pages, and its clock."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(module, "conntrack", lambda _: [("a", "", "", 7.0), ("b", "", "", 100.0)])
        self.now = 0.0
        self.planner = Planner(WORLD)
        self.planner.apply([Replaced("services", ()), Replaced("endpointslices", ())])
        self.standing = FamilyStanding(Family.IPV4, sound_since=1.0)
        self.gone: set[str] = set()
        self.snapshot = snapshot(self.planner, engine=self)
        clocks = (lambda: self.now), (lambda: 2e9 + self.now)
        self.journal = Journal(lambda: ("", 0.0, ""), *clocks)
        self.journal.engine = self
        self.news = News(self.snapshot, self.journal, *clocks)

    queued: ClassVar = {}
    local_addresses: ClassVar = {}

    @property
    def standings(self):
        return (self.standing,)

    def committed(self, name):
        return ()

    def hears(self, *events, after=0.0):
        """Deliver events, and report them as settled after this number of seconds."""
        self.journal.arrived(events)
        self.news.arrived(events)
        self.planner.apply(events)
        self.now += after
        if changes := self.planner.take():
            self.journal.settled(changes)
            self.news.settled(changes)


@pytest.fixture
def node(monkeypatch):
    return Node(monkeypatch)


def test_a_change_has_its_row_its_words_and_its_time(node):
    before = node.news.revision
    node.now = 4.0
    node.hears(service("web"), endpoints("web", "10.244.0.1", "10.244.0.2/unready"), after=0.5)
    message = node.news.take()
    assert message["rows"] == [
        ("default/web", "programmed", 1, 2, "ClusterIP", "", ["10.96.0.1:80/tcp"], 2e9 + 4.5, []),
    ]
    (change,) = message["changes"]
    revision = before + 1
    assert (change.at, change.kind, change.service, change.what, change.ms) == (
        2e9 + 4.5,
        "change",
        "default/web",
        "added",
        500.0,
    )
    assert message["lagMs"] == {"p50": 500.0, "p99": 500.0, "max": 500.0}
    assert (message["left"], message["perSecond"], message["queued"]) == (0, round(1 / 4.5, 1), 0)
    assert (message["revision"], message["gone"]) == (revision, [])
    assert message["conntrack"] == {"count": 7, "max": 100}
    assert message["families"] == [asdict(node.standing) | {"family": "IPv4"}]
    node.now += 1
    quiet = node.news.take()
    assert (quiet["rows"], quiet["changes"], quiet["lagMs"], quiet["perSecond"]) == ([], [], None, 0.0)
    assert quiet["revision"] == revision


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((endpoints("web", "10.244.0.1", "10.244.0.3", "10.244.0.4"),), "endpoints +2, 3 now"),
        ((endpoints("web", "10.244.0.9"),), "endpoints +1 -1, 1 now"),
        ((endpoints("web"),), "endpoints -1, 0 now"),
        ((service("web", external_ips=["192.0.2.1"]),), "addresses or ports"),
        ((endpoints("web", "10.244.0.1", "10.244.0.2/draining"),), "endpoints out of use +1"),
        ((service("web", session_affinity="ClientIP"),), "policy"),
        ((Deleted("services", "default", "web"),), "removed"),
    ],
)
def test_words_of_changes(node, events, words):
    node.hears(service("web"), endpoints("web", "10.244.0.1"))
    node.news.take()
    node.hears(*events)
    message = node.news.take()
    assert [change.what for change in message["changes"]] == [words]
    assert message["gone"] == (["default/web"] if words == "removed" else [])


def test_the_time_of_a_slice_that_goes_is_known(node):
    node.hears(service("web"), endpoints("web", "10.244.0.1"))
    node.news.take()
    node.hears(Deleted("endpointslices", "default", "web-x"), after=0.25)
    (change,) = node.news.take()["changes"]
    assert change.ms == 250.0


def test_a_change_without_a_changed_plan_changes_the_row(node):
    node.hears(service("web"), endpoints("web", "10.244.0.1"))
    first = node.news.take()
    node.hears(endpoints("web", "10.244.0.1", "10.244.0.2/unready"))
    message = node.news.take()
    assert [row[2:4] for row in message["rows"]] == [(1, 2)]
    assert (message["changes"], message["revision"]) == ([], first["revision"])


def test_a_pending_change_has_its_row_later(node):
    node.news.arrived([service("web")])
    node.planner.apply([service("web")])
    assert node.news.take()["rows"] == []
    node.news.settled(node.planner.take())
    assert [row[0] for row in node.news.take()["rows"]] == ["default/web"]


def test_an_arrival_that_came_to_nothing_is_not_the_next_ones(node):
    node.hears(service("web"), endpoints("web", "10.244.0.1"))
    node.hears(endpoints("web", "10.244.0.1"))
    node.news.take()
    node.now += 100.0
    node.hears(endpoints("web", "10.244.0.2"), after=0.5)
    assert node.news.take()["lagMs"]["max"] == 500.0


def test_many_changes_are_loaded_and_not_kept(node):
    many = [service(f"s{number}", number) for number in range(MOST_ROWS + 1)]
    node.hears(*many)
    message = node.news.take()
    assert (message["rows"], message["reload"]) == ([], True)
    assert len(message["changes"]) == MOST_CHANGES
    assert message["changes"][-1].service == f"default/s{MOST_ROWS}"
    assert message["left"] == MOST_ROWS + 1 - MOST_CHANGES
    assert "reload" not in node.news.take()
    node.hears(*[service(f"s{number}", number, session_affinity="ClientIP") for number in range(MOST_ROWS)])
    message = node.news.take()
    assert (len(message["rows"]), "reload" in message) == (MOST_ROWS, False)


def test_lists_and_troubles_have_all_loaded(node):
    node.hears(Replaced("services", (service("web").object,)))
    assert node.news.take()["reload"]
    troubles = node.news.troubles
    node.standing = replace(node.standing, refusal="no", sound_since=None)
    message = node.news.take()
    assert message["reload"]
    assert message["families"][0]["refusal"] == "no"
    assert node.news.troubles != troubles
    assert "reload" not in node.news.take()


def test_a_new_beginning_has_a_revision_that_never_was(node):
    node.hears(service("web"))
    before = node.news.revision
    node.news.begin()
    assert node.news.revision > before
    assert node.news.take()["rows"] == []


def test_rows_tell_policies_and_when_it_changed(node):
    node.hears(
        service("web", type="NodePort", external_traffic_policy="Local", session_affinity="ClientIP"),
        endpoints("web", "10.244.0.1", triggered="2026-02-01T00:00:00Z"),
    )
    node.hears(
        service("inside", 2, internal_traffic_policy="Local"),
        endpoints("inside", "10.244.0.1", piece="a"),
        endpoints("inside", "10.244.0.1", "10.244.0.2/unready", piece="b"),
    )
    node.news.begin()
    row = row_of(node.snapshot, ("default", "web"))
    assert (row[4], row[5], row[7]) == (
        "NodePort",
        "A",
        1769904000.0,
    )
    assert row_of(node.snapshot, ("default", "nothing")) is None
    row = row_of(node.snapshot, ("default", "inside"))
    assert (row[2:4], row[5], row[7]) == ((1, 2), "lN", 1767225600.0)
    node.hears(service("inside", 2, internal_traffic_policy="Local", external_ips=["192.0.2.1"]))
    assert row_of(node.snapshot, ("default", "inside"))[5] == "l"


def test_a_service_with_terminating_endpoints_alone_is_not_without_endpoints(node):
    node.hears(service("web"), endpoints("web", "10.244.0.1/draining", "10.244.0.2/unready"))
    node.hears(service("none", 2), endpoints("none", "10.244.0.3/unready"))
    node.hears(service("both", 3), endpoints("both", "10.244.0.4/draining", "10.244.0.5"))
    node.hears(service("unready", 4), endpoints("unready", "10.244.0.6/serving"))
    rows = {row[0].removeprefix("default/"): (row[2:4], row[5]) for row in node.news.take()["rows"]}
    assert rows == {"web": ((0, 2), "T"), "none": ((0, 1), ""), "both": ((1, 2), ""), "unready": ((0, 1), "")}


def test_terminating_endpoints_on_other_nodes_serve_nobody_here_with_policy_local(node):
    node.hears(service("web", internal_traffic_policy="Local"), endpoints("web", "10.244.0.1/draining"))
    row = row_of(node.snapshot, ("default", "web"))
    assert (row[2:4], row[5], row[8]) == ((0, 1), "lN", [])


def test_a_service_with_a_ready_endpoint_of_one_family_is_not_served_by_terminating_ones():
    web = kubernetes.service("web", "10.96.0.10", "fd00:10:96::10", ports=[ServicePort(port=80)])
    four = kubernetes.endpoint_slice(kubernetes.endpoint("10.244.1.1", ready=False, serving=False))
    six = kubernetes.endpoint_slice(kubernetes.endpoint("fd00:10:244:1::1"), family="IPv6", name="web-6")
    planner = planner_of(kubernetes.world(families=list(Family)), web, four, six)
    row = row_of(snapshot(planner), ("default", "web"))
    assert (row[2:4], row[5], row[8]) == ((1, 1), "", ["80/TCP (IPv4)"])


@pytest.mark.parametrize(
    ("address", "protocol", "counts", "letters"),
    [("10.244.1.1", "UDP", (0, 1), "P"), ("fd00:10:244:1::1", "TCP", (0, 0), "")],
)
def test_ready_endpoints_with_another_port_or_family_do_not_count(address, protocol, counts, letters):
    web = kubernetes.service("web", "10.96.0.10", ports=[ServicePort(port=80)])
    ports, family = [EndpointPort(port=8080, protocol=protocol)], "IPv6" if ":" in address else "IPv4"
    piece = kubernetes.endpoint_slice(kubernetes.endpoint(address), ports=ports, family=family)
    row = row_of(snapshot(planner_of(kubernetes.world(), web, piece)), ("default", "web"))
    assert (row[2:4], row[5], row[8]) == (counts, letters, ["80/TCP"])


def test_hints_that_exclude_endpoints_are_reported(node):
    near, far = (EndpointHints([NameHint(zone)]) for zone in ("zone-a", "zone-b"))
    node.hears(
        service("web"),
        endpoints("web", "10.244.0.1", piece="a", hints=near),
        endpoints("web", "10.244.0.2", piece="b", hints=near),
    )
    assert node.news.take()["rows"][0][5] == ""
    node.hears(endpoints("web", "10.244.0.2", piece="b", hints=far))
    row = node.news.take()["rows"][0]
    assert (row[2:4], row[5]) == ((2, 2), "H")
