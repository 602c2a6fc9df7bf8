"""Open pages: all get the same bytes at once, a page that does not read is reset, and nothing runs without a page."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from kubeproxy.page import feed as module
from kubeproxy.page.feed import MOST_PAGES, WAITING, Feed


class FakeNews:
    def __init__(self):
        self.revision = 0
        self.troubles = 0
        self.taken = 0
        self.heard = []

    def begin(self):
        self.revision += 100

    def arrived(self, events):
        self.heard += events

    def settled(self, changes):
        self.revision += 1

    def take(self):
        self.taken += 1
        return {"revision": self.revision}


class FakeLooks:
    def __init__(self, tell):
        self.tell = tell
        self.running = self.ran = self.troubles = 0

    async def run(self):
        self.running += 1
        self.ran += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1

    def look_soon(self):
        self.troubles += 1


class FakeFlows:
    async def run(self):
        await asyncio.Event().wait()

    def settled(self, changes): ...


class Stage:
    def __init__(self):
        self.audience = None
        self.news = FakeNews()
        self.feed = Feed(self.news, lambda: {"node": "n"}, self._listen, self._make)

    def _make(self, tell):
        self.looks = FakeLooks(tell)
        return FakeFlows(), self.looks

    def _listen(self, audience):
        self.audience = audience


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.002)
    monkeypatch.setattr(module, "IDLE", 0.01)
    monkeypatch.setattr(module, "LINGER", 0.01)


def play(scene):
    async def main():
        async with asyncio.timeout(20):
            stage = Stage()
            try:
                await scene(stage)
            finally:
                await stage.feed.close()
            assert not stage.feed.is_open
            assert stage.audience is None
            assert stage.looks.running == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def events(piece):
    """Return the kind and data of each event in some bytes."""
    found = []
    for block in piece.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def until(holds):
    while not holds():  # noqa: ASYNC110 - the awaited condition has no event
        await asyncio.sleep(0.001)


def test_nothing_runs_without_a_page():
    async def scene(stage):
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(0.02)
        assert (stage.audience, stage.news.taken, stage.looks.ran, stage.feed.is_open) == (None, 0, 0, False)

    play(scene)


def test_a_page_gets_a_greeting_and_events():
    async def scene(stage):
        async with aclosing(stage.feed.stream()) as page:
            first = await anext(page)
            assert first.startswith(b"retry: 1000\n\n")
            assert events(first) == [("hello", {"facts": {"node": "n"}, "revision": 100})]
            assert stage.audience is stage.feed
            stage.feed.settled([])
            assert ("now", {"revision": 101}) in events(await anext(page))
            stage.looks.tell("flows", b'{"a":1}')
            stage.looks.tell("problems", {"findings": []})
            await until(lambda: not stage.feed._pending)
            told = events(await anext(page))
            assert [each for each in told if each[0] != "now"] == [("flows", {"a": 1}), ("problems", {"findings": []})]
            async with aclosing(stage.feed.stream()) as second:  # stored state is sent at once
                assert [kind for kind, _ in events(await anext(second))] == ["hello", "problems"]

    play(scene)


def test_all_processes_end_after_the_last_page_and_start_again():
    async def scene(stage):
        async with aclosing(stage.feed.stream()) as page:
            await anext(page)
            await until(lambda: stage.looks.running)
        assert stage.feed.is_open  # a user who reloads the page finds the same state
        async with aclosing(stage.feed.stream()) as page:
            assert events(await anext(page))[0][1]["revision"] == 100
        await until(lambda: not stage.feed.is_open)
        assert stage.audience is None
        await until(lambda: not stage.looks.running)
        taken = stage.news.taken
        await asyncio.sleep(0.02)
        assert stage.news.taken == taken
        async with aclosing(stage.feed.stream()) as page:
            assert events(await anext(page))[0][1]["revision"] == 200
            await until(lambda: stage.looks.ran == 2)

    play(scene)


def test_messages_are_coalesced(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.05)
    monkeypatch.setattr(module, "IDLE", 100.0)

    async def scene(stage):
        async with aclosing(stage.feed.stream()) as page:
            await anext(page)
            for _ in range(200):
                stage.feed.settled([])
                stage.feed.arrived([])
            assert events(await anext(page)) == [("now", {"revision": 300})]
            for _ in range(200):
                stage.feed.settled([])
                await asyncio.sleep(0)
            assert stage.news.taken == 1  # the pause is not over
            assert events(await anext(page)) == [("now", {"revision": 500})]
            assert stage.news.taken == 2

    play(scene)


def test_all_pages_are_sent_the_same_bytes():
    async def scene(stage):
        async with aclosing(stage.feed.stream()) as one, aclosing(stage.feed.stream()) as other:
            await anext(one)
            await anext(other)
            waiting = list(stage.feed._pages)
            await until(lambda: all(page._pieces for page in waiting))
            first, second = (page._pieces[0] for page in waiting)
            assert first is second

    play(scene)


def test_a_page_that_does_not_read_is_reset():
    async def scene(stage):
        async with aclosing(stage.feed.stream()) as slow:
            await anext(slow)
            (page,) = stage.feed._pages
            longest = 0
            while not page.behind:
                stage.feed.settled([])
                longest = max(longest, len(page._pieces))
                await asyncio.sleep(0.001)
            taken = stage.news.taken
            await until(lambda: stage.news.taken > taken + 2)
            assert len(page._pieces) == 0  # no state is stored for it any more
            assert longest <= WAITING
            assert events(await anext(slow))[0] == (
                "hello",
                {"facts": {"node": "n"}, "revision": stage.news.revision},
            )
            assert events(await anext(slow))[0][0] == "now"

    play(scene)


def test_a_page_without_events_gets_keepalive_comments(monkeypatch):
    monkeypatch.setattr(module, "ALIVE", 0.005)
    monkeypatch.setattr(module, "IDLE", 100.0)

    async def scene(stage):
        async with aclosing(stage.feed.stream()) as page:
            await anext(page)
            assert await anext(page) == b":\n\n"

    play(scene)


def test_there_are_so_many_pages_at_most():
    async def scene(stage):
        pages = [stage.feed.stream() for _ in range(MOST_PAGES)]
        for page in pages:
            await anext(page)
        assert stage.feed.is_full
        assert [piece async for piece in stage.feed.stream()] == []
        await pages[0].aclose()
        assert not stage.feed.is_full
        for page in pages[1:]:
            await page.aclose()

    play(scene)


def test_troubles_are_passed_on():
    async def scene(stage):
        async with aclosing(stage.feed.stream()) as page:
            await anext(page)
            before = stage.news.take

            def take():
                stage.news.troubles = 1
                return before()

            stage.news.take = take
            await until(lambda: stage.looks.troubles)
            assert stage.looks.troubles == 1

    play(scene)


def test_closing_ends_it_although_pages_are_open():
    async def scene(stage):
        page = stage.feed.stream()
        await anext(page)
        await until(lambda: stage.looks.running)
        await stage.feed.close()
        assert stage.looks.running == 0
        await page.aclose()

    play(scene)
