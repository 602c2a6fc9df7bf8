"""Connections by service port: readings of the kernel's counters, and the resulting totals."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables import counting
from kubeproxy.backends.nftables.counting import ConnectionMetrics, Counting, Totals
from kubeproxy.backends.nftables.layout import ENDPOINT_MAPS, SetId, service_key, slot_bytes
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nftables.elements import ElementCount
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import Annotations, ServicePort
from kubeproxy.model.plan import Policy
from kubeproxy.registry import MetricRegistry
from support.nftables_counters import connections
from support.nftables_plans import placed, plans_of

V4 = Family.IPV4


class Kernel:
    """Counters of elements that a test sets: (map, key) to (data, packets)."""

    def __init__(self):
        self.elements = {}
        self.reads = 0
        self.refused = set()

    def take(self, item, frontend, slot, packets, endpoint_map=ENDPOINT_MAPS[0]):
        (key,) = [service_key(f.key) for f in item.plan.frontends if str(f).startswith(frontend)]
        self.elements[endpoint_map, key + slot_bytes(slot + 1)[slot]] = item.cluster[slot] + b"\0\0", packets

    def read(self, name, keys):
        self.reads += 1
        if name in self.refused:
            raise ApplyError("no such table")
        there = [(key, *self.elements[name, key]) for key in keys if (name, key) in self.elements]
        return [ElementCount(key, data, packets, 60 * packets) for key, data, packets in there]


class Proxy:
    """Return the placed elements, and readings of their counters on a test's clock."""

    def __init__(self, monkeypatch, **plans):
        self.now = 1000.0
        monkeypatch.setattr(counting.time, "monotonic", lambda: self.now)
        self.kernel, self.registry = Kernel(), MetricRegistry()
        self.counting = Counting(V4, self.kernel.read, ConnectionMetrics(self.registry))
        self.placed = {("default", name): tuple(placed(found)) for name, found in plans.items()}

    def pass_over(self):
        self.now += counting.PERIOD
        self.counting.step(self.placed)

    def series(self):
        lines = self.registry.render().decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith("kubeproxy_service_new_connections_total{"):
                labels, _, value = line.rpartition(" ")
                names = dict(part.split("=") for part in labels[labels.index("{") + 1 : -1].split(","))
                found[names["service"].strip('"')] = float(value)
        return found


def test_connections_are_added_up_over_addresses_and_passes(monkeypatch):
    web = plans_of("web", 1, ports=[ServicePort(port=80, node_port=30080)])
    proxy = Proxy(monkeypatch, web=web, quiet=plans_of("quiet", 2))
    (item,) = proxy.placed["default", "web"]
    proxy.kernel.take(item, "cluster", 0, 5)
    proxy.kernel.take(item, "nodeport", 1, 2, ENDPOINT_MAPS[2])
    proxy.pass_over()
    assert proxy.series() == {"web": 7, "": 0}
    proxy.kernel.take(item, "cluster", 0, 6)
    proxy.pass_over()
    assert proxy.series() == {"web": 8, "": 0}


def test_connections_to_ranges_of_ports_have_a_series_of_their_own(monkeypatch):
    annotations = Annotations(port_ranges="10000-20000/udp")
    ports = [ServicePort(port=80, name="http")]
    proxy = Proxy(monkeypatch, web=plans_of("web", 1, ports=ports, annotations=annotations))
    (item,) = proxy.placed["default", "web"]
    proxy.kernel.take(item, "cluster", 0, 5)
    for number, packets in zip(item.endpoints[Policy.CLUSTER].values(), (3, 4), strict=False):
        proxy.kernel.elements[SetId.RANGE_ENDPOINTS, number] = b"", packets
    proxy.pass_over()
    labels = 'ip_family="IPv4",namespace="default",port="{}",protocol="{}",service="web"'
    text = proxy.registry.render().decode()
    assert f"_total{{{labels.format('http', 'TCP')}}} 5" in text
    assert f"_total{{{labels.format('ranges', '')}}} 7" in text
    proxy.placed["default", "web"] = tuple(placed(plans_of("web", 1, ports=ports)))
    proxy.pass_over()
    assert proxy.series() == {"web": 5, "": 7}


def test_the_counter_of_a_rewritten_element_begins_at_0(monkeypatch):
    proxy = Proxy(monkeypatch, web=plans_of("web", 1))
    (item,) = proxy.placed["default", "web"]
    proxy.kernel.take(item, "cluster", 0, 5)
    proxy.pass_over()
    proxy.kernel.take(item, "cluster", 0, 3)
    proxy.pass_over()
    assert proxy.series()["web"] == 8
    moved = item._replace(cluster=item.cluster[::-1])
    proxy.kernel.take(moved, "cluster", 0, 4)
    proxy.pass_over()
    assert proxy.series()["web"] == 12


