"""Questions of the page, answered by a companion process: one at a time, with a time limit."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from kubeproxy.page import beside as module
from kubeproxy.page.beside import FormQuestions, UnansweredError

ECHO = "import sys, json; print(json.dumps({'words': sys.argv[1:], 'asked': json.loads(sys.stdin.readline())}))"


def ask(program, *questions, socket="/run/s"):
    asking = FormQuestions(socket, lambda: [sys.executable, "-c", program])

    async def main():
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(asking.why, questions), return_exceptions=True)

    return asyncio.run(main())


def test_a_process_is_asked_and_its_answer_returned():
    question = {"source": "node", "target": "--x\ny"}
    (answer,) = ask(ECHO, question)
    assert json.loads(answer) == {"words": ["companion", "question", "--control-socket", "/run/s"], "asked": question}


def test_one_runs_at_a_time(tmp_path):
    lock = tmp_path / "lock"
    alone = f"import os, time; os.mkdir({str(lock)!r}); time.sleep(0.05); os.rmdir({str(lock)!r}); print('{{}}')"
    assert ask(alone, {}, {}, {}) == [b"{}\n"] * 3


@pytest.mark.parametrize(
    ("program", "socket", "said"),
    [
        ("import time; time.sleep(600)", "/run/s", "took longer than"),
        ("import sys; sys.exit(3)", "/run/s", "ended with exit code 3"),
        ('print(\'{"error": "no proxy"}\')', "/run/s", "no proxy"),
        (ECHO, "", "--control-socket"),
    ],
)
def test_without_an_answer_the_reason_is_reported(monkeypatch, program, socket, said):
    monkeypatch.setattr(module, "QUESTION_SECONDS", 0.5 if "600" in program else 30.0)
    (error,) = ask(program, {}, socket=socket)
    assert isinstance(error, UnansweredError)
    assert said in str(error)


def test_a_process_that_cannot_be_started_is_reported():
    async def main():
        await FormQuestions("/run/s", lambda: ["/nowhere/python"]).why({})

    with pytest.raises(UnansweredError, match="cannot be started: No such file"):
        asyncio.run(main())
