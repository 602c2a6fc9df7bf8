import copy
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.api.decode import WatchDecoder, decode_object, decode_page, kept_identities
from kubeproxy.api.salvage import mended, shallow
from kubeproxy.api.status import MalformedAnswer, StatusError
from kubeproxy.model.events import Deleted, Rejected, Upserted
from support.effort import examples
from support.scripted import KINDS, Recording, bookmark

HEADLESS = "service.kubernetes.io/headless"
SERVICE = {
    "metadata": {
        "name": "web",
        "namespace": "ns",
        "uid": "u1",
        "resourceVersion": "7",
        "creationTimestamp": "2026-11-21T05:09:17Z",
        "labels": {"a": "b", HEADLESS: ""},
        "annotations": {"x": "y"},
    },
    "spec": {
        "clusterIP": "10.0.0.1",
        "clusterIPs": ["10.0.0.1", "fd00::1"],
        "ports": [{"name": "a", "port": 80, "protocol": "TCP"}, {"name": "b", "port": 81, "nodePort": 30000}],
        "externalIPs": ["1.1.1.1", "2.2.2.2"],
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}},
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "3.3.3.3"}, {"ip": "4.4.4.4", "ipMode": "VIP"}]}},
}
SLICE = {
    "metadata": {"name": "web-1", "namespace": "ns", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "a", "port": 8080, "protocol": "TCP"}, {"name": "b", "port": 8081}],
    "endpoints": [
        {
            "addresses": ["10.1.0.1"],
            "conditions": {"ready": True},
            "nodeName": "n1",
            "zone": "z",
            "hints": {"forZones": [{"name": "z"}]},
        },
        {"addresses": ["10.1.0.2"], "conditions": {"ready": None}},
        {"addresses": ["10.1.0.3"]},
    ],
}
OBJECTS = {"services": SERVICE, "endpointslices": SLICE}


def changed(value, path, new):
    """Return a copy of `value` in which the part at `path` is replaced (removed for Ellipsis)."""
    result = copy.deepcopy(value)
    at = result
    for step in path[:-1]:
        at = at[step]
    if new is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return result


def page_of(*items, resource="services"):
    encoded = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in items]
    return b'{"kind":"%bList","metadata":{"resourceVersion":"9","continue":"c"},"items":[%b]}' % (
        KINDS[resource].encode(),
        b",".join(encoded),
    )


REJECTED_WHOLE = [
    ("services", (), 5, ""),
    ("services", (), None, ""),
    ("services", (), [1], ""),
    ("services", ("metadata",), ..., "metadata"),
    ("services", ("metadata",), [], "metadata"),
    ("services", ("metadata", "name"), ..., "metadata.name"),
    ("services", ("metadata", "name"), "", "metadata.name"),
    ("services", ("metadata", "name"), 5, "metadata.name"),
    ("services", ("metadata", "namespace"), {}, "metadata.namespace"),
    ("services", ("spec",), "x", "spec"),
    ("services", ("spec", "sessionAffinity"), 5, "spec.sessionAffinity"),
    ("services", ("spec", "ports"), {}, "spec.ports"),
    ("services", ("spec", "healthCheckNodePort"), 2**40, "spec.healthCheckNodePort"),
    ("services", ("spec", "sessionAffinityConfig", "clientIP"), 1.5, "spec.sessionAffinityConfig.clientIP"),
    ("services", ("spec", "loadBalancerSourceRanges", 0), 8, "spec.loadBalancerSourceRanges[0]"),
    ("endpointslices", ("addressType",), 4, "addressType"),
    ("endpointslices", ("endpoints",), 4, "endpoints"),
]

ENTRY_DROPPED = [
    ("services", ("spec", "ports", 1), 5, "spec.ports[1]"),
    ("services", ("spec", "ports", 1, "port"), "81", "spec.ports[1].port"),
    ("services", ("spec", "ports", 1, "port"), 81.5, "spec.ports[1].port"),
    ("services", ("spec", "ports", 1, "port"), True, "spec.ports[1].port"),
    ("services", ("spec", "ports", 1, "nodePort"), 10**50, "spec.ports[1].nodePort"),
    ("services", ("spec", "externalIPs", 0), None, "spec.externalIPs[0]"),
    ("services", ("status", "loadBalancer", "ingress", 1, "ip"), 4, "status.loadBalancer.ingress[1].ip"),
    ("endpointslices", ("endpoints", 1, "conditions", "ready"), "yes", "endpoints[1].conditions.ready"),
    ("endpointslices", ("endpoints", 1, "addresses", 0), 7, "endpoints[1].addresses[0]"),
    ("endpointslices", ("endpoints", 2), "10.1.0.3", "endpoints[2]"),
    ("endpointslices", ("ports", 0, "port"), 2**70, "ports[0].port"),
]

