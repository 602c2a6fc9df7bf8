"""The node and its addresses: the way of a changed world to the backends."""

import asyncio

import pytest

from kubeproxy.engine import engine as engine_module
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.model.events import Deleted, Replaced
from support.staged_engine import LISTS, V4, V6, cidr, endpoints, node, play, service, started

_sleep = asyncio.sleep


def test_a_changed_node_reaches_the_backends_by_a_sync():
    async def scene(stage):
        await started(stage, service("a"))
        for backend in stage.backends:
            backend.worlds.clear()
        stage.tell(node("192.0.2.9"))
        await stage.until(lambda: all(backend.calls for backend in stage.backends))
        assert [backend.calls for backend in stage.backends] == [[("sync", [])]] * 2
        assert [world.ipv4.node_ips for backend in stage.backends for world in backend.worlds] == [
            (bytes([192, 0, 2, 9]),)
        ] * 2
        assert len(stage.notes.of("world")) == 1

    play(scene, families=(V4, V6))


def test_a_backend_that_asks_for_it_is_synced_as_a_whole():
    async def scene(stage):
        await started(stage, service("a"))
        stage.backends[0].resync_on_world = True
        stage.tell(cidr("10.96.0.0/16"))
        await stage.until(lambda: all(backend.calls for backend in stage.backends))
        assert [backend.calls for backend in stage.backends] == [[("resync", ["a"])], [("sync", [])]]
        assert stage.backends[0].worlds[-1].ipv4.service_cidrs

    play(scene, families=(V4, V6))


@pytest.mark.parametrize(
    "event", [node(), node(name="another"), Replaced("servicecidrs", []), Deleted("nodes", "", "x")]
)
def test_an_equal_node_causes_no_work(event):
    async def scene(stage):
        await started(stage)
        stage.backend.worlds.clear()
        stage.tell(event)
        await _sleep(0.01)
        assert stage.backend.calls == stage.backend.worlds == []
        assert stage.notes.of("world") == []

    play(scene)


def test_a_node_without_addresses_is_waited_for():
    async def scene(stage):
        stage.tell(*LISTS, node(""), service("a"))
        await _sleep(0.01)
        assert stage.backend.calls == []
        stage.tell(node("192.0.2.7"))
        await stage.settled()
        assert stage.backend.worlds[-1].ipv4.node_ips == (bytes([192, 0, 2, 7]),)

    play(scene)


@pytest.mark.parametrize(
    ("events", "awaited"),
    [((), "Node node-a, which the API server has not listed"), ((node(""),), "Node node-a, which has no address yet")],
)
def test_the_wait_for_a_node_is_known_and_logged(events, awaited, monkeypatch, caplog):
    monkeypatch.setattr(engine_module, "NODE_WARNING", 0.0)
    monkeypatch.setattr(engine_module, "NODE_REPEAT", 0.01)

    async def scene(stage):
        stage.tell(*LISTS, *events, service("a"))
        await stage.until(lambda: caplog.text.count(f"the proxy waits for {awaited}") > 2)
        assert (stage.engine.awaits, stage.backend.calls) == (awaited, [])
        stage.tell(node("192.0.2.7"))
        await stage.settled()
        assert stage.engine.awaits == ""

    play(scene)


def test_a_node_that_gets_its_addresses_late_is_followed():
    async def scene(stage):
        stage.engine._node_timeout = 0.0
        stage.tell(*LISTS, node(""), service("a"))
        await stage.settled()
        stage.tell(node("192.0.2.7"))
        await stage.until(lambda: stage.backend.worlds[-1].ipv4.node_ips == (bytes([192, 0, 2, 7]),))

    play(scene)


def test_a_first_address_of_a_family_that_is_not_served_ends_the_program_even_when_it_comes_late():
    async def scene(stage):
        stage.engine._node_timeout = 0.0
        stage.tell(*LISTS, node(""))
        await stage.settled()
        stage.tell(node("fd00::7"))
        with pytest.raises(Unsupported, match="first address of Node node-a is an IPv6 address"):
            await asyncio.wait_for(stage.task, 10)

    play(scene)


@pytest.mark.parametrize("later", [(), ("192.0.2.7",)])
def test_a_node_without_a_known_address_has_ipv4_as_primary_family(later):
    """As in the Go kube-proxy, which then assumes 127.0.0.1: IPv6 alone requires a Node with an IPv6 address."""

    async def scene(stage):
        stage.engine._node_timeout = 0.0
        stage.tell(*LISTS, node(*later or ("",)))
        with pytest.raises(Unsupported, match="IPv4 address, but only IPv6 can be served" if later else "bindAddress"):
            await asyncio.wait_for(stage.task, 10)

    play(scene, families=(V6,))


def test_a_node_with_a_first_ipv6_address_can_run_without_ipv4():
    async def scene(stage):
        stage.tell(*LISTS, node("fd00::7"))
        await stage.settled()
        assert stage.backend.worlds[-1].ipv6.node_ips

    play(scene, families=(V6,))


def test_a_new_address_of_the_api_server_takes_a_services_external_ip_away():
    async def scene(stage):
        await started(stage, service("a", external_ips=["198.51.100.7"]))
        assert len(stage.programmed()["a"][0].frontends) == 2
        stage.engine._servers = lambda: {("198.51.100.7", 80)}
        stage.engine.addresses_changed()
        await stage.until(lambda: len(stage.programmed()["a"][0].frontends) == 1)

    play(scene)


def test_changed_local_addresses_are_looked_at():
    async def scene(stage):
        await started(stage)
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        stage.engine.addresses_changed()
        await stage.until(lambda: stage.backend.calls)
        assert stage.backend.worlds[-1].ipv4.nodeport_ips == (bytes([192, 0, 2, 5]),)

    play(scene, nodeport_addresses=("192.0.2.0/24",))


def test_a_new_nodeport_address_concerns_every_udp_service():
    async def scene(stage):
        await started(stage, service("a", protocol="UDP"), service("tcp", 2))
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        stage.engine.addresses_changed()
        await stage.until(lambda: stage.notes.commits)
        [commit] = stage.notes.commits
        assert (commit.family, commit.full, commit.everything) == (V4, False, True)
        assert [change.name[1] for change in commit.changes] == ["a"]

    play(scene, nodeport_addresses=("192.0.2.0/24",))


def test_a_world_that_one_family_cannot_take_comes_to_all_once_more():
    """As when userspace mode fails to get the node's addresses: the other family would never get them."""

    async def scene(stage):
        await started(stage, service("a"), service("six", 6, V6))
        stage.backends[0].world_failures = [True]
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        stage.engine.addresses_changed()
        for backend in stage.backends:
            await stage.until(lambda b=backend: b.worlds[-1].ipv4.nodeport_ips == (bytes([192, 0, 2, 5]),))

    play(scene, families=(V4, V6), nodeport_addresses=("192.0.2.0/24",))


def test_local_addresses_that_cannot_be_read_are_read_again():
    async def scene(stage):
        await started(stage, service("a"))
        stage.addresses = ApplyError("addresses changed while being read")
        stage.engine.addresses_changed()
        stage.tell(endpoints("a", 1))
        await _sleep(0.01)
        stage.addresses = {V4: [bytes([192, 0, 2, 5])]}
        await stage.until(lambda: stage.backend.worlds[-1].ipv4.nodeport_ips == (bytes([192, 0, 2, 5]),))
        await stage.settled()
        assert stage.programmed()["a"][0].cluster

    play(scene, nodeport_addresses=("192.0.2.0/24",))
