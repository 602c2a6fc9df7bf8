"""Names of Nodes in answers: requested seldom, cached; never a wait or an error."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy.ask import places as places_module
from kubeproxy.ask.places import LASTING, Places, with_node
from kubeproxy.ask.why import Explained, Why
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import pack
from kubeproxy.model.answer import Packet
from kubeproxy.model.plan import Globals

ADDRESS = pack("10.0.0.1")


class World:
    """A source of Nodes, and a clock."""

    def __init__(self, fails=None):
        self.now = 0.0
        self.asked = 0
        self.fails = fails
        self.places = Places(self.read, lambda: self.now)

    async def read(self):
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return {ADDRESS: f"node-{self.asked}"}

    async def node(self):
        return await self.places.node(ADDRESS)


def test_an_answer_is_reused_for_a_while():
    async def main():
        world = World()
        seen = []
        for now in (0.0, LASTING - 1, LASTING, LASTING + 1):
            world.now = now
            seen.append(await world.node())
        return seen, world.asked

    assert asyncio.run(main()) == (["node-1", "node-1", "node-2", "node-2"], 2)


def test_one_request_answers_all_questions_of_a_time():
    async def main():
        world = World()
        seen = await asyncio.gather(*(world.node() for _ in range(5)))
        return seen, world.asked

    assert asyncio.run(main()) == (["node-1"] * 5, 1)


@pytest.mark.parametrize("error", [ConfigError("no"), OSError(5, "no"), KeyError("internal")])
def test_an_error_is_no_answer_and_is_not_retried_at_once(error):
    async def main():
        world = World(error)
        return [await world.node() for _ in range(3)], world.asked

    assert asyncio.run(main()) == (["", "", ""], 1)


def test_a_page_that_goes_while_it_waits_leaves_nothing_behind():
    async def main():
        world = World()
        gone = asyncio.create_task(world.node())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return await world.node(), world.asked

    assert asyncio.run(main()) == ("node-2", 2)


def test_no_caller_waits_long(monkeypatch):
    monkeypatch.setattr(places_module, "TIMEOUT", 0.02)

    async def main():
        places = Places(lambda: asyncio.Event().wait())
        return await asyncio.gather(*(places.node(ADDRESS) for _ in range(5)))

    assert asyncio.run(main()) == [""] * 5


@pytest.mark.parametrize(
    ("stranger", "node", "decides"),
    [(ADDRESS, "node-b", "node-b"), (None, "node-b", ""), (ADDRESS, "node-a", ""), (ADDRESS, "", "")],
)
def test_a_client_that_is_another_node_is_named(stranger, node, decides):
    why = Why(source="10.0.0.1", destination="10.96.0.1:80/tcp", outcome="forwarded", client_sees="")

    async def main():
        asked = Packet(stranger, b"\n\x60\0\1", 6, 80)
        made = Explained(why, None, Globals(node_name="node-a"), asked, ((stranger, "client"),) if stranger else ())
        return (await with_node(made, Places(nodes))).why

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
        made = Explained(why, None, Globals(node_name="node-a"), asked, ((ADDRESS, "destination"),))
        return (await with_node(made, Places(nodes))).why

    async def nodes():
        return {ADDRESS: node} if node else {}

    found = asyncio.run(main())
    assert ("decided on node-b, where the destination is" in found.heading) is decides
    question = "why 10.244.0.7 10.0.0.2:30080/tcp"
    assert any(f"ask on node-b: `kube-proxy {question}`" in fix for fix in found.fixes) is decides