FIELD_LEFT_OUT = [
    ("endpointslices", ("endpoints", 0, "zone"), 7, "endpoints[0].zone"),
    ("services", ("status",), 5, "status"),
    ("services", ("metadata", "labels"), [], "metadata.labels"),
    ("services", ("metadata", "labels", HEADLESS), 5, f"metadata.labels[{HEADLESS}]"),
    ("services", ("metadata", "annotations"), "x", "metadata.annotations"),
    ("services", ("metadata", "creationTimestamp"), 5, "metadata.creationTimestamp"),
    ("endpointslices", ("endpoints", 0, "hints"), 5, "endpoints[0].hints"),
]


@pytest.mark.parametrize(("resource", "path", "new", "field"), REJECTED_WHOLE)
def test_a_wrong_object_is_rejected_and_its_neighbours_survive(resource, path, new, field):
    good = OBJECTS[resource]
    bad = changed(good, path, new) if path else new
    page = decode_page(resource, page_of(good, bad, good, resource=resource))
    assert len(page.objects) == 2
    assert [problem.field for problem in page.rejected] == [field]
    assert (page.version, page.continue_token) == ("9", "c")


@pytest.mark.parametrize(("resource", "path", "new", "field"), ENTRY_DROPPED + FIELD_LEFT_OUT)
def test_a_wrong_entry_costs_only_itself(resource, path, new, field):
    bad = changed(OBJECTS[resource], path, new)
    found, rejected = decode_object(resource, json.dumps(bad).encode())
    assert found is not None
    assert field in [problem.field for problem in rejected]
    assert rejected[0].name == bad["metadata"]["name"]
    whole, _ = decode_object(resource, json.dumps(OBJECTS[resource]).encode())
    assert found != whole


def test_the_remaining_part_of_a_list_is_in_order():
    found, _ = decode_object("endpointslices", json.dumps(changed(SLICE, ("endpoints", 1), 5)).encode())
    assert [endpoint.addresses for endpoint in found.endpoints] == [["10.1.0.1"], ["10.1.0.3"]]


def test_rejected_objects_with_a_name_are_kept():
    page = decode_page("services", page_of(changed(SERVICE, ("spec",), 5), changed(SERVICE, ("metadata", "name"), "b")))
    assert kept_identities(page.objects, page.rejected) == {("ns", "web")}


@pytest.mark.parametrize(
    "junk",
    [
        *(5, None, {}, {"metadata": {"namespace": "ns"}}, {"metadata": {"name": "web"}, "spec": 5}),
        {"metadata": {"name": ["web"], "namespace": "ns"}},
        {"metadata": {"name": "web", "namespace": 5}},
    ],
)
def test_an_unidentifiable_object_of_a_list_may_be_any(junk):
    page = decode_page("services", page_of(junk, changed(SERVICE, ("metadata", "name"), "b")))
    assert page.rejected
    assert kept_identities(page.objects, page.rejected) is None


def test_nodes_are_identified_without_a_namespace():
    page = decode_page("nodes", page_of({"metadata": {"name": "a", "labels": 5}}, resource="nodes"))
    assert page.rejected
    assert kept_identities(page.objects, page.rejected) == frozenset()


def test_problems_of_one_object_are_capped():
    bad = changed(SLICE, ("endpoints",), [5] * 1000)
    _, rejected = decode_object("endpointslices", json.dumps(bad).encode())
    assert len(rejected) == 10
    assert "990 more" in rejected[-1].reason


