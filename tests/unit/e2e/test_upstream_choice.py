from __future__ import annotations

import re

import pytest

from e2e.choice import LEFT_OUT, choose, is_serial, pattern, reason_left_out
from e2e.errors import E2EError

SERVE = "[sig-network] Services should serve a basic endpoint from pods [Conformance]"
ROLLING = (
    "[sig-network] LoadBalancers [Feature:LoadBalancer] should not have connectivity disruption during rolling update"
)
RESTART = "[sig-network] Services should work after restarting kube-proxy [Disruptive]"
POLICY = "[sig-network] Netpol NetworkPolicy between server and client should support a default-deny policy"
DUAL = "[sig-network] [Feature:IPv6DualStack] should create service with ipv4 cluster ip"


def test_tests_that_a_kube_proxy_decides_are_chosen_and_long_ones_come_first():
    chosen, left_out = choose([SERVE, POLICY, RESTART, DUAL, ROLLING, SERVE])
    assert chosen == [ROLLING, DUAL, SERVE]
    assert list(left_out) == [RESTART]
    assert "processes" in left_out[RESTART]


def test_a_focus_chooses_some_of_them():
    assert choose([SERVE, ROLLING], "basic") == ([SERVE], {})
    with pytest.raises(E2EError, match="FOCUS=default-deny: no test to run"):
        choose([SERVE, POLICY], "default-deny")
    with pytest.raises(E2EError, match=r"left out: .*restarting"):
        choose([RESTART], "restarting")


def test_every_reason_to_leave_a_test_out_is_a_sentence_and_a_pattern():
    assert all(re.compile(each) and reason for each, reason in LEFT_OUT.items())
    assert reason_left_out(SERVE) == ""


def test_a_pattern_matches_the_whole_name_and_has_no_escape_that_go_lacks():
    found = pattern("[sig-network] Services should (really) work a.b")
    assert found == r"(^| )\[sig\-network\] Services should \(really\) work a\.b$"
    assert re.search(found, "Kubernetes e2e suite [sig-network] Services should (really) work a.b")
    assert not re.search(found, "[sig-network] Services should (really) work a.b too")


def test_serial_tests_run_alone():
    assert is_serial("[sig-network] x [Serial]")
    assert not is_serial(SERVE)
