"""Fast forwarding on a kernel with flowtables: connections that bypass the rules, others, and its end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from bench.flowtable_ground import POD, POD_PORT, TCP, UDP, Connection, offloaded, programmed, set_up
from kubeproxy.backends.nftables.forwarding import within
from kubeproxy.features import FAST_FORWARDING, Forwarding
from kubeproxy.model.addresses import Family
from kubeproxy.model.world import Settings

BOTH = Forwarding(20, (TCP, UDP))
V4, V6 = Family.IPV4, Family.IPV6


@pytest.fixture(scope="module", autouse=True)
def node() -> None:
    set_up()


@pytest.fixture(scope="module")
def allowed() -> Forwarding:
    return FAST_FORWARDING.value(within(FAST_FORWARDING.on(Settings("node", (V4, V6)), BOTH)))


@pytest.fixture(scope="module")
def backends(allowed: Forwarding) -> Iterator[list]:
    with programmed(allowed) as made:
        yield made


def devices() -> str:
    return subprocess.run(["nft", "list", "flowtables"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("family", [V4, V6])
def test_a_connection_that_lasts_goes_past_the_rules_and_ends(backends, family):
    with closing(Connection(family, TCP)) as connection:
        connection.ask(5)
        assert not offloaded(), "a short one is not worth it"
        connection.ask(30)
        (line,) = offloaded()
        assert f"dport={POD_PORT}" in line or f"sport={POD_PORT}" in line
        connection.ask(50)
    with closing(Connection(family, TCP)) as other:
        other.ask(1)
        assert not offloaded(), "its end is seen"


def test_udp_only_where_its_flows_can_be_forgotten(backends, allowed):
    with closing(Connection(V4, UDP)) as connection:
        connection.ask(40)
        assert bool(offloaded()) == (UDP in allowed.protocols)


def test_connections_straight_to_a_pod_are_not_affected(backends, monkeypatch):
    monkeypatch.setattr("bench.flowtable_ground.SERVICE", POD)
    monkeypatch.setattr("bench.flowtable_ground.PORT", POD_PORT)
    with closing(Connection(V4, TCP)) as connection:
        connection.ask(40)
        assert not offloaded()


def test_interfaces_are_followed(backends):
    assert devices().count("client") == 2, devices()
    assert '"lo"' not in devices()
    subprocess.run(["ip", "link", "add", "late", "type", "veth", "peer", "name", "later"], check=True)
    for backend in backends:
        backend.upkeep()
    assert devices().count("later") == 2, devices()
    subprocess.run(["ip", "link", "delete", "late"], check=True)
    assert "late" not in devices()
    for backend in backends:
        backend.upkeep()


def test_a_restart_finds_its_own_table(backends, allowed):
    listed = ["nft", "-a", "-t", "list", "table", "ip", "kube-proxy"]
    before = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    with programmed(allowed):
        after = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    assert after == before
