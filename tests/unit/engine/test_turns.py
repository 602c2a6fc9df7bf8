"""Work in threads beside the event loop: a cancelled caller waits for the end of the thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kubeproxy.engine.pacing import exhaust, to_its_end


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_waits_for_the_thread(fails, times):
    """The thread's objects are closed by then: a listener of userspace mode would wait for an answer for 30 s."""
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def transactions():
        begun.set()
        go_on.wait(30)
        ended.append(True)
        if fails:
            raise ValueError("after the end of all")
        yield 1
        ended.append("more")

    async def main():
        work = asyncio.create_task(exhaust(transactions()))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(times):
            work.cancel()
            await asyncio.sleep(0.05)
            assert not work.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())
    assert ended == [True]


def test_a_cancelled_caller_has_ended_its_call():
    """As a socket that was not subscribed to transactions, and must subscribe again before it is closed."""
    steps, begun = [], threading.Event()

    def transactions():
        try:
            while True:
                begun.set()
                yield 1
        finally:
            steps.append("ended")

    held = transactions()

    async def main():
        work = asyncio.create_task(exhaust(held))
        await asyncio.to_thread(begun.wait, 30)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        steps.append("closed")

    asyncio.run(main())
    assert steps == ["ended", "closed"]


def test_an_error_is_passed_on_without_references_to_it():
    async def main():
        with pytest.raises(ZeroDivisionError) as caught:
            await to_its_end(lambda: 1 // 0)
        return caught.value.__traceback__

    trace = asyncio.run(main())
    while trace is not None:
        assert not any(isinstance(value, asyncio.Future) for value in trace.tb_frame.f_locals.values())
        trace = trace.tb_next