DEEP = b"[" * 100_000 + b"]" * 100_000
ODD_BYTES = [
    (b'{"metadata":{"name":"a"},"x":' + DEEP + b"}", 1, []),
    (b'{"metadata":{"name":"a"},"spec":{"externalIPs":["1.1.1.1",' + DEEP + b"]}}", 1, ["spec.externalIPs[1]"]),
    (b'{"metadata":{"name":"a\xff"}}', 0, ["metadata.name"]),
    (b'{"metadata":{"name":"a","annotations":{"b":"\xff"}}}', 1, []),
    (b'{"metadata":{"name":"a"},"x\xff":"\xff"}', 1, []),
    (b'{"metadata":{"name":"a"},"spec":{"clusterIP":"\xed\xa0\x80"}}', 0, ["spec.clusterIP"]),
    (b'{"metadata":{"name":"a"},"x":"\\ud800"}', 1, []),
    (b'{"metadata":{"name":"a"},"x":1e999}', 1, []),
    (b'{"metadata":{"name":"a"},"spec":{"ports":[{"port":' + b"9" * 9000 + b"}]}}", 1, ["spec.ports[0].port"]),
    (b'{"metadata":{"name":"a"},"x":"' + b"z" * 5_000_000 + b'"}', 1, []),
]


@pytest.mark.parametrize(("data", "objects", "fields"), ODD_BYTES, ids=range(len(ODD_BYTES)))
def test_odd_bytes_cost_no_neighbour(data, objects, fields):
    page = decode_page("services", page_of(SERVICE, data, SERVICE))
    assert len(page.objects) == 2 + objects
    assert [problem.field for problem in page.rejected] == fields
    decoder = WatchDecoder("services")
    changes = decoder.feed(b'{"type":"ADDED","object":' + data + b"}\n")
    assert changes.error is None
    assert sum(isinstance(event, Upserted) for event in changes.events) == objects
    assert [event.field for event in changes.events if isinstance(event, Rejected)] == fields


NO_LISTS = [
    b"",
    b"[",
    b"null",
    b"{}",
    b'{"kind":"ServiceList","items":[]}',
    b'{"kind":"ServiceList","metadata":{}}',
    b'{"kind":"ServiceList","metadata":{},"items":5}',
    b'{"metadata":{},"items":[]}',
    b'{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":null}',
    b'{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[5]}',
    b'{"kind":"Service","metadata":{"resourceVersion":"9"},"items":[]}',
    b"\xff",
    DEEP,
]


@pytest.mark.parametrize("data", NO_LISTS, ids=range(len(NO_LISTS)))
def test_an_answer_without_a_list_is_malformed(data):
    with pytest.raises(MalformedAnswer):
        decode_page("services", data)


