"""The journal of changes and problems: its entries, its figures per second, and its limits in number and bytes."""

from __future__ import annotations

import tracemalloc

import pytest
from msgspec.structs import replace

from kubeproxy.backends.mode import ForeignChange
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.engine.observer import ServiceProblem
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Rejected, Replaced, Upserted
from kubeproxy.model.objects import EndpointPort, EndpointSlice, Labels, ObjectMeta, Service, ServicePort, ServiceSpec
from kubeproxy.model.objects import SliceEndpoint as Endpoint
from kubeproxy.model.plan import NOTHING, FamilyGlobals, Globals, Problem
from kubeproxy.model.planner import Change, Planner
from kubeproxy.report import journal as module
from kubeproxy.report.journal import BYTES, FEW, LARGE, MOST, SECONDS, Happened, Journal
from kubeproxy.report.reporter import Reporter
from kubeproxy.server.text import timestamp
from support import cluster_objects
from support.cluster_objects import endpoint, endpoint_slice, world
from support.snapshots import planner_of

WORLD = Globals("node-a", "zone-a", ipv4=FamilyGlobals(), ipv6=None)
SOUND = FamilyStanding(Family.IPV4, sound_since=1.0)
REFUSED = replace(SOUND, refusal="no room")
DIFFERS = replace(SOUND, difference="table ip kube-proxy is gone")
AT = 2e9


def service(name, number=1, **spec):
    spec = {"cluster_ip": f"10.96.{number // 256}.{number % 256}", "ports": [ServicePort(port=80)]} | spec
    return Upserted("services", Service(ObjectMeta(name=name, namespace="default"), ServiceSpec(**spec)))


def endpoints(name, *addresses):
    meta = ObjectMeta(name=f"{name}-x", namespace="default", labels=Labels(name))
    entries = [Endpoint([address]) for address in addresses]
    return Upserted("endpointslices", EndpointSlice(meta, "IPv4", entries, [EndpointPort(8080)]))


class Proxy:
    """An engine with its journal, the clock of both, and the reason why the API server is unreachable."""

    def __init__(self):
        self.now = 0.0
        self.queued = {}
        self.standings = (SOUND,)
        self.unreachable = ""
        self.silent = 0.0
        self.failing = ""
        self.planner = Planner(WORLD)
        self.planner.apply([Replaced("services", ()), Replaced("endpointslices", ())])
        self.journal = self.made()
        self.journal.settled([])  # the first lists are empty
        self.journal._entries.clear()

    def made(self):
        made = Journal(lambda: (self.unreachable, self.silent, self.failing), lambda: self.now, lambda: AT + self.now)
        made.engine = self
        return made

    def take(self, *events, after=0.0):
        self.journal.arrived(events)
        self.planner.apply(events)
        self.now += after
        if changes := self.planner.take():
            self.journal.settled(changes)

    @property
    def lines(self):
        return [(one.kind, one.service, one.what, one.ms) for one in self.journal.past()[1]]


@pytest.fixture
def proxy(monkeypatch):
    monkeypatch.setattr(module, "conntrack", lambda _: [("a", "", "", 7.0), ("b", "", "", 100.0)])
    return Proxy()


def added(name, ms=0.0):
    return ("change", f"default/{name}", "added", ms)


LARGE_POOL = [f"10.244.{number // 250}.{number % 250 + 1}" for number in range(LARGE + 1)]
MANY = [service(f"s{number}", number) for number in range(FEW + 1)]


