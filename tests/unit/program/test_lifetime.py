"""The program's end after one of its parts has ended."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kubeproxy.program.lifetime import Lifetime


async def outcome(work):
    """Return how the program ends with this part; fail if it continues."""
    lifetime = Lifetime(lambda: None)
    lifetime.start("part", work)
    async with asyncio.timeout(30):
        return await lifetime.end()


async def stray():
    """A part that waits for an object which other parts cancel."""
    waited = asyncio.get_running_loop().create_future()
    waited.cancel()
    await waited


async def broken():
    raise ValueError("broken")


def test_a_part_that_fails_ends_the_program():
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(outcome(broken()))


def test_a_part_that_was_cancelled_by_others_ends_the_program():
    """Otherwise the part would be missing without a notice: a proxy without its engine looks healthy."""
    with pytest.raises(RuntimeError, match="part was cancelled"):
        asyncio.run(outcome(stray()))


def test_parts_that_are_cancelled_at_the_end_change_nothing():
    ended = []

    async def part():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def end():
        lifetime = Lifetime(lambda: None)
        lifetime.start("part", part())
        await asyncio.sleep(0)
        lifetime.stop(3)
        await lifetime.cancel_parts()
        await asyncio.sleep(0)
        return await lifetime.end()

    assert asyncio.run(end()) == 3
    assert ended


def test_the_first_exit_code_is_used():
    async def end():
        lifetime = Lifetime(lambda: None)
        lifetime.stop(2)
        lifetime.fail(ValueError("late"))
        lifetime.stop(0)
        return await lifetime.end()

    assert asyncio.run(end()) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_a_second_one_at_once(monkeypatch, number):
    said, exits = [], []

    async def end():
        second = asyncio.Event()
        monkeypatch.setattr(os, "_exit", lambda code: (exits.append(code), second.set()))
        lifetime = Lifetime(lambda: said.append("last words"))
        lifetime.heed_signals()
        os.kill(os.getpid(), number)
        code = await lifetime.end()
        assert (said, exits) == ([], [])
        os.kill(os.getpid(), number)
        async with asyncio.timeout(30):
            await second.wait()
        return code

    assert asyncio.run(end()) == 0
    assert (said, exits) == (["last words"], [1])