def test_a_list_of_nothing_may_be_null():
    assert (
        decode_page("services", b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":null}').objects == []
    )


def test_recorded_lists():
    page = decode_page("services", Recording("list-services-paged-1").body)
    assert [found.metadata.name for found in page.objects] == ["kubernetes", "ds", "en"]
    assert page.version == "240"
    assert page.continue_token.startswith("eyJ2")
    assert decode_page("servicecidrs", Recording("list-servicecidrs").body).objects[0].spec.cidrs


def test_recorded_watches():
    changes = WatchDecoder("services").feed(Recording("watch-list-services").body)
    assert (len(changes.events), changes.version, changes.initial_end, changes.error) == (6, "245", True, None)
    changes = WatchDecoder("services").feed(Recording("watch-services").body)
    assert [type(event) for event in changes.events] == [Upserted, Deleted]
    changes = WatchDecoder("endpointslices").feed(Recording("watch-bookmarks").body)
    assert changes == ([], "265", False, None)
    changes = WatchDecoder("services").feed(Recording("watch-too-old").body)
    assert changes.error.expired
    changes = WatchDecoder("services").feed(Recording("watch-list-not-supported-by-storage").body)
    assert isinstance(changes.error, StatusError)
    assert changes.error.code == 500


def test_every_resource_reads_bookmarks_and_errors():
    for resource, kind in KINDS.items():
        for name in ("watch-bookmarks", "watch-too-old"):
            body = Recording(name).body.replace(b'"EndpointSlice"', b'"%b"' % kind.encode())
            assert WatchDecoder(resource).feed(body).events == []


def test_a_bookmark_of_another_kind_is_malformed():
    """A bookmark that ends a streamed list without an object means that the list is empty."""
    line = json.dumps(bookmark("9", initial_end=True, kind="ConfigMap")).encode() + b"\n"
    changes = WatchDecoder("services").feed(line)
    assert isinstance(changes.error, MalformedAnswer)
    assert (changes.version, changes.initial_end) == ("", False)


def test_events_before_garbage_are_kept():
    good = json.dumps({"type": "ADDED", "object": SERVICE}).encode()
    changes = WatchDecoder("services").feed(good + b"\n}garbage{\n" + good + b"\n")
    assert len(changes.events) == 1
    assert changes.version == "7"
    assert isinstance(changes.error, MalformedAnswer)


def test_a_wrong_deleted_object_is_deleted_all_the_same():
    line = json.dumps({"type": "DELETED", "object": changed(SERVICE, ("spec",), 5)}).encode()
    assert WatchDecoder("services").feed(line + b"\n").events == [Deleted("services", "ns", "web")]


NO_EVENTS = [
    b"null",
    b"5",
    b'{"type":"ADDED"}',
    b'{"type":5,"object":{}}',
    b'{"type":"X","object":{}}',
    b'{"object":{}}',
]


@pytest.mark.parametrize("line", NO_EVENTS)
def test_a_line_without_an_event_is_malformed(line):
    assert isinstance(WatchDecoder("services").feed(line + b"\n").error, MalformedAnswer)


def test_a_stream_cut_in_a_line_is_malformed_and_a_missing_last_newline_is_not():
    decoder = WatchDecoder("services")
    line = json.dumps({"type": "ADDED", "object": SERVICE}).encode()
    decoder.feed(line[:50])
    assert isinstance(decoder.finish().error, MalformedAnswer)
    decoder.feed(line)
    assert len(decoder.finish().events) == 1


def test_an_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr("kubeproxy.api.decode.MAX_LINE", 1000)
    decoder = WatchDecoder("services")
    assert decoder.feed(b"x" * 900).error is None
    assert isinstance(decoder.feed(b"x" * 900).error, MalformedAnswer)


STREAM = Recording("watch-list-services").body
WHOLE = WatchDecoder("services").feed(STREAM)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1023, 4096])
def test_chunk_boundaries_do_not_matter(size):
    assert _fed([STREAM[at : at + size] for at in range(0, len(STREAM), size)]) == WHOLE


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_cut_does_not_matter(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    assert _fed([STREAM[start:end] for start, end in itertools.pairwise(edges)]) == WHOLE


def test_every_single_cut_does_not_matter():
    for cut in range(len(STREAM)):
        decoder = WatchDecoder("services")
        first, second = decoder.feed(STREAM[:cut]), decoder.feed(STREAM[cut:])
        assert first.events + second.events == WHOLE.events
        assert (second.version or first.version) == "245"


def _fed(chunks):
    decoder = WatchDecoder("services")
    events, version, ended = [], "", False
    for chunk in chunks:
        changes = decoder.feed(chunk)
        assert changes.error is None
        events += changes.events
        version = changes.version or version
        ended = ended or changes.initial_end
    return events, version, ended, None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def _paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


PLACES = [(resource, path) for resource, found in OBJECTS.items() for path in _paths(found)]


@examples(400)
@given(st.sampled_from(PLACES), JSON)
def test_any_json_anywhere_costs_no_neighbour(place, new):
    resource, path = place
    good = OBJECTS[resource]
    bad = changed(good, path, new) if path else new
    page = decode_page(resource, page_of(good, bad, good, resource=resource))
    whole, _ = decode_object(resource, json.dumps(good).encode())
    assert page.objects[0] == page.objects[-1] == whole
    assert len(page.objects) == 3 or page.rejected
    line = json.dumps({"type": "MODIFIED", "object": bad}).encode() + b"\n"
    changes = WatchDecoder(resource).feed(line)
    assert changes.error is None
    assert changes.events == [Upserted(resource, found) for found in page.objects[1:-1]] + page.rejected


@given(st.binary(max_size=200))
def test_any_bytes_as_an_object_never_raise(data):
    found, rejected = decode_object("services", data)
    assert found is not None or rejected


@given(st.binary(max_size=300))
def test_any_bytes_as_a_stream_never_raise(data):
    decoder = WatchDecoder("nodes")
    decoder.feed(data)
    decoder.finish()


@given(JSON, st.integers(1, 4))
def test_shallow_keeps_values_that_are_not_deep(value, depth):
    text = json.dumps(value).encode()
    assert json.loads(shallow(text, depth)) == _cut(value, depth)
    assert mended(text) == text or "\\ud" in text.decode()


def _cut(value, depth):
    if isinstance(value, dict):
        return {key: _cut(inner, depth - 1) for key, inner in value.items()} if depth else None
    if isinstance(value, list):
        return [_cut(inner, depth - 1) for inner in value] if depth else None
    return value