def test_a_pass_that_fails_halfway_changes_nothing(monkeypatch):
    web = plans_of("web", 1, ports=[ServicePort(port=80, node_port=30080)])
    proxy = Proxy(monkeypatch, web=web)
    (item,) = proxy.placed["default", "web"]
    proxy.kernel.take(item, "cluster", 0, 5)
    proxy.pass_over()
    proxy.kernel.take(item, "cluster", 0, 6)
    proxy.kernel.refused = {ENDPOINT_MAPS[2]}
    proxy.pass_over()
    assert proxy.series() == {"web": 5, "": 0}
    proxy.kernel.refused = set()
    proxy.pass_over()
    assert proxy.series() == {"web": 6, "": 0}


def test_a_pass_begins_once_a_period_and_scrapes_read_nothing(monkeypatch):
    proxy = Proxy(monkeypatch, web=plans_of("web", 1))
    proxy.pass_over()
    reads = proxy.kernel.reads
    for _ in range(5):
        proxy.counting.step(proxy.placed)
        proxy.registry.render()
    assert proxy.kernel.reads == reads == 1


def test_a_pass_takes_no_more_than_its_turn(monkeypatch):
    proxy = Proxy(monkeypatch, web=plans_of("web", 1, 250))
    (item,) = proxy.placed["default", "web"]
    for slot in range(250):
        proxy.kernel.take(item, "cluster", slot, 1)
    clock = itertools.count()
    monkeypatch.setattr(counting.time, "monotonic", lambda: proxy.now + next(clock) * counting.TURN)
    turns = 0
    while not proxy.series():
        proxy.counting.step(proxy.placed)
        turns += 1
        assert proxy.kernel.reads <= turns
    assert proxy.kernel.reads == 3
    assert proxy.series()["web"] == 250


def test_a_table_that_cannot_be_read_is_read_again_later(monkeypatch):
    proxy = Proxy(monkeypatch, web=plans_of("web", 1))
    (item,) = proxy.placed["default", "web"]
    proxy.kernel.take(item, "cluster", 0, 5)
    proxy.kernel.refused = set(ENDPOINT_MAPS)
    proxy.pass_over()
    assert proxy.series() == {}
    proxy.kernel.refused = set()
    proxy.pass_over()
    assert proxy.series()["web"] == 5


def test_connections_of_a_deleted_service_are_among_the_others(monkeypatch):
    proxy = Proxy(monkeypatch, web=plans_of("web", 1), other=plans_of("other", 2))
    for name in ("web", "other"):
        proxy.kernel.take(proxy.placed["default", name][0], "cluster", 0, 5)
    proxy.pass_over()
    del proxy.placed["default", "web"]
    proxy.pass_over()
    assert proxy.series() == {"other": 5, "": 5}


keys = st.sampled_from([plan.key for number in range(1, 9) for plan in plans_of(f"s{number}", number)])


@given(st.lists(st.tuples(st.dictionaries(keys, st.integers(1, 100)), st.sets(keys)), max_size=8))
def test_totals_keep_few_series_and_no_sum_ever_goes_down(passes):
    limit, counting.TOP = counting.TOP, 3
    try:
        totals, everything, series = Totals(), 0, {}
        for new, gone in passes:
            totals.add(new, {*new, *totals.busiest} - gone | set(new))
            everything += sum(new.values())
            assert sum(totals.busiest.values()) + totals.others == everything
            assert len(totals.busiest) <= 3
            for key, count in totals.busiest.items():
                assert count >= series.get(key, 0) or key not in series
            series = dict(totals.busiest)
    finally:
        counting.TOP = limit


def test_a_busy_service_port_takes_the_series_of_a_quiet_one(monkeypatch):
    monkeypatch.setattr(counting, "TOP", 2)
    a, b, c = (plan.key for name, number in (("a", 1), ("b", 2), ("c", 3)) for plan in plans_of(name, number))
    totals = Totals()
    totals.add({a: 10, b: 3}, {a, b, c})
    totals.add({a: 10, b: 3, c: 5}, {a, b, c})
    assert (totals.busiest, totals.others) == ({a: 20, b: 6}, 5)
    totals.add({a: 10, b: 3, c: 7}, {a, b, c})
    assert (totals.busiest, totals.others) == ({a: 30, c: 7}, 5 + 6 + 3)


def test_connections_of_each_endpoint():
    plans = plans_of("web", 1, ports=[ServicePort(port=80, node_port=30080)])
    (item,) = placed(plans)
    kernel = Kernel()
    kernel.take(item, "cluster", 0, 5)
    kernel.take(item, "cluster", 2, 1)
    kernel.take(item, "nodeport", 0, 2, ENDPOINT_MAPS[2])
    assert connections(kernel.read, plans) == {
        (item.plan.key, item.cluster[0]): (7, 420),
        (item.plan.key, item.cluster[2]): (1, 60),
    }
    assert connections(kernel.read, plans_of("other", 2)) == {}
