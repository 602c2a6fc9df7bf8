from __future__ import annotations

import ipaddress
import struct

import pytest

from e2e.dns import AAAA, ANY, CNAME, A, Record, Services, reply

OBJECTS = {
    "/api/v1/namespaces/ns/services/web": {"spec": {"type": "ClusterIP", "clusterIPs": ["10.96.0.7", "fd00::7"]}},
    "/api/v1/namespaces/ns/services/away": {
        "spec": {"type": "ExternalName", "externalName": "web.ns.svc.cluster.local"}
    },
    "/api/v1/namespaces/ns/services/none": {"spec": {"clusterIPs": ["None"]}},
    "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices?labelSelector=kubernetes.io/service-name=none": {
        "items": [
            {"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"], "conditions": {"ready": False}}]},
            {"endpoints": None},
        ]
    },
}


def get(path: str) -> dict:
    if path not in OBJECTS:
        raise OSError("404")
    return OBJECTS[path]


def question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack("!HHHHHH", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("web.ns.svc.cluster.local", [(A, "10.96.0.7"), (AAAA, "fd00::7")]),
        ("none.ns.svc.cluster.local", [(A, "10.0.0.1")]),
        ("pod-0.none.ns.svc.cluster.local", [(A, "10.0.0.1")]),
        ("away.ns.svc.cluster.local", [(CNAME, "web.ns.svc.cluster.local"), (A, "10.96.0.7"), (AAAA, "fd00::7")]),
    ],
)
def test_a_name_has_the_addresses_of_its_service(name, records):
    assert [(each.kind, each.value) for each in Services(get).resolve(name)] == records


@pytest.mark.parametrize("name", ["gone.ns.svc.cluster.local", "example.com", "svc.cluster.local"])
def test_any_other_name_does_not_exist(name):
    assert Services(get).resolve(name) is None
    answer = reply(question(name, A), Services(get).resolve)
    assert struct.unpack_from("!HHHH", answer) == (77, 0x8583, 1, 0)


def test_an_answer_repeats_the_question_and_has_the_records_of_its_type():
    query = question("Web.ns.svc.cluster.local", AAAA)
    answer = reply(query, Services(get).resolve)
    assert struct.unpack_from("!HHHHHH", answer) == (77, 0x8580, 1, 1, 0, 0)
    assert answer[12 : len(query)] == query[12:]
    assert answer.endswith(ipaddress.ip_address("fd00::7").packed)
    both = reply(question("web.ns.svc.cluster.local", ANY), Services(get).resolve)
    assert struct.unpack_from("!H", both, 6) == (2,)


def test_invalid_queries_get_no_answer():
    for message in (b"", b"\0" * 11, question("a.b", A)[:-3], reply(question("a.b", A), lambda _: [])):
        assert reply(message, lambda _: [Record("a.b", A, "10.0.0.1")]) == b""
