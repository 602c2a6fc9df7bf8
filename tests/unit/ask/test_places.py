"""Zones of endpoints in answers: requested seldom, for one Service at a time, cached; never a wait or an error."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy.ask import zones as places_module
from kubeproxy.ask.why import Explained, Target, Why
from kubeproxy.ask.zones import BURST, LASTING, MOST, Places, with_node, with_zones
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import pack
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import Globals

ADDRESS = pack("10.0.0.1")


class World:
    """A source of zones, and a clock."""

    def __init__(self, fails=None):
        self.now = 0.0
        self.asked = []
        self.fails = fails
        self.at_once = self.most_at_once = 0
        self.places = Places(self.ask, lambda: self.now)

    async def ask(self, service):
        self.asked.append(service[1])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.fails is not None:
            raise self.fails
        return {ADDRESS: f"zone-{len(self.asked)}"}

    async def zone(self, name):
        return (await self.places.zones(("ns", name))).get(ADDRESS, "")


def test_an_answer_holds_for_a_while():
    async def main():
        world = World()
        seen = []
        for now in (0.0, LASTING - 1, LASTING, LASTING + 1):
            world.now = now
            seen.append(await world.zone("web"))
        return seen, world.asked

    assert asyncio.run(main()) == (["zone-1", "zone-1", "zone-2", "zone-2"], ["web", "web"])


def test_one_question_at_a_time_and_one_for_all_equal_questions():
    async def main():
        world = World()
        seen = await asyncio.gather(*(world.zone(name) for name in ["a", "b", "a", "b", "c"]))
        return seen, world.asked, world.most_at_once

    assert asyncio.run(main()) == (["zone-1", "zone-2", "zone-1", "zone-2", "zone-3"], ["a", "b", "c"], 1)


def test_reading_all_services_sends_few_requests_and_stores_little():
    async def main():
        world = World()
        seen = [await world.zone(f"s{number}") for number in range(1000)]
        kept = len(world.places._known)
        again = await world.zone(f"s{BURST - 1}")
        world.now += 1.0
        return seen, kept, again, await world.zone("late"), len(world.asked)

    seen, kept, again, late, asked = asyncio.run(main())
    assert [bool(one) for one in seen] == [True] * BURST + [False] * (1000 - BURST)
    assert (kept, again, late, asked) == (MOST, f"zone-{BURST}", f"zone-{BURST + 1}", BURST + 1)


@pytest.mark.parametrize("error", [ConfigError("no"), OSError(5, "no"), KeyError("internal")])
def test_an_error_is_no_answer_and_is_not_retried_at_once(error):
    async def main():
        world = World(error)
        return [await world.zone("web") for _ in range(3)], world.asked

    assert asyncio.run(main()) == (["", "", ""], ["web"])


def test_a_page_that_goes_while_it_waits_leaves_nothing_behind():
    async def main():
        world = World()
        gone = asyncio.create_task(world.zone("web"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return await world.zone("web"), world.asked

    assert asyncio.run(main()) == ("zone-2", ["web", "web"])


def test_no_caller_waits_long(monkeypatch):
    monkeypatch.setattr(places_module, "TIMEOUT", 0.02)

    async def main():
        places = Places(lambda service: asyncio.Event().wait())
        return await asyncio.gather(*(places.zones(("ns", f"s{number}")) for number in range(5)))

    assert asyncio.run(main()) == [{}] * 5


def test_the_endpoints_of_an_answer_get_their_zones():
    targets = [("10.0.0.1:80", ""), ("10.0.0.2:80", ""), ("10.0.0.1:81", "known"), ("[fd00::1]:80", "")]
    endpoints = tuple(Target(address, 0.25, masqueraded=False, zone=zone) for address, zone in targets)
    asked = []

    async def ask(service):
        asked.append(service)
        return {ADDRESS: "eu-1", pack("fd00::1"): "eu-2"}

    async def main():
        why = Why(source="", destination="", outcome="", client_sees="", service="ns/web", endpoints=endpoints)
        found = await with_zones(why, Places(ask))
        nothing = Why(source="", destination="", outcome="", client_sees="")
        assert await with_zones(nothing, Places(ask)) is nothing
        return [one.zone for one in found.endpoints]

    assert asyncio.run(main()) == ["eu-1", "", "known", "eu-2"]
    assert asked == [("ns", "web")]


@pytest.mark.parametrize(
    ("stranger", "node", "decides"),
    [(ADDRESS, "node-b", "node-b"), (None, "node-b", ""), (ADDRESS, "node-a", ""), (ADDRESS, "", "")],
)
def test_a_client_that_is_another_node_is_named(stranger, node, decides):
    why = Why(source="10.0.0.1", destination="10.96.0.1:80/tcp", outcome="forwarded", client_sees="")

    async def main():
        asked = Packet(stranger, b"\n\x60\0\1", 6, 80)
        made = Explained(why, None, Globals(node_name="node-a"), asked, stranger)
        return (await with_node(made, Places(never, nodes=nodes))).why

    async def never(service):
        raise AssertionError(service)

    async def nodes():
        return {ADDRESS: node} if node else {}

    found = asyncio.run(main())
    assert found.elsewhere is None or found.elsewhere.end == "client"
    assert (found.elsewhere.node if found.elsewhere is not None else "") == decides
    question = "why 10.0.0.1 10.96.0.1:80/tcp"
    fix = f"ask on node-b: `kube-proxy {question}`; or with kubectl from anywhere: `kubectl kubeproxy {question}`"
    assert found.fixes == ((fix,) if decides else ())


@pytest.mark.parametrize(("node", "decides"), [("node-b", True), ("node-a", False), ("", False)])
def test_a_node_that_has_the_destination_is_named(node, decides):
    why = Why(source="10.244.0.7", destination="10.0.0.2:30080/tcp", outcome="not ours", client_sees="")

    async def main():
        asked = Packet(b"\n\xf4\0\7", ADDRESS, 6, 30080)
        made = Explained(why, None, Globals(node_name="node-a"), asked, hosted=ADDRESS)
        return (await with_node(made, Places(nothing, nodes=nodes))).why

    async def nothing(service):
        raise AssertionError(service)

    async def nodes():
        return {ADDRESS: node} if node else {}

    found = asyncio.run(main())
    assert ("decided on node-b, where the destination is" in found.heading) is decides
    question = "why 10.244.0.7 10.0.0.2:30080/tcp"
    assert any(f"ask on node-b: `kube-proxy {question}`" in fix for fix in found.fixes) is decides
