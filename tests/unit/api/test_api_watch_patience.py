"""Slow lists, silent watches, servers with older data, and the pause after a failure."""

import asyncio
import json

import msgspec
import pytest

from kubeproxy.api.decode import WatchChanges
from kubeproxy.api.recovery import StreamClock
from kubeproxy.api.source import ListPace
from kubeproxy.api.status import OutOfStep
from kubeproxy.engine.pacing import Backoff
from kubeproxy.model.events import Deleted
from support.scripted import bookmark, event, eventually, service
from support.watch_scripts import PACE, fails, kinds, lists, scripted, watch, watches

IMPATIENT = msgspec.structs.replace(PACE, silence=0.15, longest_silence=0.6, trickle=0.3)


def test_a_streamed_list_that_trickles_is_given_up(caplog):
    async def trickles(request, reply):
        await reply.begin()
        line = json.dumps(event("ADDED", service("a", 3))).encode()
        for at in range(len(line)):
            await reply.chunk(line[at : at + 1])
            await asyncio.sleep(0.02)
        await reply.forever()

    whole = watches(event("ADDED", service("b", 3)), bookmark("9", initial_end=True))

    async def use(seen, server, reflector):
        await seen.until(1)
        return seen

    assert watch(scripted(trickles, whole), use, plain=False, pace=IMPATIENT) == ["= b"]
    assert "arrives too slowly" in caplog.text


def test_a_silent_watch_is_listed_again(caplog):
    """Its connection is open, and a middlebox answers the keepalive: only the silence shows the failure."""
    script = scripted(lists(service("a"), version="5"), watches(), lists(service("b"), version="6"), watches())

    async def use(seen, server, reflector):
        await seen.until(2)
        assert kinds(server)[:3] == ["list", "watch", "list"]
        assert "resourceVersion" not in server.requests[2].query  # the newest version, not that of a cache
        return seen

    assert watch(script, use, pace=IMPATIENT) == ["= a", "= b"]
    assert "was silent" in caplog.text


def test_silence_is_counted_over_watches_that_end():
    async def brief(request, reply):
        await reply.begin()
        await asyncio.sleep(0.06)
        await reply.end()

    script = scripted(lists(service("a"), version="5"), *[brief] * 5, lists(service("b")), watches())

    async def use(seen, server, reflector):
        await eventually(lambda: kinds(server).count("list") == 2)
        return kinds(server).index("list", 1)

    assert watch(script, use, pace=IMPATIENT) in {3, 4, 5}


def test_bookmarks_break_the_silence_and_cut_lines_do_not():
    async def half_lines(request, reply):
        await reply.begin()
        for _ in range(4):
            await asyncio.sleep(0.06)
            await reply.chunk(bookmark("9"))
        for _ in range(30):
            await asyncio.sleep(0.03)
            await reply.chunk(b"x")

    script = scripted(lists(version="5"), half_lines, lists(service("b")), watches())

    async def use(seen, server, reflector):
        await eventually(lambda: reflector.status.bookmarked)
        await seen.until(2)
        assert not reflector.status.bookmarked  # the server may not send further ones
        return server.requests[2].at - server.requests[1].at

    assert watch(script, use, pace=IMPATIENT) > 0.06 * 4


def test_the_silence_limit_grows_for_servers_without_bookmarks(monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        clock = StreamClock(ListPace(silence=100.0, longest_silence=350.0))
        for least in (100, 200, 350, 350):
            assert least <= clock.left <= 1.25 * least
            for silent in (60.0, clock.left - 61.0):
                async with clock.begin():
                    clock.opened(listing=False)
                    now += silent
                    clock.ended()
            assert clock.left == pytest.approx(1.0)
            async with clock.begin():
                clock.opened(listing=False)
                assert isinstance(clock.error(), OutOfStep)
        async with clock.begin():
            clock.opened(listing=False)
            clock.received(1, WatchChanges([Deleted("services", "ns", "a")], "", False, None), listing=False)
            assert clock.left >= 350.0
            clock.received(1, WatchChanges([], "7", False, None), listing=False)
            assert 100.0 <= clock.left <= 125.0

    asyncio.run(main())


@pytest.mark.parametrize("what", ["bookmark", "event"])
def test_a_server_with_older_versions_is_listed_again(what, caplog):
    """A server that was restored from a backup accepts any watch, and lacks all later versions."""
    old = bookmark("99") if what == "bookmark" else event("ADDED", service("old", 99))
    script = scripted(lists(service("a"), version="1000"), watches(old), lists(service("b"), version="99"), watches())

    async def use(seen, server, reflector):
        await eventually(lambda: "= b" in seen)
        assert "resourceVersion" not in server.requests[2].query
        return seen

    assert watch(script, use) == ["= a", *["+old"] * (what == "event"), "= b"]
    assert "went back from version 1000 to 99" in caplog.text


@pytest.mark.parametrize(("known", "seen_next"), [("9", "10"), ("10", "10"), ("a9", "a1"), ("7", "x")])
def test_increasing_and_incomparable_versions_are_accepted(known, seen_next):
    script = scripted(lists(version=known), watches(bookmark(seen_next)))

    async def use(seen, server, reflector):
        await eventually(lambda: reflector.status.resource_version == seen_next)
        await asyncio.sleep(0.05)
        return kinds(server)

    assert watch(script, use) == ["list", "watch"]


@pytest.fixture
def pauses(monkeypatch):
    """Return a list that gets each pause, in seconds, that follows a failure."""
    pauses, failed = [], Backoff.failed

    def chosen(backoff):
        pauses.append(failed(backoff))
        return pauses[-1]

    monkeypatch.setattr(Backoff, "failed", chosen)
    return pauses


def test_a_successful_list_resets_the_pauses_after_failures(pauses):
    """Otherwise a server that failed for minutes would make the next failure, seconds or days later, cost 30 s."""
    pace = msgspec.structs.replace(PACE, first=0.01, cap=30.0)
    script = scripted(*[fails(500)] * 5, lists(version="5"), fails(410), fails(500), lists(service("a")), watches())

    async def use(seen, server, reflector):
        await seen.until(2)

    watch(script, use, pace=pace)
    assert pauses[4] > 0.07 > 0.03 > pauses[-1]


def test_junk_in_watches_costs_lists_nothing(pauses):
    pace = msgspec.structs.replace(PACE, first=0.01, cap=30.0)
    junk = watches(b"{]junk\n")
    script = scripted(
        lists(version="5"), *[junk, junk, lists(version="5")] * 3, fails(410), fails(500), lists(), watches()
    )

    async def use(seen, server, reflector):
        await seen.until(5)
        return reflector

    reflector = watch(script, use, pace=pace)
    assert pauses[-1] < 0.03
    assert reflector._recovery._listing.failures == 0
