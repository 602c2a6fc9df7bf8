"""An examination of userspace mode reports differing elements, and ports on which no process listens."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from kubeproxy.backends.state import Kind
from kubeproxy.backends.userspace import examine
from kubeproxy.backends.userspace.examine import UserspaceExaminer
from kubeproxy.backends.userspace.listeners import assignments
from kubeproxy.backends.userspace.ruleset import UserspaceRuleset, elements, merged, shapes
from kubeproxy.kernel.nftables.nfnetlink import TableHeader
from kubeproxy.kernel.nftables.tables import ChainContents, Hook, TableContents
from kubeproxy.kernel.proc.processes import Listening
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import ServicePort
from support.nftables_plans import WORLD, plans_of

WEB = ("default", "web")
RULES = UserspaceRuleset(Family.IPV4, WORLD, None).definition().chains
KEY = pack("10.96.0.1") + bytes((6, 0, 0, 0)) + (80).to_bytes(2, "big") + b"\0\0"


class Table:
    """Return the table of Services whose listeners have the ports from 40001 on."""

    family = Family.IPV4

    def __init__(self, wanted) -> None:
        plans = [plan for its in wanted.values() for plan in its]
        names = [name for plan in plans for name in assignments(plan)]
        self.ports = {name: 40001 + number for number, name in enumerate(names)}
        self.sets = {name: {} for name in shapes(self.family)} | merged(elements(plan, self.ports) for plan in plans)
        self.sets |= {name: {} for name in shapes(self.family) if name not in self.sets}
        self.sets["nodeport-ips"] = dict.fromkeys(WORLD.ipv4.nodeport_ips, b"")
        self.there, self.chains = True, RULES
        self.listeners = {Listening(bytes(4), port) for port in self.ports.values()}

    def header(self):
        return TableHeader(1, "", dormant=False) if self.there else None

    def contents(self):
        return TableContents({}, self.chains)

    def elements(self, name):
        return dict(self.sets[name])

    def lookup(self, name, keys):
        return {key: self.sets[name][key] for key in keys if key in self.sets[name]}

    def close(self) -> None: ...


def shown(table, wanted):
    """Return the differences; both kinds of examination must report the same ones for one Service."""
    made = UserspaceExaminer(table, UserspaceRuleset(Family.IPV4, WORLD, None))
    with patch.object(examine, "listening", lambda *_: frozenset(table.listeners)):
        everything, some = list(made.everything(wanted)), list(made.some(wanted))
    assert [finding for finding in everything if finding.service is not None] == some
    return everything


@pytest.fixture
def wanted():
    ranges = {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["172.16.0.0/24"]}
    ports = [ServicePort(port=80, node_port=30080)]
    return {WEB: plans_of("web", 1, ports=ports, **ranges), ("default", "none"): plans_of("none", 2, 0)}


def test_a_correct_state_shows_no_difference(wanted):
    assert shown(Table(wanted), wanted) == []


def test_a_frontend_that_is_not_carried_any_more(wanted):
    table = Table(wanted)
    del table.sets["outside-services"][KEY]
    (finding,) = shown(table, wanted)
    assert (finding.service, finding.kind, finding.what) == (WEB, Kind.MISSING, "10.96.0.1:80/tcp")
    assert finding.wanted == "forwarded when it comes from outside"


def test_a_frontend_that_leads_elsewhere(wanted):
    table = Table(wanted)
    table.sets["pod-services"][KEY] = (9).to_bytes(2, "big")
    (finding,) = shown(table, wanted)
    assert (finding.service, finding.kind, finding.present) == (WEB, Kind.DIFFERENT, "port 9")


def test_a_frontend_that_another_program_drops(wanted):
    table = Table(wanted)
    table.sets["node-services-dropped"][KEY] = b""
    (finding,) = shown(table, wanted)
    assert (finding.kind, finding.present) == (Kind.EXTRA, "dropped when it comes from this node")


def test_no_process_listens(wanted):
    table = Table(wanted)
    table.listeners.clear()
    (finding,) = shown(table, wanted)
    assert (finding.service, finding.kind, finding.what) == (WEB, Kind.MISSING, "the listener for all endpoints")
    assert finding.where == "sockets that listen on 40001/tcp"


def test_a_range_that_another_program_added(wanted):
    table = Table(wanted)
    front = pack("198.51.100.1") + KEY[4:]
    table.sets["firewall-allow"][front + pack("10.0.0.0") + front + pack("10.0.0.255")] = b""
    (finding,) = shown(table, wanted)
    assert (finding.service, finding.kind, finding.what) == (WEB, Kind.EXTRA, "198.51.100.1:80/tcp")


def test_objects_without_a_service_and_shared_objects(wanted):
    table = Table(wanted)
    table.sets["pod-services-dropped"][pack("10.96.9.9") + KEY[4:]] = b""
    table.sets["nodeport-ips"] = {}
    first, *_ = RULES["carry-pod"].rules
    table.chains = {**RULES, "carry-pod": ChainContents(None, (first,)), "mine": ChainContents(None, ())}
    table.chains["filter-input"] = RULES["filter-input"]._replace(hook=Hook("filter", 1, 0, drops=True))
    found = shown(table, wanted)
    assert {finding.service for finding in found} == {None}
    assert {finding.what for finding in found} == {
        "10.96.9.9:80/tcp",
        "192.0.2.1, on which NodePorts answer",
        "the rules of chain carry-pod",
        "hook, priority or policy of chain filter-input",
        "chain mine",
    }


def test_a_table_that_is_gone(wanted):
    table = Table(wanted)
    table.there = False
    made = UserspaceExaminer(table, UserspaceRuleset(Family.IPV4, WORLD, None))
    assert [finding.kind for finding in made.everything(wanted)] == [Kind.MISSING]
