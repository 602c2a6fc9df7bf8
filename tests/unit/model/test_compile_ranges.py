"""Ranges of ports: the annotation, the Services that get a range, and the answers for packets to a range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.config.modes import MODES
from kubeproxy.features import PORT_RANGES, Features
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Outcome, Packet, answer
from kubeproxy.model.choosing import shares
from kubeproxy.model.claims import Claimant, Claims, Right
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from kubeproxy.model.plan import FrontendKind, Policy, PortRange
from kubeproxy.model.port_ranges import ProtocolRange, parse_range
from support.cluster_objects import address, dest, endpoint, endpoint_slice, parsed, service, world
from support.compiled import compile_service
from unit.model.test_planner import planner, taken, upserted

WORLD = world(families=[Family.IPV4])
TCP, UDP = 6, 17
OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"


def asking(text, **spec):
    return service(annotations=Annotations(port_ranges=text), **spec)


def compiled(text, globals_=WORLD, **spec):
    return compile_service(asking(text, **spec), [parsed(endpoint("10.244.0.1"))], globals_)


def spans(found):
    return [str(span) for plan in found.plans for span in plan.port_ranges]


def test_without_the_annotation_plans_have_no_range():
    assert spans(compiled(None)) == spans(compiled("")) == spans(compiled(" , ")) == []


def test_each_address_has_each_range_and_a_nodeport_has_none():
    found = compiled(
        "10000-20000/udp, 30000-30100/TCP,7/sctp",
        external_ips=["203.0.113.1"],
        ingress=["198.51.100.1"],
        ports=[ServicePort(port=80, name="a", node_port=30080), ServicePort(port=81, name="b")],
    )
    assert found.problems == ()
    assert spans(found) == [
        f"{kind} {where} {ports}"
        for ports in ("UDP 10000-20000", "TCP 30000-30100", "SCTP 7")
        for kind, where in (("cluster", "10.96.0.1"), ("external", "203.0.113.1"), ("loadbalancer", "198.51.100.1"))
    ]
    assert [bool(plan.port_ranges) for plan in found.plans] == [True, False]


WRONG = {
    "10000-20000": "is not FIRST-LAST/PROTOCOL",
    "x-y/udp": "is not FIRST-LAST/PROTOCOL",
    "1-2/icmp": "is not FIRST-LAST/PROTOCOL",
    "1-2-3/udp": "is not FIRST-LAST/PROTOCOL",
    "-1/udp": "is not FIRST-LAST/PROTOCOL",
    "0-5/udp": "ports are from 1 to 65535",
    "9-8/udp": "the first is not after the last",
    "1-65536/udp": "ports are from 1 to 65535",
    "79-81/tcp": "79-81/TCP contains 80/TCP, a port of spec.ports",
    "150-160/udp": "150-160/UDP overlaps 100-200/UDP",
}


@pytest.mark.parametrize("entry", WRONG)
def test_a_wrong_range_is_a_problem_and_the_others_are_served(entry):
    found = compiled(f"100-200/udp,{entry},300-400/udp")
    (problem,) = found.problems
    assert problem.field == "metadata.annotations[kube-proxy-py/port-ranges]"
    assert WRONG[entry] in problem.reason
    assert problem.reason.endswith("range skipped")
    assert spans(found) == ["cluster 10.96.0.1 UDP 100-200", "cluster 10.96.0.1 UDP 300-400"]


def test_too_many_ranges_are_one_problem():
    found = compiled(",".join(f"{n}/udp" for n in range(1, 9)), PORT_RANGES.on(WORLD, 3))
    assert len(spans(found)) == 3
    (problem,) = found.problems
    assert problem.reason == "8 ranges are more than 3 (--port-ranges); the later ranges are skipped"


@given(st.text(max_size=20) | st.from_regex(r"[0-9]{0,6}-?[0-9]{0,6}/(tcp|UDP|x)", fullmatch=True))
def test_any_text_is_a_range_or_a_reason(text):
    found = parse_range(text)
    if isinstance(found, str):
        assert found.endswith("range skipped")
    else:
        assert 0 < found.first <= found.last < 65536
        assert parse_range(str(found)) == found


def test_other_modes_and_the_flag_ignore_the_annotation_with_a_problem():
    off = [replace(WORLD, features=Features(mode=mode)) for mode in MODES]
    ignoring = [one for one in off if not PORT_RANGES.value(one)]
    for globals_ in (PORT_RANGES.on(WORLD, 0), *ignoring):
        found = compiled("10000-20000/udp", globals_)
        assert spans(found) == []
        assert {problem.reason for problem in found.problems} == {
            "ignored: the proxy on this node serves no ranges of ports, by its mode or its flags"
        }


def test_consistent_hashing_excludes_ranges():
    subject = service(annotations=Annotations(port_ranges="1-9/udp", algorithm="maglev"))
    found = compile_service(subject, [parsed(endpoint("10.244.0.1"))], WORLD)
    assert spans(found) == []
    assert any("exclude each other" in problem.reason for problem in found.problems)


def test_an_external_address_does_not_hide_the_api_server():
    globals_ = replace(WORLD, api_servers=(address("203.0.113.1") + b"\x06\x19\x2b",))
    found = compiled("6000-7000/tcp,6000-7000/udp", globals_, external_ips=["203.0.113.1"])
    assert "external 203.0.113.1 UDP 6000-7000" in spans(found)
    assert "external 203.0.113.1 TCP 6000-7000" not in spans(found)
    assert "is where this node reaches the API server" in found.problems[0].reason


# -- claims ------------------------------------------------------------------------------------------------------------


def rival(name, cluster_ip, created, text=None, port=80):
    ports = [ServicePort(port=port)]
    annotations = Annotations(port_ranges=text) if text else None
    return service(
        name, cluster_ip, created=created, external_ips=["203.0.113.1"], ports=ports, annotations=annotations
    )


def served(subject, name):
    plans = subject.compiled["default", name].plans
    return {str(one) for plan in plans for one in plan.all_frontends if one.kind is FrontendKind.EXTERNAL}


@pytest.mark.parametrize("order", [1, -1])
def test_the_older_of_two_overlapping_ranges_is_served(order):
    subject = planner(
        *[
            rival("a", "10.96.0.1", OLD, "100-200/tcp"),
            rival("b", "10.96.0.2", NEW, "150-300/tcp,9/udp", port=81),
        ][::order]
    )
    subject.take()
    assert served(subject, "a") == {"external 203.0.113.1 TCP 80", "external 203.0.113.1 TCP 100-200"}
    assert served(subject, "b") == {"external 203.0.113.1 TCP 81", "external 203.0.113.1 UDP 9"}
    (problem,) = subject.compiled["default", "b"].problems
    assert problem == (
        "metadata.annotations[kube-proxy-py/port-ranges]",
        "external 203.0.113.1 TCP 150-300 overlaps ports of Service default/a; not programmed for this Service",
    )
    assert set(taken(subject, upserted(rival("a", "10.96.0.1", OLD, "100-149/tcp")))) == {"a", "b"}
    assert "external 203.0.113.1 TCP 150-300" in served(subject, "b")


def test_a_port_in_the_range_of_an_older_service_is_not_served_and_an_older_port_takes_the_range_out():
    subject = planner(
        rival("a", "10.96.0.1", OLD, port=150), rival("b", "10.96.0.2", "2024-06-01T00:00:00Z", "100-200/tcp")
    )
    subject.take()
    assert served(subject, "a") == {"external 203.0.113.1 TCP 150"}
    assert served(subject, "b") == {"external 203.0.113.1 TCP 80"}
    taken(subject, upserted(rival("a", "10.96.0.1", OLD, port=81)))
    assert served(subject, "b") == {"external 203.0.113.1 TCP 80", "external 203.0.113.1 TCP 100-200"}
    taken(subject, upserted(rival("c", "10.96.0.3", NEW, port=150)))
    assert served(subject, "c") == set()
    taken(subject, upserted(rival("b", "10.96.0.2", "2024-06-01T00:00:00Z")))
    assert served(subject, "c") == {"external 203.0.113.1 TCP 150"}


ports = st.integers(1, 12)
claims_of_one = st.lists(st.tuples(ports, ports).map(sorted), max_size=2)


@given(st.lists(st.tuples(st.integers(0, 3), claims_of_one, st.sets(ports, max_size=2)), max_size=12))
def test_claims_do_not_depend_on_the_history(sequence):
    """The lost ranges of a Service depend on the existing claims."""
    place = address("203.0.113.1") + b"\x06"
    who = [Claimant(Right.ALLOCATED, f"{n}", "ns", f"s{n}") for n in range(4)]
    has: dict[int, tuple[list[PortRange], list[bytes]]] = {n: ([], []) for n in range(4)}
    claims = Claims()
    for number, ranges, single in sequence:
        spans = [PortRange(FrontendKind.EXTERNAL, place + first.to_bytes(2, "big"), last) for first, last in ranges]
        spans = list(dict.fromkeys(spans))
        keys = tuple(place + port.to_bytes(2, "big") for port in sorted(single))
        claims.replace_written(who[number].service, who[number], who[number], keys)
        claims.replace_ranges(who[number], who[number], has[number][0], spans)
        has[number] = spans, list(keys)
    fresh = Claims()
    for number, (spans, keys) in reversed(has.items()):
        fresh.replace_written(who[number].service, None, who[number], tuple(keys))
        fresh.replace_ranges(None, who[number], [], spans)
    for number, (spans, _) in has.items():
        for span in spans:
            found = claims.rival(span, who[number].writing)
            assert found == fresh.rival(span, who[number].writing)
            older = [n for n in range(number) if _meets(span, *has[n])]
            assert (found.service if found is not None else None) == (who[older[0]].service if older else None)
    for number, (spans, _) in has.items():
        claims.replace_ranges(who[number], None, spans, [])
    assert not claims.range_owner(place + b"\0\1")


def _meets(span, others, keys):
    mine = ProtocolRange(TCP, span.port, span.last)
    return any(mine.overlaps(ProtocolRange(TCP, one.port, one.last)) for one in others) or any(map(span.covers, keys))


# -- answers -----------------------------------------------------------------------------------------------------------


def ask(subject, where, port, protocol=UDP):
    return answer(subject, Packet(address("10.244.0.9"), address(where), protocol, port), set())


def test_an_answer_keeps_the_port_and_names_the_annotation():
    subject = planner(
        asking("10000-20000/udp", ports=[ServicePort(port=80, name="web"), ServicePort(port=53, name="dns")]),
        endpoint_slice(endpoint("10.244.0.1"), ports=[EndpointPort(8080, "web"), EndpointPort(5353, "dns")]),
    )
    subject.take()
    made = ask(subject, "10.96.0.1", 12345)
    assert made.outcome is Outcome.FORWARDED
    assert [choice.destination for choice in made.choices] == [address("10.244.0.1") + (12345).to_bytes(2, "big")]
    assert made.plan is not None
    assert {one[-2:] for one in (*made.plan.cluster, *made.plan.serving)} == {(12345).to_bytes(2, "big")}
    assert made.steps[0].text.startswith("10.96.0.1:12345/UDP is the cluster IP, ports 10000-20000, of default/")
    assert made.steps[0].field == "metadata.annotations[kube-proxy-py/port-ranges]"
    for port in (9999, 20001):
        refused = ask(subject, "10.96.0.1", port)
        assert refused.outcome is Outcome.REFUSED
        assert "10000-20000/UDP" in refused.steps[0].text
    assert ask(subject, "10.96.0.1", 12345, TCP).outcome is Outcome.REFUSED


def test_two_ports_of_an_address_are_one_endpoint_of_a_range():
    slices = [parsed(endpoint("10.244.0.1"), endpoint("10.244.0.2"), ports=[EndpointPort(8080), EndpointPort(9090)])]
    (plan,) = compile_service(asking("100-200/tcp"), slices, WORLD).plans
    (span,) = plan.port_ranges
    assert len(plan.cluster) == 4
    at = plan.at_port(span, (150).to_bytes(2, "big"))
    assert shares(at, Policy.CLUSTER, None) == {dest("10.244.0.1:150"): 0.5, dest("10.244.0.2:150"): 0.5}
