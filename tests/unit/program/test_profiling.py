"""Pages that the proxy serves with enableProfiling."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref

import pytest

from kubeproxy.program.profiling import LEVEL_PAGE, profiling_pages, sample
from kubeproxy.server.http import Request, routes


def pages(levels=None):
    set_level = (lambda _: None) if levels is None else levels.append
    return routes(profiling_pages(set_level), frozenset((LEVEL_PAGE,)))


@pytest.mark.parametrize(
    ("method", "body", "status", "answer"),
    [
        ("PUT", b"4", 200, b"successfully set klog.logging.verbosity to 4\n"),
        ("PUT", b"4\n", 200, b"successfully set klog.logging.verbosity to 4\n"),
        ("PUT", b"loud", 400, b"failed set klog.logging.verbosity loud: not a number of 31 bits\n"),
        ("PUT", b"2147483648", 400, b"failed set klog.logging.verbosity 2147483648: not a number of 31 bits\n"),
        ("PUT", b"5" * 5000, 400, b"failed set klog.logging.verbosity " + b"5" * 40 + b": not a number of 31 bits\n"),
        ("PUT", b"", 400, b"failed set klog.logging.verbosity : not a number of 31 bits\n"),
        ("GET", b"", 406, b"unsupported http method\n"),
    ],
)
def test_the_level_of_the_log(method, body, status, answer):
    levels = []
    response = pages(levels)(Request(method, LEVEL_PAGE, "", body=body))
    assert (response.status, response.body) == (status, answer)
    assert levels == ([4] if status == 200 else [])


def test_other_pages_are_read_only():
    assert pages()(Request("PUT", "/debug/pprof/", "")).status == 405
    assert b"profile" in pages()(Request("GET", "/debug/pprof/", "")).body
    assert b"python" in pages()(Request("GET", "/debug/pprof/cmdline", "")).body


def test_the_command_line_shows_no_password(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["kube-proxy", "--master=https://u:hunter2@h"])
    body = pages()(Request("GET", "/debug/pprof/cmdline", "")).body
    assert body == b"kube-proxy\0--master=https://<redacted>@h"


def test_stacks_of_threads_and_tasks():
    async def ask():
        waiting = asyncio.create_task(asyncio.sleep(60), name="sleeper")
        await asyncio.sleep(0)
        text = pages()(Request("GET", "/debug/pprof/goroutine", "")).body.decode()
        waiting.cancel()
        return text

    text = asyncio.run(ask())
    assert f"thread {threading.current_thread().name}\n" in text
    assert "task sleeper\n" in text
    assert "in test_stacks_of_threads_and_tasks" in text


def test_a_profile_shows_where_time_goes_and_only_one_is_taken_at_a_time():
    handler = pages()

    async def read(pieces):
        return b"".join([piece async for piece in pieces]).decode()

    async def ask():
        first = asyncio.create_task(read(handler(Request("GET", "/debug/pprof/profile", "seconds=0.3")).body))
        second = handler(Request("GET", "/debug/pprof/profile", "seconds=0.3"))
        await asyncio.sleep(0.05)
        assert await read(second.body) == "a profile is being taken already\n"
        assert handler(Request("GET", "/debug/pprof/profile", "seconds=0.3")).status == 500
        return await first

    text = asyncio.run(ask())
    assert "test_profiling.py:test_a_profile_shows_where_time_goes" in text
    assert all(line.rpartition(" ")[2].isdigit() for line in text.splitlines())


@pytest.mark.parametrize("query", ["seconds=0", "seconds=x", "seconds=-1", "seconds=1e9", "seconds=nan"])
def test_a_profile_has_a_length(query):
    assert pages()(Request("GET", "/debug/pprof/profile", query)).status == 400


def test_a_profile_ends_when_its_client_disconnects():
    stop = threading.Event()
    stop.set()
    assert not sample(60, stop)


def test_stacks_leave_nothing_for_the_garbage_collector():
    class Local:
        pass

    def ask():
        local = Local()
        assert "in ask" in stacks_text()
        return weakref.ref(local)

    def stacks_text():
        return pages()(Request("GET", "/debug/pprof/goroutine", "")).body.decode()

    async def main():
        return ask()

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()
