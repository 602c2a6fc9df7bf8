"""An examination of iptables' rules reports each difference in words, and nothing for correct rules."""

from __future__ import annotations

import pytest

from kubeproxy.backends.iptables.examine import IptablesExaminer
from kubeproxy.backends.iptables.skeleton import RuleSettings, StartOptions
from kubeproxy.backends.state import Kind
from kubeproxy.errors import Unsupported
from kubeproxy.model.objects import ServicePort
from support.fake_tables import FakeCommands, target_of
from support.iptables_plans import V4, WORLD, a, opened, plans

WEB = a("web")
SPEC = {"ports": [ServicePort(port=80, node_port=30080)], "ingress": ["198.51.100.1"]}


class Node:
    """Return fake tables after a backend has written these Services."""

    def __init__(self, wanted) -> None:
        self.wanted = wanted
        self.backend = opened(wanted)
        self.commands = FakeCommands.of(V4, uses_nft=True)
        self.commands.tables = self.backend.tables
        self.chains = self.backend.tables.chains

    def examiner(self, printed=None) -> IptablesExaminer:
        settings = RuleSettings.of(V4, WORLD, StartOptions(True, False, True))
        return IptablesExaminer(self.commands, settings, printed or self.printed)

    def printed(self, table, chains):
        return {
            name: [self.commands.printed(f"{rule}\n") for rule in rules.splitlines()] for name, rules in chains.items()
        }

    def shown(self):
        """Return the differences; both kinds of examination must report the same ones for one Service."""
        everything, some = list(self.examiner().everything(self.wanted)), list(self.examiner().some(self.wanted))
        assert [finding for finding in everything if finding.service is not None] == some
        return everything

    def chain(self, start: str) -> tuple[str, str]:
        return next(place for place in self.chains if place[1].startswith(start))


def web(**spec) -> Node:
    return Node({WEB: plans("web", 1, "10.244.0.1", "10.244.0.2", **{**SPEC, **spec})})


def test_a_correct_state_shows_no_difference():
    ranges = {"load_balancer_source_ranges": ["172.16.0.0/24"], "session_affinity": "ClientIP"}
    node = Node(
        {
            WEB: plans("web", 1, "10.244.0.1", "10.244.0.2", **SPEC, **ranges),
            a("none"): plans("none", 2, ports=[ServicePort(port=80, node_port=30081)]),
            a("local"): plans("local", 3, "10.244.0.3", external_ips=["203.0.113.1"], external_traffic_policy="Local"),
        }
    )
    assert node.shown() == []


def test_an_endpoint_that_is_not_chosen_any_more():
    node = web()
    place = node.chain("KUBE-SVC-")
    del node.chains[place][-1]
    (finding,) = node.shown()
    assert (finding.service, finding.kind) == (WEB, Kind.MISSING)
    assert finding.what == "endpoint 10.244.0.2:8080"
    assert finding.where == f"chain {place[1]} of table nat (IPv4)"


def test_a_chain_of_an_endpoint_that_is_gone():
    node = web()
    place = node.chain("KUBE-SEP-")
    ends = node.chains.pop(place)
    (finding,) = node.shown()
    assert (finding.service, finding.kind) == (WEB, Kind.MISSING)
    assert finding.what in "".join(ends).replace("--to-destination ", "endpoint ")


def test_a_frontend_that_is_not_forwarded_any_more():
    node = web()
    node.chains["nat", "KUBE-SERVICES"] = [r for r in node.chains["nat", "KUBE-SERVICES"] if "10.96.0.1/32" not in r]
    (finding,) = node.shown()
    assert (finding.service, finding.kind, finding.what) == (WEB, Kind.MISSING, "10.96.0.1:80/tcp, forwarded")


def test_a_frontend_that_another_program_drops():
    node = web()
    rule = '-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/web" -m tcp --dport 80 -j DROP'
    node.chains["filter", "KUBE-SERVICES"].append(rule)
    (finding,) = node.shown()
    assert (finding.service, finding.kind, finding.what) == (WEB, Kind.EXTRA, "10.96.0.1:80/tcp, dropped")
    assert finding.present == rule


@pytest.mark.parametrize(
    ("table", "chain", "what"),
    [
        ("nat", "KUBE-POSTROUTING", "the rule to MASQUERADE"),
        ("filter", "KUBE-FORWARD", "the rule to ACCEPT"),
        ("nat", "PREROUTING", "the jump to KUBE-SERVICES"),
    ],
)
def test_chains_that_are_not_a_services(table, chain, what):
    node = web()
    node.chains[table, chain] = []
    found = [finding for finding in node.shown() if finding.service is None]
    assert what in {finding.what for finding in found}
    assert {finding.kind for finding in found} == {Kind.MISSING}


def test_the_rules_for_node_ports_are_the_last_ones():
    node = web()
    rules = node.chains["nat", "KUBE-SERVICES"]
    last = next(rule for rule in rules if target_of(rule) == "KUBE-NODEPORTS")
    rules.remove(last)
    rules.insert(0, last)
    (finding,) = node.shown()
    assert (finding.service, finding.kind, finding.what) == (None, Kind.DIFFERENT, "the order of the rules")


def test_objects_without_a_service():
    node = web()
    node.chains["nat", "KUBE-SVC-AAAAAAAAAAAAAAAA"] = ["-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-MARK-MASQ"]
    node.chains["nat", "KUBE-SVC-BBBBBBBBBBBBBBBB"] = []  # the chain may remain for another program
    (finding,) = node.shown()
    assert (finding.service, finding.kind) == (None, Kind.EXTRA)
    assert "KUBE-SVC-AAAAAAAAAAAAAAAA" in finding.where


def test_a_table_that_was_flushed():
    node = web()
    for place in [place for place in node.chains if place[0] == "nat" and place[1].startswith("KUBE-")]:
        del node.chains[place]
    found = node.shown()
    assert any(finding.what == "all of our chains" for finding in found)


def test_rules_that_are_only_printed_otherwise_are_right():
    node = web()
    place = node.chain("KUBE-SVC-")
    node.chains[place] = [rule.replace("-j", "--jump") for rule in node.chains[place]]

    def printed(table, chains):
        found = node.printed(table, chains)
        return {name: [rule.replace("-j", "--jump") for rule in rules] for name, rules in found.items()}

    assert list(node.examiner(printed).everything(node.wanted)) == []


def test_a_copy_that_cannot_be_printed_is_reported():
    def refuse(*_):
        raise Unsupported("no rights")

    node = web()
    del node.chains[node.chain("KUBE-SVC-")][-1]
    made = node.examiner(refuse)
    assert [finding.kind for finding in made.everything(node.wanted)] == [Kind.MISSING]
    assert made.caveats == ["the rules are compared as iptables 1.8.9 prints them (no rights)"]