@pytest.mark.parametrize(
    ("batches", "lines"),
    [
        pytest.param([(0.5, service("web"))], [added("web", 500.0)], id="a change has the delay since its event"),
        pytest.param(
            [
                (0.0, service("web"), endpoints("web", "10.244.0.1")),
                (0.25, Deleted("endpointslices", "default", "web-x")),
            ],
            [added("web"), ("change", "default/web", "endpoints -1, 0 now", 250.0)],
            id="a deleted slice is an event of its Service",
        ),
        pytest.param(
            [(0.0, service("web")), (9.0, service("web")), (0.5, service("web", session_affinity="ClientIP"))],
            [added("web"), ("change", "default/web", "policy", 500.0)],
            id="an event without a change is not the beginning of the next change",
        ),
        pytest.param(
            [
                (
                    0.0,
                    service("web"),
                    endpoints("web", *[f"10.244.{n // 250}.{n % 250 + 1}" for n in range(LARGE + 1)]),
                ),
                (0.5, endpoints("web", "10.244.0.1")),
                (0.5, endpoints("web", "10.244.0.2", "10.244.0.3")),
            ],
            [
                added("web"),
                ("change", "default/web", "endpoints, 1 now", 500.0),
                ("change", "default/web", "endpoints +2 -1, 2 now", 500.0),
            ],
            id="a change of many endpoints is not counted",
        ),
        pytest.param(
            [(0.5, Replaced("services", (service("web").object,)))],
            [added("web", None)],
            id="a listed object has no time of arrival",
        ),
        pytest.param(
            [(0.5, Replaced("services", tuple(one.object for one in MANY)))],
            [("change", "", f"{FEW + 1} Services, by a list of objects or a change of the node", None)],
            id="many listed objects are one entry",
        ),
        pytest.param(
            [(0.5, *MANY)], [added(f"s{n}", 500.0) for n in range(FEW + 1)], id="many events are many entries"
        ),
    ],
)
def test_changes(proxy, batches, lines):
    for after, *events in batches:
        proxy.take(*events, after=after)
    assert proxy.lines == lines
    assert proxy.journal.changes == sum(int(what.split()[0]) if not name else 1 for _, name, what, _ in lines)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"IPv4": 3, "IPv6": 3}, "endpoints +3, 3 now"),
        ({"IPv4": 3, "IPv6": 2}, "endpoints +3, 3 now (IPv4); +2, 2 now (IPv6)"),
        ({"IPv6": 3}, "endpoints +3, 3 now (IPv6)"),
    ],
)
def test_a_dual_stack_pod_counts_once(added, words):
    web = cluster_objects.service("web", "10.96.0.10", "fd00:96::10")
    pods = {"IPv4": "10.244.1.{}", "IPv6": "fd00:244::{}"}
    slices = [
        endpoint_slice(*[endpoint(pods[family].format(n)) for n in range(1, count + 1)], name=family, family=family)
        for family, count in added.items()
    ]
    dual = world(families=list(Family))
    before, after = (planner_of(dual, web, *some).compiled["default", "web"] for some in ((), slices))
    assert module.what(Change(("default", "web"), before, after)) == words


@pytest.mark.parametrize(("number", "text"), [(1, "1 Service and 1 EndpointSlice"), (FEW + 1, "21 Services and 1 Ep")])
def test_the_first_lists_are_one_entry(proxy, number, text):
    """The changes settle in two parts; a later list has separate entries, and an event with its delay."""
    proxy.journal = proxy.made()
    proxy.planner.apply([Replaced("services", tuple(one.object for one in MANY[:number]))])
    proxy.planner.apply([Replaced("endpointslices", (endpoints("s0", "10.244.0.1").object,))])
    changes = proxy.planner.take()
    for part in (changes[:1], changes[1:]):
        proxy.journal.settled(part)
    text = text.replace("Ep", "EndpointSlice") + " listed"
    assert proxy.lines == [("change", "", text, None)]
    proxy.take(Replaced("services", tuple(one.object for one in MANY[: number - 1])))
    assert proxy.lines[1:] == [("change", f"default/s{number - 1}", "removed", None)]


def test_the_delay_counts_from_the_first_event_that_waits(proxy):
    proxy.journal.arrived([service("web")])
    proxy.planner.apply([service("web")])
    proxy.now = 1.0
    proxy.take(endpoints("web", "10.244.0.1"), after=1.0)
    assert proxy.lines == [added("web", 2000.0)]


@pytest.mark.parametrize(
    ("begin", "subject", "text"),
    [
        ({"standings": (REFUSED,)}, "IPv4", "the kernel refuses changes of IPv4: no room"),
        ({"standings": (DIFFERS,)}, "IPv4", "another program changed rules of IPv4: table ip kube-proxy is gone"),
        (
            {"unreachable": "192.0.2.1:6443: timeout"},
            "api",
            "the API server cannot be reached at 192.0.2.1:6443: timeout",
        ),
        (
            {"failing": "the lists or watches of services, nodes fail: Unauthorized (code 401)"},
            "lists",
            "the lists or watches of services, nodes fail: Unauthorized (code 401)",
        ),
    ],
)
def test_a_problem_has_a_beginning_and_an_end(proxy, begin, subject, text):
    before = {name: getattr(proxy, name) for name in begin}
    proxy.now = 3.0
    vars(proxy).update(begin)
    for _ in range(2):
        proxy.journal.tick()
        proxy.now += 1.0
        assert proxy.journal.began == {subject: AT + 3.0}
    vars(proxy).update(before)
    proxy.journal.tick()
    assert proxy.journal.problems == proxy.journal.began == {}
    assert proxy.lines == [("problem", "", text, None), ("end", "", f"after 2.0 s: {text}", None)]


def test_an_outage_begins_with_the_last_bytes_of_the_api_server(proxy):
    proxy.now, proxy.unreachable, proxy.silent = 95.0, "192.0.2.1:6443: timeout", 95.0
    proxy.journal.tick()
    assert proxy.journal.began == {"api": AT}
    proxy.now, proxy.unreachable, proxy.silent = 106.0, "", 0.0
    proxy.journal.tick()
    begin, end = (one.what for one in proxy.journal.past()[1])
    assert begin.endswith("192.0.2.1:6443: timeout, since " + timestamp(AT)[11:19] + " UTC")
    assert end.startswith("after 106.0 s: the API server cannot be reached at 192.0.2.1:6443: timeout")


