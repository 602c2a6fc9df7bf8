"""What becomes of the program when one of its parts ends."""

from __future__ import annotations

import asyncio

import pytest

from kubeproxy import app


async def outcome(work):
    """How the program ends that has this part; fails when it goes on."""
    program = object.__new__(app.App)
    program._done = asyncio.get_running_loop().create_future()
    program._spawn("part", work)
    async with asyncio.timeout(30):
        return await program._done


async def stray():
    """A part that waits for something which others cancel."""
    waited = asyncio.get_running_loop().create_future()
    waited.cancel()
    await waited


async def broken():
    raise ValueError("broken")


def test_a_part_that_fails_ends_the_program():
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(outcome(broken()))


def test_a_part_that_was_cancelled_by_others_ends_the_program():
    """Else it would be missing from then on, and nobody would know: a proxy without its engine looks healthy."""
    with pytest.raises(RuntimeError, match="part was cancelled"):
        asyncio.run(outcome(stray()))


def test_parts_that_are_cancelled_at_the_end_change_nothing():
    async def end():
        program = object.__new__(app.App)
        program._done = asyncio.get_running_loop().create_future()
        task = program._spawn("part", asyncio.sleep(3600))
        program._stop(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        return await program._done

    assert asyncio.run(end()) == 0
