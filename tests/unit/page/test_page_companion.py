"""Companion processes of the proxy: requests, answers, restarts, and their end with the last client."""

from __future__ import annotations

import asyncio
import os
import sys
import zipfile
from contextlib import suppress

import pytest

from kubeproxy.page import beside as module
from kubeproxy.page.beside import Companion, ourselves

ECHO = "import sys\nfor line in sys.stdin: print('heard', line.strip(), flush=True)"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(600)"


async def silence():
    return
    yield


class Stage:
    def __init__(self, program, greet=silence):
        self.said: list[bytes] = []
        self.ended: list[str] = []
        self.companion = Companion(
            ["echo"], self.said.append, self.ended.append, greet, lambda: [sys.executable, "-c", program]
        )

    @property
    def pid(self):
        process = self.companion._process
        return process.pid if process is not None else 0


async def hello():
    yield b"hello\n"


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - the awaited condition has no event
            await asyncio.sleep(0.005)


def play(stage, scene):
    async def main():
        task = asyncio.create_task(stage.companion.run())
        try:
            await scene(task)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_process_gets_greeting_and_input_and_ends_with_the_proxy():
    stage = Stage(ECHO, hello)
    pids = []

    async def scene(_):
        stage.companion.tell(b"too early\n")
        await until(lambda: stage.said)
        pids.append(stage.pid)
        stage.companion.tell(b"more\n")
        await until(lambda: len(stage.said) == 2)

    play(stage, scene)
    assert stage.said == [b"heard hello", b"heard more"]
    assert stage.ended == []
    assert not is_there(pids[0])


def test_one_that_ends_is_started_again(monkeypatch):
    monkeypatch.setattr(module, "FIRST_RETRY", 0.01)
    stage = Stage("import sys; print('here', flush=True); sys.exit(3)")

    async def scene(_):
        await until(lambda: len(stage.said) >= 2)

    play(stage, scene)
    assert stage.ended[0] == "the proxy's companion process (echo) ended with exit code 3; it is started again"


def test_a_process_that_cannot_be_started_is_reported(monkeypatch):
    monkeypatch.setattr(module, "FIRST_RETRY", 0.01)
    stage = Stage("")
    stage.companion.command = lambda: ["/nowhere/python"]

    async def scene(_):
        await until(lambda: stage.ended)

    play(stage, scene)
    assert "cannot be started: No such file or directory" in stage.ended[0]


def test_one_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    stage = Stage(DEAF)
    pids = []

    async def scene(_):
        await until(lambda: stage.said)
        pids.append(stage.pid)

    play(stage, scene)
    assert not is_there(pids[0])


def test_one_that_does_not_read_is_not_kept_for(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", 1000)
    monkeypatch.setattr(module, "FIRST_RETRY", 60.0)
    stage = Stage("import time; print('here', flush=True); time.sleep(600)", hello)

    async def scene(_):
        await until(lambda: stage.said and stage.companion._greeted)
        while not stage.ended:
            stage.companion.tell(b"x" * 10_000 + b"\n")
            await asyncio.sleep(0)

    play(stage, scene)
    assert "ended with exit code -9" in stage.ended[0]


def test_a_process_with_too_much_output_is_ended(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", 1000)
    stage = Stage("import time; print('x' * 100_000, flush=True); time.sleep(600)")

    async def scene(_):
        await until(lambda: stage.ended)

    play(stage, scene)
    assert "wrote too much output" in stage.ended[0]


def test_the_command_line_of_a_companion(monkeypatch, tmp_path):
    assert ourselves() == [sys.executable, "-P", "-m", "kubeproxy.cli"]
    one_file = tmp_path / "kube-proxy.pyz"
    with zipfile.ZipFile(one_file, "w") as archive:
        archive.writestr("__main__.py", "print('here')")
    monkeypatch.setattr(sys, "argv", [str(one_file), "--config", "x"])
    assert ourselves() == [sys.executable, str(one_file)]


@pytest.mark.parametrize("look", ["flows", "problems"])
def test_the_real_one_ends_with_its_input(look):
    async def main():
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*ourselves(), "companion", look, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(30):
            assert await process.wait() == 0

    asyncio.run(main())