def test_a_problem_lasts_as_long_if_the_clock_is_set_in_the_meantime(proxy):
    ahead = 0.0
    proxy.journal = Journal(lambda: (proxy.unreachable, 0.0, ""), lambda: proxy.now, lambda: AT + proxy.now + ahead)
    proxy.journal.engine = proxy
    proxy.unreachable = "192.0.2.1:6443: timeout"
    proxy.journal.look()
    proxy.now, proxy.unreachable, ahead = 4.0, "", -3600.0
    proxy.journal.look()
    assert proxy.lines[-1][2].startswith("after 4.0 s: the API server cannot be reached")


def test_a_short_problem_is_recorded_when_it_is_reported(proxy):
    proxy.standings = (REFUSED,)
    proxy.journal.look()
    proxy.standings = (SOUND,)
    proxy.journal.tick()
    assert [kind for kind, *_ in proxy.lines] == ["problem", "end"]


@pytest.mark.parametrize(
    ("notice", "line"),
    [
        (
            ServiceProblem(("default", "web"), "u", Problem("spec.x", "is bad")),
            ("problem", "default/web", "spec.x: is bad", None),
        ),
        (
            Rejected("endpointslices", "default", "web-1", "u", "endpoints[0]", "is bad"),
            ("problem", "", "EndpointSlice default/web-1: endpoints[0]: is bad", None),
        ),
        (ForeignChange("gone"), ("problem", "", "another program changed rules of IPv4: gone", None)),
    ],
)
def test_notices_of_the_engine_are_entries(proxy, notice, line):
    class Anything:
        def __getattr__(self, _):
            return Anything()

        def __call__(self, *_, **__):
            return Anything()

    reporter = Reporter(*[Anything() for _ in range(5)], proxy.journal)
    if isinstance(notice, ForeignChange):
        proxy.standings = (replace(SOUND, difference=notice.what),)
    reporter.noticed(notice)
    assert proxy.lines == [line]


def test_unusable_objects_do_not_push_out_changes(proxy):
    for _ in range(MOST):
        proxy.journal.unusable("", "Service default/x: is bad")
    proxy.journal.tick()
    assert len(proxy.lines) == FEW
    proxy.journal.unusable("", "Service default/x: is bad")
    assert len(proxy.lines) == FEW + 1


def test_seconds_have_changes_delays_and_the_size_of_conntrack(proxy):
    proxy.take(service("web"), after=0.5)
    proxy.journal.tick()
    proxy.now = 1.5
    proxy.journal.tick()
    assert list(proxy.journal.seconds) == [
        {"t": AT, "changes": 1, "p50": 500.0, "p99": 500.0, "max": 500.0, "conntrack": 7},
        {"t": AT + 1, "changes": 0, "p50": None, "p99": None, "max": None, "conntrack": 7},
    ]
    for _ in range(SECONDS):
        proxy.journal.tick()
    assert len(proxy.journal.seconds) == SECONDS


def test_entries_after_a_number_and_after_a_time(proxy):
    for number in range(4):
        proxy.take(service(f"s{number}", number), after=1.0)
    names = lambda entries: [one.service[-2:] for one in entries]  # noqa: E731
    third = proxy.journal.past()[1][2]
    assert names(proxy.journal.past(third.number)[1]) == ["s3"]
    assert names(proxy.journal.past(0, AT + 3.0)[1]) == ["s2", "s3"]
    assert proxy.journal.past()[0] == AT
    assert proxy.journal.number == third.number + 1


def test_the_number_of_entries_is_limited(proxy):
    for number in range(MOST + 5):
        proxy.journal.settled([Change(("default", f"s{number}"), NOTHING, NOTHING)])
        proxy.now += 1.0
    kept_since, kept = proxy.journal.past()
    assert (len(kept), kept[0].service, kept[-1].service) == (MOST, "default/s5", f"default/s{MOST + 4}")
    assert kept_since == AT + 4.0
    assert isinstance(kept[0], Happened)


def test_the_memory_is_limited(proxy):
    """The longest names and texts, in characters of four bytes, and more events than the journal stores."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    journal = proxy.made()
    for number in range(3 * MOST):
        name = f"{number:063}"
        journal.arrived([service(name, number % 60_000)])
        journal.settled([Change((f"{number:063}", f"{number:0253}"), NOTHING, NOTHING)])
        journal.unusable(name, chr(0x1F600) * 2000 + name)
        if number % 3 == 0:
            proxy.now += 1.0
            proxy.queued = {"something": "waits"}  # arrivals are stored
            journal.tick()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert BYTES / 2 < size < 2 << 20
