"""Lines for the beginnings and ends of connections, and when the command requests Services and pods again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kubeproxy.ask.flows import follow
from kubeproxy.ask.flows.follow import Follower, Known
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.kernel.conntrack.tracked import ANSWERED, Event, Tracked, target_of
from kubeproxy.model.addresses import PROTOCOLS, pack
from support.nftables_plans import plans_of

TCP = PROTOCOLS["TCP"]
POD = (pack("10.244.0.1") or b"") + (8080).to_bytes(2, "big")


def event(mark: bytes, *, ended: bool = False, vip: str = "10.96.0.1", server: bytes = POD, status=ANSWERED) -> Event:
    client = (pack("10.0.0.1") or b"") + (40000).to_bytes(2, "big")
    return Event(ended, 2, Tracked(target_of(pack(vip) or b"", TCP, 80), client, server, status, 0, mark))


class Where:
    """Counts the requests for Services and pods."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.numbers = [1]
        self.facts = SimpleNamespace(manifests="")

    def served(self, names: object) -> ServedPorts:
        self.asked.append("services")
        return ServedPorts([plan for n in self.numbers for plan in plans_of(f"web-{n}", n, 2)], {})


@pytest.fixture
def where(monkeypatch) -> Where:
    made = Where()

    def names(facts: object, service: object) -> tuple[dict[bytes, str], str]:
        made.asked.append("pods")
        return {POD[:-2]: "default/pod"}, ""

    monkeypatch.setattr(follow.cluster, "pods", names)
    return made


@pytest.fixture
def known(where) -> Known:
    made = Known(where, [], where.served([]))
    made.look_up_pods()
    where.asked.clear()
    return made


def test_a_beginning_and_its_end(known, monkeypatch):
    now = [1_700_000_000.0]
    monkeypatch.setattr(follow.time, "time", lambda: now[0])
    follower = Follower(known)
    begin = str(follower.line(event(b"1")))
    assert begin == (
        "22:13:20.000 begin default/web-1:TCP 10.0.0.1:40000 -> 10.96.0.1:80 => default/pod (10.244.0.1:8080)"
    )
    now[0] += 2.5
    assert str(follower.line(event(b"1", ended=True))).endswith("(10.244.0.1:8080), 2.5 s")
    assert str(follower.line(event(b"2", ended=True, status=0))).endswith("(10.244.0.1:8080), never answered")


def test_connections_without_a_service_are_left_out_and_looked_up_once(known, where):
    follower = Follower(known)
    assert follower.line(event(b"1", vip="10.96.0.2")) is None
    known.renew()
    assert where.asked == ["services", "pods"]
    follower.line(event(b"2", vip="10.96.0.2"))
    known.renew()
    assert len(where.asked) == 2, "nobody knew it before"


def test_a_service_that_is_new_is_found(known, where):
    follower = Follower(known)
    where.numbers.append(2)
    follower.line(event(b"1", vip="10.96.0.2"))
    known.renew()
    line = follower.line(event(b"2", vip="10.96.0.2"))
    assert line is not None
    assert line.service == "default/web-2"


def test_no_request_is_sent_while_all_names_are_known(known, where):
    Follower(known).line(event(b"1"))
    known.renew()
    assert where.asked == []


def test_few_beginnings_are_remembered(known, monkeypatch):
    monkeypatch.setattr(follow, "MOST_REMEMBERED", 2)
    follower = Follower(known)
    for mark in (b"1", b"2", b"3"):
        follower.line(event(mark))
    lasted = [follower.line(event(mark, ended=True)) for mark in (b"1", b"2", b"3")]
    assert [line is not None and line.seconds is not None for line in lasted] == [False, True, True]
