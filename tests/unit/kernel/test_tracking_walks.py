"""The choice of the cheapest way to find tracked connections, compared with measurements."""

import pytest

from kubeproxy.kernel.conntrack import udp_flows
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import USUAL_BUCKETS, Conntrack, TrackingTable


@pytest.mark.parametrize(
    ("entries", "pairs", "deletes"),
    [
        (0, 10, True),
        (1_000, 5, True),
        (1_000, 10, False),
        (10_000, 2, True),
        (10_000, 10, False),
        (50_000, 1, True),
        (50_000, 2, False),
    ],
)
def test_pairs_are_deleted_where_that_takes_less_than_a_dump_of_their_frontend(entries, pairs, deletes):
    table = TrackingTable(USUAL_BUCKETS, entries)
    assert (table.deletions(pairs) <= table.dumps(1)) is deletes


@pytest.mark.parametrize(
    ("entries", "frontends", "filtered"),
    [(100, 1, True), (100, 2, False), (10_000, 3, True), (100_000, 8, True), (100_000, 20, False)],
)
def test_a_dump_for_each_frontend_or_one_of_everything(entries, frontends, filtered):
    table = TrackingTable(USUAL_BUCKETS, entries)
    assert (table.dumps(frontends) < table.everything()) is filtered


def test_a_small_table_is_no_reason_to_read_all_of_it():
    assert TrackingTable(1024, 1000).dumps(8) < TrackingTable(1024, 1000).everything()
    assert TrackingTable(1024, 1000).deletions(3) < TrackingTable(1024, 1000).dumps(8)


@pytest.mark.parametrize(("ports", "requests"), [(1, 1), (10_001, 0)])
def test_no_requests_are_packed_for_a_range_of_thousands_of_ports(monkeypatch, ports, requests):
    packed = []
    monkeypatch.setattr(udp_flows, "_only", lambda *asked: packed.append(asked[1:]) or b"")
    monkeypatch.setattr(Conntrack, "_table", lambda _: TrackingTable(USUAL_BUCKETS, 10_000))
    monkeypatch.setattr(Conntrack, "_dump", lambda *_: iter(()))
    targets = [target_of(b"\x0a\x60\0\1", 17, 10000 + number) for number in range(ports)]
    assert list(Conntrack().udp_flows(2, targets)) == []
    assert packed.count(()) == 1
    assert len(packed) == 1 + requests
